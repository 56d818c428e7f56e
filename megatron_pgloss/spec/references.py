"""References by name: policies whose log-probs stand in streams of the batch, each under its own name."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from megatron_pgloss.errors import SpecError
from megatron_pgloss.spec.functions import StreamName
from megatron_pgloss.spec.kinds import COMPUTED


def _named(name: str) -> str:
    if name in COMPUTED or name in ("pi", "policy"):
        raise SpecError(
            f"to={name!r} names no other policy",
            expected="'ref', or the name of a stream of log-probs of your own",
            fix="streams={'teacher': ...} and to='teacher'",
        )
    return name


Reference = Annotated[StreamName, AfterValidator(_named)]
"""``ref``, or a stream of log-probs under the name of its policy (``streams={"teacher": [B, L]}``)."""
