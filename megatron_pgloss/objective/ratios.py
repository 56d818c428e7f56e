"""The ratio axis: the logarithm of a component's ratio from its streams. `N` positions."""

from __future__ import annotations

from torch import Tensor

from megatron_pgloss.maths import Asked
from megatron_pgloss.objective.streams import Streams
from megatron_pgloss.objective.users import checked
from megatron_pgloss.spec import CustomRatio, Ratio
from megatron_pgloss.spec.ratios import AnyRatio

KEY = "ratio"
"""The key under which the streams have the axis's own statistic."""


def asked(axis: AnyRatio | None, x: Streams) -> Asked | None:
    """The statistic over units that the axis takes, or None."""
    if not isinstance(axis, Ratio) or axis.statistic_unit is None:
        return None
    d_N = x.token_log_ratio
    if axis.statistic == "prefix_min":
        return x.ask_prefix_min(d_N, axis.level, axis.over, inclusive=False)
    return x.ask(axis.statistic, d_N, axis.level, axis.over)


def log_ratio(axis: AnyRatio | None, x: Streams) -> Tensor:
    """log r of every position, with the gradient that the axis names; see `megatron_pgloss.spec.ratios`. The bound acts
    where exp is taken: on this number, not on the token log-ratios that it is a statistic of.

    Args:
        axis: None stands for ``ratio="none"``: the value 0 with the gradient of log pi.
    """
    own_N = x.logp - x.logp.detach()  # value 0, gradient of the token's own log-prob
    if axis is None:
        return own_N
    if isinstance(axis, CustomRatio):
        return checked(x.call(KEY, axis), x, f"ratio {axis.to_import_path()}")
    assert isinstance(axis, Ratio)
    if axis.statistic_unit is None:
        return x.token_log_ratio  # a statistic of one token: both gradients are the same
    s_N = x.answer(KEY).to(x.logp.dtype)
    if axis.statistic == "prefix_min":
        s_N = x.token_log_ratio + s_N
    # Held fixed, the statistic is a constant factor; the token keeps its own gradient.
    return s_N if axis.gradient == "through" else s_N.detach() + own_N
