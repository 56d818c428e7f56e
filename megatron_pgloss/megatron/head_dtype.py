"""The numbers in which the trainer's head and the sampler's make logits: declared, compared once, and kept.

Both heads round to one grid, or neither does: a float32 head on one side alone makes the mismatch worse, since two
bf16 heads round most logits alike (NVIDIA-NeMo/RL#3936).

Shapes: `N` sampled rows of one micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_pgloss.errors import SpecError
from megatron_pgloss.logprobs.head.gemm import HEAD_DTYPES, HeadDtype, check_head_dtype, same_numbers

_LOG = logging.getLogger(__name__)
SAMPLE = 256
"""Rows of the first micro-batch on which two heads are compared."""

_NAMES: dict[torch.dtype, HeadDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def chosen(head: str, head_dtype: HeadDtype | None, sampler_head: HeadDtype | None) -> HeadDtype | None:
    """The numbers of the trainer's head: as asked for, else the sampler's, else ``fp32``. None for ``given`` logits,
    whose numbers are the model's.

    Raises:
        SpecError: an unknown name, or ``head_dtype`` beside given logits.
    """
    for name, argument in ((head_dtype, "head_dtype"), (sampler_head, "sampler_head")):
        if name is not None:
            check_head_dtype(name, argument)
    if head == "given":
        if head_dtype is not None:
            raise SpecError(
                f"head_dtype={head_dtype!r} beside head='given': the model makes its logits itself",
                fix="head='auto' or another fused head, or leave head_dtype out",
            )
        return None
    return head_dtype or sampler_head or "fp32"


def of_dtype(dtype: torch.dtype) -> HeadDtype:
    """The numbers of logits that came in ``dtype``."""
    return _NAMES.get(dtype, "fp32")


def rounded(logits: Tensor, to: HeadDtype) -> Tensor:
    """Logits as another head would have given them, where that head rounds."""
    known = {name: dtype for dtype, name in _NAMES.items()}
    return logits.to(known[to]) if to in known else logits


def compare_notes(mine: Mapping[str, str | None], saved: Mapping[str, str | None]) -> None:
    """Refuse to go on in other numbers than a checkpoint was trained in.

    Raises:
        SpecError: some entry differs; names each.
    """
    differ = [name for name in mine if name in saved and saved[name] != mine[name]]
    if differ:
        raise SpecError(
            f"the head's numbers are not those that the checkpoint was trained in: {', '.join(differ)}",
            expected={name: saved[name] for name in differ},
            got={name: mine[name] for name in differ},
            fix="PolicyLossStep with the saved values, or leave check_note out to change them on purpose",
        )


class OneSided:
    """Says once, with the k3 that it measures, that trainer and sampler make logits in other numbers.

    Args:
        sampler: the sampler's, as declared; None: it is not, and nothing is said.
        speaks: whether this rank logs; ranks of one tensor-parallel group compare together.
    """

    def __init__(self, sampler: HeadDtype | None, speaks: bool) -> None:
        self.sampler, self._speaks, self._done = sampler, speaks, False

    def pending(self, own: HeadDtype, weight: torch.dtype) -> bool:
        """Whether heads of numbers ``own`` and the sampler's differ on operands of dtype ``weight``, and nothing has
        been said so far.
        """
        return self.sampler is not None and not self._done and not same_numbers(own, self.sampler, weight)

    def say(self, own: HeadDtype, own_N: Tensor, measure: Callable[[], Tensor] | None) -> None:
        """Log the distance. ``measure`` gives log-probs [N] of the same rows and weights by the sampler's head; None:
        they cannot be had here.

        With d = log p_own - log p_sampler: k3 = mean(exp(d) - 1 - d), an estimate of KL(sampler || own) on tokens that
        the sampler drew.
        """
        self._done = True
        found = "k3 cannot be measured from logits that are rounded already: a fused head can"
        if measure is not None:
            d_N = own_N.double() - measure().double()
            k3, most = float((d_N.expm1() - d_N).mean()), float(d_N.abs().max())
            found = f"on {d_N.numel()} tokens k3 is {k3:.2e} and the largest difference of a log-prob {most:.2e}"
        if self._speaks:
            _LOG.warning(
                "the trainer's logits are %s and the sampler's %s: %s. One head alone in other numbers makes the "
                "mismatch worse: choose head_dtype=%r here, or give the sampler the same head.",
                own, self.sampler, found, self.sampler,
            )  # fmt: skip


def log_start(head: str, own: HeadDtype | None, sampler: HeadDtype | None) -> None:
    """Log, once a step object, in which numbers its head works."""
    said = sampler or f"not declared (sampler_head= takes {', '.join(HEAD_DTYPES)})"
    _LOG.info("head %s; logits in %s; the sampler's head: %s", head, own or "the model's own numbers", said)


def some(index_N: Tensor) -> Tensor:
    """At most `SAMPLE` of them, evenly spread."""
    return index_N[:: max(1, -(-index_N.numel() // SAMPLE))]
