"""``python -m megatron_pgloss COMMAND``; see `megatron_pgloss.cli`."""

from __future__ import annotations

import sys

from megatron_pgloss.cli import main

if __name__ == "__main__":
    sys.exit(main())
