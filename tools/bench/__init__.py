"""The parts of `tools/bench_loss.py`: peers, phases, plan and loss, collectives, and their tables."""
