"""How a batch looks to the loss: token rows as one HTML page or in the terminal, and curves as PNG.

Renderers take plain data and import nothing of the package but its errors; `rows_of_plan` makes this data from a plan.
jinja2, rich and matplotlib (the ``cli`` extra) are imported when a function that needs them is called.
"""

from __future__ import annotations

from megatron_pgloss.view.cells import TokenCell, TokenRow
from megatron_pgloss.view.curve import Curve, learning_curve
from megatron_pgloss.view.page import token_page
from megatron_pgloss.view.plan_rows import rows_of_plan
from megatron_pgloss.view.row_file import read_rows, write_rows
from megatron_pgloss.view.terminal import token_terminal

__all__ = [
    "Curve",
    "TokenCell",
    "TokenRow",
    "learning_curve",
    "read_rows",
    "rows_of_plan",
    "token_page",
    "token_terminal",
    "write_rows",
]
