"""How far a gradient is from the oracle's, and what the metrics of a step should say by the oracle's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.spec import Clip, LossSpec

FLOOR = 1e-3
"""A parameter whose gradient is smaller than this part of the largest one is measured against that part."""


def errors_of(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Error of each parameter: ``max |g - g0| / max(max |g0|, 1e-3 of the largest over all parameters)``.

    Args:
        grads, reference: whole gradients by global name, float64.

    Raises:
        LayoutError: the two do not name the same parameters.
    """
    if differing := set(grads) ^ set(reference):
        raise LayoutError("a parameter is in one model alone", got=sorted(differing))
    largest = max(float(g.abs().max()) for g in reference.values())
    errors = {}
    for name, g in reference.items():
        scale = max(float(g.abs().max()), FLOOR * largest)
        gap = float((grads[name] - g).abs().max())
        # NaN compares as neither more nor less: it must not pass for a small error.
        errors[name] = float("inf") if gap != gap else gap / scale if scale else gap
    return errors


def worst(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest of `errors_of`, and its parameter."""
    errors = errors_of(grads, reference)
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def distance(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Relative error of the whole gradient in the Euclidean norm."""
    gap = sum(float((grads[name] - value).square().sum()) for name, value in reference.items())
    whole = sum(float(value.square().sum()) for value in reference.values())
    return float((gap / whole) ** 0.5) if whole else float(gap**0.5)


def expected_metrics(answer: Mapping[str, Any], spec: LossSpec) -> dict[str, float]:
    """What `PolicyLossStep.finish` must say, by the oracle's numbers."""
    want = {"loss": float(answer["loss"])}
    want |= {f"{name}/loss": float(value) for name, value in answer["components"].items()}
    late = bool(spec.gates) or any(spec.corrections_on(part, late=True) for part in spec.components)
    for name, stats in answer["ratio_stats"].items():
        # The oracle's ratios are those of the tokens that gates left, the metrics' of all that reach the gates.
        if late or "mean" not in stats:
            continue
        part: Any = spec.component(name)
        ratio = "ratio" if part.ratio == "token" else "unit_ratio"
        want |= {f"{name}/{ratio}{tail}": stats[key] for tail, key in (("", "mean"), ("_min", "min"), ("_max", "max"))}
        if isinstance(part.surrogate, Clip):
            want |= {f"{name}/clip_{side}": stats[side] / stats["tokens"] for side in ("low", "high", "dual")}
    return want


def metric_gap(metrics: Mapping[str, float], answer: Mapping[str, Any], spec: LossSpec) -> tuple[float, str]:
    """The largest gap of a metric, relative to its value, and its name; one that is not there counts as infinite."""
    gaps = {
        name: abs(metrics.get(name, float("inf")) - value) / max(abs(value), FLOOR)
        for name, value in expected_metrics(answer, spec).items()
    }
    gaps = {name: float("inf") if gap != gap else gap for name, gap in gaps.items()}
    name = max(gaps, key=gaps.__getitem__)
    return gaps[name], name
