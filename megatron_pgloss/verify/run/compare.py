"""The distance of gradients from the oracle's, and the metrics that a step must report by the oracle's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_pgloss.errors import LayoutError
from megatron_pgloss.spec import Clip, LossSpec

FLOOR = 1e-3
"""The error of a parameter is relative to its largest gradient, but at least to this share of the model's largest one.
"""


def errors_of(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Error of each parameter: ``max |g - g0| / max(max |g0|, 1e-3 of the largest over all parameters)``.

    Args:
        grads: whole gradients by global name, float64.
        reference: the oracle's gradients, likewise.

    Raises:
        LayoutError: the two do not name the same parameters.
    """
    if differing := set(grads) ^ set(reference):
        raise LayoutError("a parameter exists in only one of the two models", got=sorted(differing))
    largest = max(float(g.abs().max()) for g in reference.values())
    errors = {}
    for name, g in reference.items():
        scale = max(float(g.abs().max()), FLOOR * largest)
        gap = float((grads[name] - g).abs().max())
        # Every comparison with NaN is false, so that a NaN would pass for a small error.
        errors[name] = float("inf") if gap != gap else gap / scale if scale else gap
    return errors


def worst(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest of `errors_of`, and the name of its parameter."""
    errors = errors_of(grads, reference)
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def distance(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Relative error of the whole gradient in the Euclidean norm."""
    gap = sum(float((grads[name] - value).square().sum()) for name, value in reference.items())
    whole = sum(float(value.square().sum()) for value in reference.values())
    return float((gap / whole) ** 0.5) if whole else float(gap**0.5)


def expected_metrics(answer: Mapping[str, Any], spec: LossSpec) -> dict[str, float]:
    """Metrics that `PolicyLossStep.finish` must report, by the oracle's numbers."""
    want = {"loss": float(answer["loss"])}
    want |= {f"{name}/loss": float(value) for name, value in answer["components"].items()}
    late = bool(spec.gates) or any(spec.corrections_on(part, late=True) for part in spec.components)
    for name, stats in answer["ratio_stats"].items():
        # The oracle's ratios are over the tokens that pass the gates, the metrics' over all tokens that reach them.
        if late or "mean" not in stats:
            continue
        part: Any = spec.component(name)
        ratio = "ratio" if part.ratio == "token" else "unit_ratio"
        want |= {f"{name}/{ratio}{tail}": stats[key] for tail, key in (("", "mean"), ("_min", "min"), ("_max", "max"))}
        if isinstance(part.surrogate, Clip):
            want |= {f"{name}/clip_{side}": stats[side] / stats["tokens"] for side in ("low", "high", "dual")}
    return want


def metric_gap(metrics: Mapping[str, float], answer: Mapping[str, Any], spec: LossSpec) -> tuple[float, str]:
    """The largest relative error of a metric, and the metric's name. A missing metric has an infinite error."""
    gaps = {
        name: abs(metrics.get(name, float("inf")) - value) / max(abs(value), FLOOR)
        for name, value in expected_metrics(answer, spec).items()
    }
    gaps = {name: float("inf") if gap != gap else gap for name, gap in gaps.items()}
    name = max(gaps, key=gaps.__getitem__)
    return gaps[name], name
