"""The command ``verify``: visit layouts, run every loss on each, and compare the results with the oracle's."""
