"""The loss of one micro-batch: ``sum_c coef_c sum_t w_ct l_ct``, a plain sum. `N` positions of the micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.logprobs import TokenLogprobs
from megatron_pgloss.maths import finite, flags, selected
from megatron_pgloss.metrics import Metric
from megatron_pgloss.objective.auxiliary import TERMS
from megatron_pgloss.objective.late import Late, check_decided, late
from megatron_pgloss.objective.links import settle
from megatron_pgloss.objective.measure import Measured, StepFacts, measure
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.surrogates import SURROGATES
from megatron_pgloss.objective.token_term import TokenTerm
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import Component, LossSpec, PolicyGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """One component's tokens, in the micro-batch's shape, detached."""

    loss: Tensor
    """The term l after gates and corrections inside the loss; 0 outside the members."""
    weight: Tensor
    """u * w, without the coefficient."""
    ratio: Tensor | None
    """The ratio of a policy gradient, by its ratio axis; None for other components."""
    gate: Tensor
    """int8: 0 free, 1 clipped low, 2 clipped high, 3 dual, 4 held by the log-ratio bound, 5 dropped by a gate, 6
    rejected by a correction inside the loss, -1 not a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What `policy_loss` returns."""

    loss: Tensor
    """0-d, differentiable: add it up over micro-batches and ranks, divide by nothing."""
    metrics: dict[str, Metric]
    """``component/name`` to a typed sum."""
    tokens: dict[str, TokenReport] = field(default_factory=dict)
    """Component to its tokens, with ``keep_tokens=True``."""


def policy_loss(
    lp: TokenLogprobs | None, micro: MicroBatch, *, value: Tensor | None = None, keep_tokens: bool = False
) -> LossOutput:
    """The planned loss of one micro-batch.

    Args:
        lp: log-probs (and entropy where `LossSpec.needs_entropy`) of ``micro.targets``, float32 or float64, of shape
            ``micro.shape``; their values do not matter where no component has a member. None for a spec of value
            components alone.
        micro: a micro-batch of a plan made with a spec.
        value: the value head's output at each position, float32 or float64 of shape ``micro.shape``; read by `Value`.
        keep_tokens: also return per-token loss, ratio, weight and gate reason.

    Returns:
        ``loss = sum_c coef_c sum_{t in M_c} u_ct w_ct l_ct``: a sum over micro-batches and ranks is the step's loss.

    Raises:
        DataError: ``lp`` or ``value`` has another shape or dtype, or is missing where the spec reads it; a second
            on-policy update.
    """
    inputs = _flat(lp, value, micro)
    ledger = micro.shared.ledger
    if any(stream.requires_grad for stream in inputs.values()):
        ledger.check_open()
        ledger.mark_updated()
        kept_N = inputs["logp"] if "logp" in inputs else next(iter(inputs.values())).detach()
        ledger.record(micro.number, micro.index_N, kept_N)
    out = _composed(inputs, micro, keep_tokens)
    if out.loss.requires_grad:
        out.loss.register_hook(ledger.pull)
    return out


def loss_gradients(lp: TokenLogprobs, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
    """The gradients of log-prob and entropy, each of ``micro.shape``, that `policy_loss` of these log-probs will give.

    The plan's ledger takes no note of this look ahead.
    """
    leaves = [x.detach().requires_grad_() for x in (lp.logprob, lp.entropy) if x is not None]
    with torch.enable_grad():
        loss = _composed(_flat(TokenLogprobs(*leaves), None, micro), micro, keep_tokens=False).loss
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
    return grads[0], grads[1] if lp.entropy is not None else None


def _composed(inputs: dict[str, Tensor], micro: MicroBatch, keep_tokens: bool) -> LossOutput:
    spec = micro.spec
    assert spec is not None  # `_flat` has checked it
    leaf_N = next(iter(inputs.values()))
    logp_N = inputs.get("logp", leaf_N.detach())
    # A shard without members still takes this path: every collective is entered, and the zero is connected.
    total = leaf_N[:0].sum(dtype=torch.float64)
    metrics: dict[str, Metric] = {}
    tokens: dict[str, TokenReport] = {}
    extra = {name: stream for name, stream in inputs.items() if name not in ("logp", "entropy")}
    for part in spec.components:
        check_decided(part, micro)
    streams = [Streams(micro, part, spec, logp_N, inputs.get("entropy"), **extra) for part in spec.components]
    settle(streams, micro, spec)
    known = StepFacts(spec, frozenset(micro.table), "entropy" in inputs)
    for x in streams:
        part = x.component
        if isinstance(part, PolicyGradient):
            made = SURROGATES[part.surrogate.kind](x, part.surrogate)
        else:
            made = TERMS[part.kind](part, x)
        acting, (term_N, worth, bad_N) = acted_on(made, x, micro, spec)
        slope = micro.slope(part.name)
        if slope is not None:
            # What this token's log-prob moves through the ratio of its episode, whose terms lie anywhere: 0 in value.
            worth = worth + (slope.reshape(-1) * (x.logp - x.logp.detach())).sum(dtype=torch.float64)
        total = total + micro.shared.coef[part.name] * worth
        metrics |= measure(part, Measured(x, worth, bad_N, made, acting, micro), known)
        if keep_tokens:
            tokens[part.name] = _report(part, x, term_N, made, acting, micro)
    return LossOutput(loss=total.to(leaf_N.dtype), metrics=metrics, tokens=tokens)


def acted_on(
    made: TokenTerm, x: Streams, micro: MicroBatch, spec: LossSpec
) -> tuple[Late, tuple[Tensor, Tensor, Tensor]]:
    """What acts on a component's term inside the loss, and of both the term as it enters the sum [N], that sum under
    the plan's weights (0-d float64, without the coefficient), and bool [N]: where it was broken.
    """
    acting = late(x.component, x, micro, spec)
    return acting, _weighted(acting.act(made.term_N), x, micro.weight(x.component.name).reshape(-1))


def weighted_sum(values: Tensor, micro: MicroBatch, component: str) -> Tensor:
    """``sum_t w_t values_t`` over the members of ``component``: any per-token loss under the plan's weights.

    Args:
        values: float of shape ``micro.shape``; values outside the members do not matter.

    Returns:
        0-d, differentiable, without the coefficient.
    """
    if tuple(values.shape) != micro.shape:
        raise DataError("values have the wrong shape", expected=list(micro.shape), got=list(values.shape))
    member = micro.members(component)
    picked = torch.where(member, values, 0) * micro.weight(component)
    return torch.where(member, picked, 0).sum(dtype=torch.float64).to(values.dtype)


def _flat(lp: TokenLogprobs | None, value: Tensor | None, micro: MicroBatch) -> dict[str, Tensor]:
    """The model's outputs by name, [N] each; the log-prob first where there is one."""
    spec = micro.spec
    if spec is None:
        raise DataError("this micro-batch was planned without a spec", fix="plan(batches, spec, ...)")
    given: dict[str, Tensor | None] = {"logp": None, "entropy": None, "kl": None}
    if lp is not None:
        given = {"logp": lp.logprob, "entropy": lp.entropy, "kl": getattr(lp, "kl", None)}
    given["value"] = value
    for name, stream in given.items():
        if stream is None:
            continue
        what = "logprob" if name == "logp" else name
        if tuple(stream.shape) != micro.shape:
            raise DataError(
                f"{what} has the wrong shape",
                expected=f"{list(micro.shape)}, that of micro.targets",
                got=list(stream.shape),
                fix="score micro.targets: position t is about the token after it",
            )
        if stream.dtype not in (torch.float32, torch.float64):
            raise DataError(f"{what} must be float32 or float64", got=stream.dtype)
    if lp is None and spec.needs_logprobs:
        raise DataError("the spec reads log-probs, but none came", fix="policy_loss(token_logprobs(...), micro)")
    for name, wanted, fix in (
        ("entropy", spec.needs_entropy, "token_logprobs(..., entropy=spec.needs_entropy)"),
        ("kl", spec.needs_exact_kl, "token_logprobs(..., ref_logits=...)"),
        ("value", spec.needs_value, "policy_loss(..., value=V)"),
    ):
        if wanted and given[name] is None:
            raise DataError(f"the spec reads the {name}, but none came", fix=fix)
    flat = {name: stream.reshape(-1) for name, stream in given.items() if stream is not None}
    if spec.kept is not None and lp is not None:
        if lp.kept is None:
            raise DataError(
                "the spec trains on kept sets, but these log-probs are of the whole vocabulary",
                expected="TokenLogprobs with kept, the set's share of the vocabulary",
                fix="token_logprobs(..., kept=micro.kept)",
            )
        flat |= {name: x.reshape(-1) for name in ("kept", "outside") if (x := getattr(lp, name)) is not None}
    return flat if spec.chosen is None else flat | {"chosen": _chosen(lp, micro, spec.chosen)}


def _chosen(lp: TokenLogprobs | None, micro: MicroBatch, ids: str) -> Tensor:
    """The policy's log-probs at the ids of the stream ``ids``, [N, k]."""
    shape = tuple(micro.wide(ids).shape)
    if lp is None or lp.chosen is None:
        raise DataError(
            "the spec reads the policy's log-probs at a teacher's ids, but none came",
            fix="token_logprobs(..., chosen_ids=micro.wide(spec.chosen))",
        )
    if tuple(lp.chosen.shape) != shape or lp.chosen.dtype != lp.logprob.dtype:
        raise DataError(
            "the log-probs at chosen ids do not fit", expected=f"{lp.logprob.dtype} {list(shape)}",
            got=f"{lp.chosen.dtype} {list(lp.chosen.shape)}",
        )  # fmt: skip
    return lp.chosen.reshape(math.prod(micro.shape), shape[-1])


def _weighted(term_N: Tensor, x: Streams, weight_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The term as it enters the sum, 0 at broken tokens and outside the members; its sum under the plan's weights (0-d
    float64, without the coefficient); and bool [N]: the broken tokens.
    """
    good_N = x.members & finite(term_N)
    bad_N = x.members & ~good_N
    good = flags(good_N, term_N.dtype)
    for stream_N in (x.logp, *x.computed.values()):
        _guard(stream_N, x, good, bad_N)
    whole_N = selected(good, term_N)
    faults_N = x.broken | bad_N if x.lost is None else x.broken | bad_N | x.lost
    return whole_N, (whole_N * weight_N).sum(dtype=torch.float64), faults_N


def _guard(stream_N: Tensor, x: Streams, good: Tensor, bad_N: Tensor) -> None:
    if not stream_N.requires_grad:
        return
    if stream_N.dim() > 1:
        good_N1 = (x.members & ~bad_N)[:, None]
        stream_N.register_hook(lambda grad: torch.where(good_N1, grad, 0))
        return
    # A term that is infinite at finite inputs has no usable derivative there: value and gradient are both selected out.
    if x.visible is x.members:
        stream_N.register_hook(lambda grad: selected(good, grad))
        return
    # Outside the members a non-finite gradient comes from 0 * inf, or from a unit that holds a broken token.
    elsewhere_N = ~x.members | bad_N.any()
    stream_N.register_hook(lambda grad: selected(~bad_N & (~elsewhere_N | finite(grad)), grad))


def _report(
    part: Component, x: Streams, term_N: Tensor, made: TokenTerm, acting: Late, micro: MicroBatch
) -> TokenReport:
    gate_N = torch.where(x.members, 0, -1).to(torch.int8)
    ratio = None
    codes: list[tuple[int, Tensor]] = []
    if isinstance(part, PolicyGradient) and part.has_ratio:
        ratio = x.ratio.detach().reshape(micro.shape)
    if made.held_N is not None:
        codes.append((4, made.held_N))
    if made.clipped is not None:
        codes += [(1, made.clipped.low_N), (2, made.clipped.high_N), (3, made.clipped.dual_N)]
    codes += [(5, taken_N >= 1) for taken_N in acting.gated.values()]
    if acting.spares_N is not None:
        codes.append((6, ~acting.spares_N))
    for code, mask_N in codes:
        gate_N = torch.where(mask_N & x.members, code, gate_N).to(torch.int8)
    return TokenReport(
        loss=term_N.detach().reshape(micro.shape), weight=micro.weight(part.name), ratio=ratio,
        gate=gate_N.reshape(micro.shape),
    )  # fmt: skip
