"""Synthetic rows: see `megatron_pgloss.verify.data.rows`, where they live."""

from __future__ import annotations

from megatron_pgloss.verify.data.rows import Dice, Row, attach_streams, make_rows, tail_rows

__all__ = ["Dice", "Row", "attach_streams", "make_rows", "tail_rows"]
