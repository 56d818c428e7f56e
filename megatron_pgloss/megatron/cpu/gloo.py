"""One thread for all process groups of gloo.

Each gloo group has a device of its own, with a thread that wakes a hundred times a second, and Megatron-Core makes some
twenty groups on every rank: ranks that share a few cores spend half of their time in those threads. A device may serve
any number of groups.
"""

from __future__ import annotations

import datetime
from typing import Any


def share_devices() -> None:
    """Let gloo groups that are made from now on share the device of the first of them."""
    from torch.distributed import distributed_c10d as c10d

    plain = c10d.ProcessGroupGloo
    devices: list[Any] = []

    class IsPlain(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, plain)

    class SharedGloo(metaclass=IsPlain):
        """Makes a ``ProcessGroupGloo``; torch looks its class up by name where it makes one."""

        def __new__(cls, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
            if not devices:
                first = plain(store, rank, size, timeout=timeout)  # by torch's own rules: GLOO_SOCKET_IFNAME and others
                devices.extend(first.options._devices)
                return first
            options = plain._Options()
            options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)
            return plain(store, rank, size, options)

    c10d.ProcessGroupGloo = SharedGloo  # type: ignore[misc]
