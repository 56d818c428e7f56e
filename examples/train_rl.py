"""Real RL on Megatron-Core: a model learns to hunt a hidden number over several turns, by policy gradient.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_rl.py

Four processes are tensor parallel 2 x pipeline parallel 2 unless a flag says otherwise; no GPU is needed. ``--help``
lists the flags. Rollouts are drawn from the very model that is trained, under its layout; nothing is pre-recorded.
"""

from __future__ import annotations

import datetime
import logging
import os
import warnings

import options
import torch
import torch.distributed as dist


def join() -> None:
    """The process group of torchrun, or of this process alone."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend, limit = "nccl" if cuda else "gloo", datetime.timedelta(minutes=5)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


def main() -> None:
    """Parse the arguments, join the process group, train, and leave the group."""
    args = options.parse()
    # At every import Megatron-Core warns of packages that are not installed, and of deprecations.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    logging.disable(logging.WARNING)
    join()
    # init_process_group empties a table of torch.compile that Megatron-Core's import fills: import it after.
    import loop

    loop.run(args)
    dist.barrier()
    dist.destroy_process_group()


# Distributed checkpointing starts processes that import this file again.
if __name__ == "__main__":
    main()
