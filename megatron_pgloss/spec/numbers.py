"""The ranges that the numbers of a spec may lie in, as types that pydantic checks.

A number is a number: text that looks like one, or a bool, is refused.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_pgloss.spec.functions import StreamName

Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Distance = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(strict=True, ge=0, le=1)]
BelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]
AboveOne = Annotated[float, Field(strict=True, gt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Bound = Distance | StreamName
"""A number, or the name of a per-token constant stream of the batch (``streams={"name": [B, L]}``)."""
