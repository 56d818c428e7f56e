"""Would the harness notice a mistake? Functions of the package made wrong one at a time, and what must show it."""

from megatron_pgloss.verify.faults.self_test import FAULTS, put_in, self_test

__all__ = ["FAULTS", "put_in", "self_test"]
