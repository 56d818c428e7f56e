"""The table of token streams: everything that a batch can say about each token, one row per stream.

A row is a field of `StreamArguments`. Its name is the constructors' keyword, its type is what an editor and mypy know
of it, and its `StreamSpec` says the rest. There is no other list of streams: constructors, `with_stream`, checks, a
plan's presence bits and empty tables, the names for ``needs=`` and the table in docs/conventions.md are made from it.
"""

# No `from __future__ import annotations` here: the annotations are the table.
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Required, TypedDict, get_args, get_type_hints

import torch
from torch import Tensor

from megatron_pgloss.rollouts.arrays import Array

Floats = Tensor | Array | Sequence[float] | Sequence[Sequence[float]]
Wholes = Tensor | Array | Sequence[int] | Sequence[Sequence[int]]
Flags = Tensor | Array | Sequence[bool] | Sequence[Sequence[bool]]
Ids = Tensor | Array | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """The properties of one stream."""

    argument: str = ""
    """Its keyword of the constructors, which is the name of its field in the table."""
    name: str
    """Its name in the batch, in ``x.stream(name)``, in ``needs=`` and in errors."""
    dtype: Literal["float", "log-prob", "whole", "ids", "flag"]
    """``float``: float32 or float64. ``log-prob``: the same, and never above 0. ``whole``: int64. ``flag``: bool.
    ``ids``: several int64 per token, -1 where it has fewer."""
    fill: float
    """Its value where nothing is predicted: at a row's last position, and at padding."""
    shape: Literal["token", "row"] = "token"
    """``token``: one entry per token. ``row``: one per token, one per row, or one number for all."""
    optional: bool = True
    """Whether a batch may lack it."""
    read_by: Literal["loss", "log-probs", "kept sets"] = "loss"
    """What reads the stream. Streams of the log-prob pass and of kept sets (what the sampler could draw) stay in the
    precision that they came in, and do not decide the precision of the loss."""
    help: str
    """What the stream is, in words for the docs."""

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return self.dtype in ("float", "log-prob")

    @property
    def python_floats(self) -> torch.dtype | None:
        """The dtype that Python's floats get in it; a sampler's numbers stay float64, as they were written."""
        if not self.is_float:
            return None
        return torch.float32 if self.read_by == "loss" else torch.float64

    @property
    def absent(self) -> float:
        """Its value at a token for which a trace does not give it; NaN makes a reader visible that should not read
        it.
        """
        return float("nan") if self.is_float else self.fill

    def empty(self, dtype: torch.dtype) -> Tensor:
        """The stream on a rank without rows: it has no tokens. ``dtype`` is that of the loss's streams."""
        if self.dtype == "ids":
            return torch.zeros(0, 0, dtype=torch.int64)
        kinds = {"whole": torch.int64, "flag": torch.bool}
        return torch.zeros(0, dtype=kinds.get(self.dtype, dtype if self.read_by == "loss" else torch.float64))


# fmt: off
class StreamArguments(TypedDict, total=False):
    """Keywords of `TokenBatch.from_padded` and `from_packed`, in token order: entry i is about token i."""

    tokens: Required[Annotated[Wholes, StreamSpec(
        name="tokens", dtype="whole", fill=0, optional=False, help="the tokens that the model reads",
    )]]
    action_mask: Required[Annotated[Flags, StreamSpec(
        name="action", dtype="flag", fill=False, optional=False, help="whether the policy sampled the token",
    )]]
    observation_mask: Annotated[Flags | None, StreamSpec(
        name="target", dtype="flag", fill=False, optional=False,
        help="whether the token is an answer of the environment, a target of cross entropy; by default none is",
    )]
    turn_ids: Annotated[Wholes | None, StreamSpec(
        name="turn", dtype="whole", fill=-1, optional=False,
        help="the turn that the token belongs to, -1 for none; by default counted from `action_mask`",
    )]
    advantages: Annotated[Floats | float | None, StreamSpec(
        name="advantages", dtype="float", fill=0.0, shape="row", help="the advantage of the token",
    )]
    old_logprobs: Annotated[Floats | None, StreamSpec(
        name="old", dtype="log-prob", fill=0.0,
        help="its log-prob under the trainer's model at the start of the update",
    )]
    rollout_logprobs: Annotated[Floats | None, StreamSpec(
        name="rollout", dtype="log-prob", fill=0.0, help="its log-prob as the sampler reported it (mu)",
    )]
    ref_logprobs: Annotated[Floats | None, StreamSpec(
        name="ref", dtype="log-prob", fill=0.0, help="its log-prob under a frozen reference model",
    )]
    values: Annotated[Floats | None, StreamSpec(
        name="values", dtype="float", fill=0.0, help="the value head's output at the start of the update, for `Value`",
    )]
    returns: Annotated[Floats | None, StreamSpec(
        name="returns", dtype="float", fill=0.0, help="the value head's target, for `Value`",
    )]
    temperature: Annotated[Floats | float | None, StreamSpec(
        name="temperature", dtype="float", fill=1.0, shape="row", read_by="log-probs",
        help="the sampler's temperature; above 0 where the policy sampled, and at targets",
    )]
    versions: Annotated[Wholes | int | None, StreamSpec(
        name="versions", dtype="whole", fill=0, shape="row",
        help="the version of the weights that sampled the token, for `Staleness`; read at actions alone",
    )]
    kept_sets: Annotated[Ids | None, StreamSpec(
        name="kept", dtype="ids", fill=-1, read_by="kept sets",
        help="the ids that the sampler could draw from, for `KeptSet`; a token without any had the whole vocabulary",
    )]
    top_k: Annotated[Wholes | int | None, StreamSpec(
        name="top_k", dtype="whole", fill=0, shape="row", read_by="kept sets",
        help="the sampler's top-k, from which kept sets are recomputed; 0 or -1 where off",
    )]
    top_p: Annotated[Floats | float | None, StreamSpec(
        name="top_p", dtype="float", fill=1.0, shape="row", read_by="kept sets",
        help="the sampler's top-p, from which kept sets are recomputed; 1 where off",
    )]
    min_p: Annotated[Floats | float | None, StreamSpec(
        name="min_p", dtype="float", fill=0.0, shape="row", read_by="kept sets",
        help="the sampler's min-p, from which kept sets are recomputed; 0 where off",
    )]
# fmt: on


def _rows() -> tuple[StreamSpec, ...]:
    found = []
    for argument, hint in get_type_hints(StreamArguments, include_extras=True).items():
        annotated = get_args(hint)[0] if argument in StreamArguments.__required_keys__ else hint
        found.append(replace(annotated.__metadata__[0], argument=argument))
    return tuple(found)


STREAMS: tuple[StreamSpec, ...] = _rows()
"""The table's rows, in order."""
BY_NAME: dict[str, StreamSpec] = {row.name: row for row in STREAMS}
BY_ARGUMENT: dict[str, StreamSpec] = {row.argument: row for row in STREAMS}
OPTIONAL: tuple[str, ...] = tuple(row.name for row in STREAMS if row.optional)
"""Names of the streams that a batch may lack; ``needs=`` may name them, and the user's own."""
OFF: dict[str, float] = {row.name: row.fill for row in STREAMS if row.read_by == "kept sets"}
"""Streams that say what the sampler could draw from, each with the value for the whole vocabulary."""
FILL: dict[str, float] = {row.name: row.fill for row in STREAMS}
MADE = ("targets", "observation", "recorded", "interpolation")
"""Streams that the batch or the plan makes from other streams."""


def argument_of(name: str) -> str:
    """The keyword by which a constructor takes the stream ``name``, as text."""
    return f"{BY_NAME[name].argument}=" if name in BY_NAME else f"streams={{{name!r}: ...}}"


def is_own(name: str) -> bool:
    """Whether a stream of the user's own can have this name."""
    taken = name in BY_NAME or name in BY_ARGUMENT or name in MADE or name == "advantage"
    return not taken and name.isidentifier()
