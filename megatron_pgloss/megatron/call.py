"""The keywords of the model's call on a micro-batch, and notes on whether the boundaries of packed rows reached it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_pgloss.errors import DataError, LayoutError, PGLossError, SpecError, UnsupportedError
from megatron_pgloss.megatron import mtp, padding
from megatron_pgloss.megatron.conditions import Setup, in_chain
from megatron_pgloss.planning import MicroBatch

_PACKED = "packed_seq_params"
_FIX = "PolicyLossStep(forward=FN), where FN(model, micro, inputs) calls the model and returns its output"

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Forward = Callable[[Any, MicroBatch, MutableMapping[str, Any]], Any]
"""``FN(model, micro, inputs) -> output``: how a model is run on one micro-batch."""


def plain(model: Any, micro: MicroBatch, inputs: MutableMapping[str, Any]) -> Any:
    """The `Forward` of models whose ``forward`` names what the step hands over."""
    return model(**inputs)


def check(forward: object) -> None:
    """Refuse what is no `Forward`.

    Raises:
        SpecError: it is no function, or cannot be called with a model, a micro-batch and inputs.
    """
    expected = "FN(model, micro, inputs) -> output"
    if not callable(forward):
        raise SpecError("forward= is not a function", expected=expected, got=forward)
    try:
        signature = inspect.signature(forward)
        signature.bind(None, None, None)
    except ValueError:
        return  # it has no signature that Python could read
    except TypeError as error:
        raise SpecError("forward= takes other arguments", expected=expected, got=f"FN{signature}: {error}") from None


@dataclass(slots=True)
class Boundaries:
    """Notes on which micro-batches' boundaries of packed rows were read, chunk by chunk."""

    read: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (chunk, micro-batch) whose boundaries were read."""
    handed_out: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (chunk, micro-batch) that the schedule asked for."""

    def unread(self, chunks: int, microbatches: int) -> PGLossError | None:
        """The error for the first micro-batch whose boundaries no model of this rank was given, or for a schedule that
        did not ask for all of them; or None.
        """
        for chunk in range(chunks):
            ran = sum(one == chunk for one, _ in self.handed_out)
            if ran < microbatches:
                place = f"chunk {chunk}" if chunks > 1 else None
                return another_number("fewer", expected=microbatches, got=ran, where=place)
        for number in range(microbatches):
            for chunk in range(chunks):
                if (chunk, number) not in self.read:
                    return DataError(
                        "a packed micro-batch was run without its boundaries: its rows attended to each other",
                        expected="packed_seq_params given to the model in every micro-batch",
                        where=f"micro-batch {number}" + (f", chunk {chunk}" if chunks > 1 else ""),
                        fix="call the model with **step.inputs(micro, model), or hand over micro.packed_seq_params; "
                        "PolicyLossStep(forward=FN) does it in scoring too",
                    )
        return None


def another_number(more_or_fewer: str, *, expected: object, got: object, where: str | None = None) -> PGLossError:
    """The error of a schedule that was given another number of micro-batches than the step has."""
    return LayoutError(
        f"the schedule ran {more_or_fewer} micro-batches than the step has", expected=expected, got=got, where=where,
        fix="give it num_microbatches=step.num_microbatches and data_iterator=step.data_iterator(), anew in each step",
    )  # fmt: skip


def following(data_iterator: Iterator[Shard]) -> Shard:
    """The next micro-batch.

    Raises:
        LayoutError: there is none.
    """
    micro = next(data_iterator, None)
    if micro is None:
        raise another_number("more", expected="as many as step.num_microbatches", got="one more")
    return micro


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard(MicroBatch):
    """A rank's shard of a micro-batch, as one chunk of its model gets it."""

    chunk: int = 0
    """Index of the chunk among the rank's chunks."""
    boundaries: Boundaries = field(default_factory=Boundaries, repr=False)
    """Where it is noted that this shard's boundaries of packed rows were read."""

    @staticmethod
    def of(micro: MicroBatch, chunk: int, boundaries: Boundaries) -> Shard:
        """``micro`` as the chunk of index ``chunk`` gets it."""
        given = {part.name: getattr(micro, part.name) for part in fields(MicroBatch)}
        return Shard(**given, chunk=chunk, boundaries=boundaries)

    @property
    def packed_seq_params(self) -> PackedSeqParams | None:
        """Megatron's boundaries of packed rows; None for padded ones."""
        self.boundaries.read.add((self.chunk, self.number))
        return packing(self)


class Inputs(MutableMapping[str, Any]):
    """Keywords of a model's ``forward``: a dictionary that notes when the boundaries of packed rows are read."""

    def __init__(self, given: Mapping[str, Any], micro: MicroBatch) -> None:
        self._given, self._micro = dict(given), micro

    def __getitem__(self, name: str) -> Any:
        if name == _PACKED and isinstance(self._micro, Shard):
            self._micro.boundaries.read.add((self._micro.chunk, self._micro.number))
        return self._given[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._given[name] = value

    def __delitem__(self, name: str) -> None:
        del self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __repr__(self) -> str:
        return f"Inputs({', '.join(self._given)})"


def packing(micro: MicroBatch) -> PackedSeqParams | None:
    """Megatron's boundaries of packed rows; None for padded ones."""
    if micro.cu_seqlens is None:
        return None
    cu = micro.cu_seqlens.to(micro.device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu,
        max_seqlen_q=micro.max_seqlen, max_seqlen_kv=micro.max_seqlen,
    )  # fmt: skip


def inputs(micro: MicroBatch, model: Any, bare: Any, config: Any, *, strict: bool, masked: bool = False) -> Inputs:
    """Keywords for the model's ``forward`` on ``micro``.

    On offer are tokens, positions, packed boundaries, the padding mask of a router and MTP's loss mask. The result has
    those that ``forward`` names, or all of them where it takes any keyword. It has ``fp32_output=False`` as well where
    a Float16Module would upcast the logits, which takes twice the memory and more traffic than the whole loss.

    Args:
        micro: this rank's shard.
        model: the chunk as the schedule hands it over, wrapped.
        bare: the same chunk, unwrapped.
        config: its TransformerConfig.
        strict: whether to refuse a ``forward`` that does not take a keyword that the model needs.
        masked: whether to hand over ``padding_mask`` in training.

    Raises:
        UnsupportedError: with ``strict``, for such a ``forward``.
    """
    packed = micro.cu_seqlens is not None
    if strict and (missing := not_taken(bare, config, packed=packed)):
        raise UnsupportedError(
            "the model's forward and the step call their inputs differently", expected=f"keywords {missing}",
            got=f"{type(bare).__name__}.forward{_signature(bare)}", fix=_FIX,
        )  # fmt: skip
    offered: dict[str, Any] = {"input_ids": micro.input_ids, "position_ids": micro.position_ids, "attention_mask": None}
    if packed:
        offered[_PACKED] = packing(micro)
    if mtp.active(config):
        offered["loss_mask"] = mtp.loss_mask(micro)
    if masked and bare.training and (hidden := padding.mask(micro)) is not None:
        offered["padding_mask"] = hidden
    takes = taken(bare)
    found = {name: value for name, value in offered.items() if takes(name)}
    if in_chain(model, "Float16Module"):
        found["fp32_output"] = False
    return Inputs(found, micro)


_CALLED = {
    "input_ids": ("tokens", "ids", "token_ids", "inputs", "input_tokens", "text", "x"),
    "position_ids": ("positions", "places", "pos_ids"),
    _PACKED: ("packing", "packed", "packed_params", "thd_params"),
    "attention_mask": ("mask", "attn_mask"),
}
"""What the step calls an input to what other models call it."""


def not_taken(bare: Any, config: Any, *, packed: bool) -> str:
    """What the model needs and its ``forward`` does not take, and what its ``forward`` asks for and the step does not
    hand over, with the step's name for it; the empty string for nothing.
    """
    needed = ["input_ids"]  # by all stages, so that all are refused alike
    needed += [_PACKED] if packed else []
    needed += ["loss_mask"] if mtp.active(config) else []
    takes = taken(bare)
    handed = {*needed, "input_ids", "position_ids", "attention_mask", "padding_mask"}
    named = {name: one for name, one in _signature(bare).parameters.items() if one.kind in _BY_NAME}
    lost = [name for name in needed if not takes(name)]
    for name, one in named.items():
        # **kwargs would swallow the step's word for it, and the model would run without it.
        ours = next((ours for ours, words in _CALLED.items() if name in words and ours not in named), None)
        if ours in handed:
            lost = [*(other for other in lost if other != ours), f"{ours} (there: {name})"]
        elif name not in handed and one.default is inspect.Parameter.empty:
            lost.append(f"{name}, which it asks for")
    return ", ".join(lost)


def not_taken_by(setup: Setup) -> str:
    """What `not_taken` says of the first chunk that lacks a keyword; the empty string for none."""
    found = (not_taken(bare, setup.config, packed=setup.packed) for bare in setup.bare)
    return next(filter(None, found), "")


def _signature(bare: Any) -> inspect.Signature:
    return inspect.signature(bare.forward)


def taken(bare: Any) -> Callable[[str], bool]:
    """A function that says whether ``bare.forward`` takes the keyword of a name."""
    parameters = _signature(bare).parameters
    kinds = {one.kind for one in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return lambda name: True
    return lambda name: name in parameters and parameters[name].kind in _BY_NAME
