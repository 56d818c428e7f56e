"""What `tools/bench_loss.py` is made of: peers, phases, plan and loss, collectives, and how they are shown."""
