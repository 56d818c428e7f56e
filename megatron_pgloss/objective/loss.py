"""The loss of one micro-batch: ``sum_c coef_c sum_t w_ct l_ct``, a plain sum. `N` positions of the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.logprobs import TokenLogprobs
from megatron_pgloss.metrics import Metric
from megatron_pgloss.objective import surrogates
from megatron_pgloss.objective.measure import measure
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.planning import MicroBatch
from megatron_pgloss.spec import KL, Clip, Component, Entropy, PolicyGradient, Reinforce, Term
from megatron_pgloss.terms import bounded, k1, k2, k3

_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """One component's tokens, in the micro-batch's shape, detached."""

    loss: Tensor
    """The term l, 0 outside."""
    weight: Tensor
    """u * w, without the coefficient."""
    ratio: Tensor | None
    """pi/old where the component has one."""
    gate: Tensor
    """int8: 0 free, 1 clipped low, 2 clipped high, 3 dual, 4 beyond the log-ratio bound, -1 not a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What `policy_loss` returns."""

    loss: Tensor
    """0-d, differentiable: add it up over micro-batches and ranks, divide by nothing."""
    metrics: dict[str, Metric]
    """``component/name`` to a typed sum."""
    tokens: dict[str, TokenReport] = field(default_factory=dict)
    """Component to its tokens, with ``keep_tokens=True``."""


def policy_loss(lp: TokenLogprobs, micro: MicroBatch, *, keep_tokens: bool = False) -> LossOutput:
    """The planned loss of one micro-batch.

    Args:
        lp: log-probs (and entropy where `LossSpec.needs_entropy`) of ``micro.targets``, float32 or float64, of shape
            ``micro.shape``; anything where no component has a member.
        micro: a micro-batch of a plan made with a spec.
        keep_tokens: also return per-token loss, ratio, weight and gate reason.

    Returns:
        ``loss = sum_c coef_c sum_{t in M_c} u_ct w_ct l_ct``: a sum over micro-batches and ranks is the step's loss.

    Raises:
        DataError: shape or dtype of ``lp``, entropy missing, a second on-policy update.
    """
    logp_N, entropy_N = _flat(lp, micro)
    spec, plan = micro.plan.spec, micro.plan
    if logp_N.requires_grad:
        plan.check_open()
        plan.mark_updated()
    # A shard without members still takes this path: every collective is entered, and the zero is connected.
    total = torch.where(torch.zeros_like(logp_N, dtype=torch.bool), logp_N, 0).sum(dtype=torch.float64)
    metrics: dict[str, Metric] = {}
    tokens: dict[str, TokenReport] = {}
    for part in spec.components:
        x = Streams(micro, part, spec, logp_N, entropy_N)
        term_N, clipped = _term(part, x)
        term_N, value, bad_N = _weighted(term_N, x, micro.weight(part.name).reshape(-1))
        total = total + plan.coef[part.name] * value
        metrics |= measure(part, x, value, bad_N, clipped, micro, spec)
        if keep_tokens:
            tokens[part.name] = _report(part, x, term_N, clipped, micro)
    return LossOutput(loss=total.to(logp_N.dtype), metrics=metrics, tokens=tokens)


def weighted_sum(values: Tensor, micro: MicroBatch, component: str) -> Tensor:
    """``sum_t w_t values_t`` over the members of ``component``: any per-token loss under the plan's weights.

    Args:
        values: float of shape ``micro.shape``; anything outside the members.

    Returns:
        0-d, differentiable, without the coefficient.
    """
    if tuple(values.shape) != micro.shape:
        raise DataError("values have the wrong shape", expected=list(micro.shape), got=list(values.shape))
    member = micro.members(component)
    picked = torch.where(member, values, 0) * micro.weight(component)
    return torch.where(member, picked, 0).sum(dtype=torch.float64).to(values.dtype)


def _flat(lp: TokenLogprobs, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
    spec = micro.plan.spec
    if spec is None:
        raise DataError("this micro-batch was planned without a spec", fix="plan(batches, spec, ...)")
    for name, value in (("logprob", lp.logprob), ("entropy", lp.entropy)):
        if value is None:
            continue
        if tuple(value.shape) != micro.shape:
            raise DataError(
                f"{name} has the wrong shape",
                expected=f"{list(micro.shape)}, that of micro.targets",
                got=list(value.shape),
                fix="score micro.targets: position t is about the token after it",
            )
        if value.dtype not in (torch.float32, torch.float64):
            raise DataError(f"{name} must be float32 or float64", got=value.dtype)
    if spec.needs_entropy and lp.entropy is None:
        raise DataError(
            "the spec reads the entropy, but none came", fix="token_logprobs(..., entropy=spec.needs_entropy)"
        )
    return lp.logprob.reshape(-1), None if lp.entropy is None else lp.entropy.reshape(-1)


def _term(part: Component, x: Streams) -> tuple[Tensor, surrogates.Clipped | None]:
    if isinstance(part, PolicyGradient):
        if isinstance(part.surrogate, Reinforce):
            return surrogates.reinforce(x.logp, x.advantage), None
        assert isinstance(part.surrogate, Clip)
        # ratio "none": exactly 1 with the gradient of log pi, so the base is the policy itself, held fixed.
        log_ratio_N = x.log_ratio if part.ratio == "token" else x.logp - x.logp.detach()
        return surrogates.clip(log_ratio_N, x.advantage, part.surrogate)
    if isinstance(part, KL):
        base_N = {"ref": lambda: x.ref, "old": lambda: x.old, "rollout": lambda: x.rollout}[part.to]()
        return _ESTIMATORS[part.estimator](bounded(x.logp - base_N, x.bound)), None
    if isinstance(part, Entropy):
        return -x.entropy, None
    if isinstance(part, Term):
        return _user(part, x), None
    return -x.logp, None


def _user(part: Term, x: Streams) -> Tensor:
    term_N = part.function(x)
    if not isinstance(term_N, Tensor) or term_N.shape != x.logp.shape or not term_N.is_floating_point():
        got = list(term_N.shape) if isinstance(term_N, Tensor) else type(term_N).__name__
        raise DataError(
            f"term {part.name!r} must return one number per position", expected=f"float {list(x.logp.shape)}", got=got
        )
    return term_N


def _weighted(term_N: Tensor, x: Streams, weight_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The term with what is broken or outside selected out, its weighted sum, and where it was broken."""
    bad_N = x.members & ~term_N.detach().isfinite()
    _guard(x.logp, x, bad_N)
    if x.has_entropy:
        _guard(x.entropy, x, bad_N)
    kept_N = torch.where(x.members & ~bad_N, term_N, 0)
    return kept_N, (kept_N * weight_N).sum(dtype=torch.float64), x.broken | bad_N


def _guard(stream_N: Tensor, x: Streams, bad_N: Tensor) -> None:
    if not stream_N.requires_grad:
        return
    # A term that is infinite at finite inputs has no usable derivative there: value and gradient are both selected out.
    # Outside the members 0 * inf is all that a non-finite gradient can be, or a unit that a broken token belongs to.
    elsewhere_N = ~x.members | bad_N.any()
    stream_N.register_hook(lambda grad: torch.where(bad_N | (elsewhere_N & ~grad.isfinite()), 0, grad))


def _report(
    part: Component, x: Streams, term_N: Tensor, clipped: surrogates.Clipped | None, micro: MicroBatch
) -> TokenReport:
    gate_N = torch.where(x.members, 0, -1).to(torch.int8)
    ratio = None
    if isinstance(part, PolicyGradient) and clipped is not None:
        if part.ratio == "token":
            beyond_N = x.members & (x.raw_log_ratio.detach().abs() > x.bound)
            gate_N = torch.where(beyond_N, 4, gate_N)
            ratio = x.ratio.detach().reshape(micro.shape)
        for code, mask_N in ((1, clipped.low_N), (2, clipped.high_N), (3, clipped.dual_N)):
            gate_N = torch.where(mask_N & x.members, code, gate_N).to(torch.int8)
    return TokenReport(
        loss=term_N.detach().reshape(micro.shape), weight=micro.weight(part.name), ratio=ratio,
        gate=gate_N.reshape(micro.shape),
    )  # fmt: skip
