"""The ratio axis: the logarithm of a component's ratio from its streams. `N` positions."""

from __future__ import annotations

from torch import Tensor

from megatron_pgloss.maths import bounded
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.users import checked
from megatron_pgloss.spec import CustomRatio, Ratio
from megatron_pgloss.spec.ratios import AnyRatio


def log_ratio(axis: AnyRatio | None, x: Streams) -> Tensor:
    """log r of every position, bounded, with the gradient that the axis names; see `megatron_pgloss.spec.ratios`.

    Args:
        axis: None is ``none``: 0 with the gradient of log pi.
    """
    own_N = x.logp - x.logp.detach()  # value 0, gradient of the token's own log-prob
    if axis is None:
        return own_N
    if isinstance(axis, CustomRatio):
        return bounded(checked(axis.fn(x), x, f"ratio {axis.to_import_path()}"), x.bound)
    assert isinstance(axis, Ratio)
    if axis.level == "token":
        return x.token_log_ratio  # a statistic of one token: both gradients are the same
    s_N = _statistic(axis, x)
    # Held fixed, the statistic is a constant factor; the token keeps its own gradient.
    return bounded(s_N if axis.gradient == "through" else s_N.detach() + own_N, x.bound)


def _statistic(axis: Ratio, x: Streams) -> Tensor:
    d_N = x.token_log_ratio
    if axis.statistic == "mean":
        return x.unit_mean(d_N, axis.level, axis.over)
    if axis.statistic == "sum":
        return x.unit_sum(d_N, axis.level, axis.over)
    if axis.statistic == "prefix":
        return x.prefix_sum(d_N, axis.level, axis.over)
    return d_N + x.prefix_min(d_N, axis.level, axis.over, inclusive=False)
