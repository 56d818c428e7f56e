"""Would the harness notice a mistake? Functions of the package are made wrong one at a time, and a table says where
each fault must show.
"""

from megatron_pgloss.verify.faults.self_test import FAULTS, put_in, self_test

__all__ = ["FAULTS", "put_in", "self_test"]
