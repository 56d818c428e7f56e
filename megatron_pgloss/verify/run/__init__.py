"""The command: visit layouts, run every loss on each, and hold what comes out against the oracle."""
