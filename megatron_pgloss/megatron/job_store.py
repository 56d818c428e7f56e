"""The store that ``init_process_group`` made, asked by threads that may wait for it in vain."""

from __future__ import annotations

import datetime
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_LOG = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def ask(question: Callable[[], Answer], seconds: float) -> Answer | None:
    """What ``question`` answers to a store within so many seconds, else None; its errors of connections are no answer.

    By a thread: a store whose process was stopped, or that is cut off, answers after its own timeout or never.
    """
    found: list[Answer] = []

    def run() -> None:
        try:
            found.append(question())
        except dist.DistError as error:
            _LOG.info("a store does not answer: %s", error)

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(timeout=seconds)
    return found[0] if found else None


def no_answer(error: RuntimeError | None = None) -> str:
    """With torchrun the store's process is not a rank's but the launcher's."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    why = f" ({str(error).splitlines()[0]})" if error is not None and str(error) else ""
    who = "the launcher on the first machine" if agent else "rank 0, mostly"
    return f"the job's store does not answer{why}: its process ({who}) has ended, has stopped or is cut off from here"


def world_timeout() -> datetime.timedelta:
    """That of the default group."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr,no-any-return]


def job_store() -> Any:
    """The store of the default process group, by a connection of its own where it has one."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store
