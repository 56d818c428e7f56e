"""Learning curves as PNG: few lines, labelled where they end, against labelled levels."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pgloss.errors import DataError
from megatron_pgloss.spec.words import closed
from megatron_pgloss.view.file import write
from megatron_pgloss.view.optional import require
from megatron_pgloss.view.palette import CURVES

_INK, _SOFT, _GRID = "#1C1E22", "#666C78", "#E4E1DA"
# Two labels closer than this share of the axes' height would touch.
_LABEL_GAP = 0.062


class Curve(NamedTuple):
    """One line: ``x`` and ``y`` of equal length; a NaN in ``y`` leaves a gap."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    """Lower edge of a band around the line, over seeds for example; it is given together with ``high``."""
    high: Sequence[float] | None = None


@closed
def learning_curve(
    path: str | Path,
    series: Mapping[str, Curve | tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    hlines: Mapping[str, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> Path:
    """Draw ``series`` into a PNG (1500 by 825 pixels) and return its path.

    Args:
        path: the file to write; its folder is made where it is missing.
        series: label to `Curve`, or to a plain ``(x, y)``; each label stands at the end of its
            line.
        title: heading, left aligned.
        x_label: below the axis, with its unit.
        y_label: above the axis, with its unit.
        hlines: label to level of a dashed reference line: a random policy, the best strategy.
        y_range: limits of the y axis; the data's own otherwise.

    Raises:
        UnsupportedError: matplotlib is not installed.
        DataError: there is no series, lengths differ, a band has one edge only, a value is infinite, or no y is finite.
    """
    figures = require("matplotlib.figure", "the curve")
    canvases = require("matplotlib.backends.backend_agg", "the curve")
    curves = {name: _checked(name, Curve(*curve)) for name, curve in series.items()}
    if not curves:
        raise DataError("no series to draw", expected="at least one curve", got="none")
    # A figure with its own canvas: no pyplot, so no global backend is touched.
    figure = figures.Figure(figsize=(10, 5.5), dpi=150, facecolor="white")
    canvas = canvases.FigureCanvasAgg(figure)
    axes = figure.add_axes((0.07, 0.115, 0.7, 0.73))
    labels: list[tuple[float, str, str]] = []
    for name, level in (hlines or {}).items():
        axes.axhline(level, color=_SOFT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        labels.append((level, name, _SOFT))
    for index, (name, curve) in enumerate(curves.items()):
        colour = CURVES[index % len(CURVES)]
        axes.plot(curve.x, curve.y, color=colour, linewidth=2.2, solid_capstyle="round", zorder=3)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0, zorder=2)
        labels.append((_last_finite(curve.y), name, colour))
    _dress(axes, x_label, y_label, title)
    if all(float(x).is_integer() for curve in curves.values() for x in curve.x):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if y_range is not None:
        axes.set_ylim(*y_range)
    axes.margins(x=0.01)
    _label_ends(axes, canvas, labels)
    # Without the library's version in it, equal data gives equal bytes under one installation.
    picture = io.BytesIO()
    canvas.print_png(picture, metadata={"Software": None})
    return write(path, picture.getvalue())


def _checked(name: str, curve: Curve) -> Curve:
    where = f"series {name!r}"
    parts = {part: values for part, values in curve._asdict().items() if values is not None}
    if len(parts) == 3:
        raise DataError("a band has one edge only", where=where, fix="give both low and high")
    for part, values in parts.items():
        parts[part] = [float(value) for value in values]
        if len(values) != len(curve.x):
            sizes = f"{len(values)} for {len(curve.x)}"
            raise DataError(f"{part} and x differ in length", got=sizes, where=where)
        if any(math.isinf(value) for value in parts[part]):
            raise DataError(f"{part} holds an infinite value", where=where, fix="NaN leaves a gap")
    if not any(math.isfinite(value) for value in parts["y"]):
        raise DataError("no finite y to draw", where=where)
    return Curve(**parts)


def _last_finite(values: Sequence[float]) -> float:
    return next(float(value) for value in reversed(values) if math.isfinite(value))


def _dress(axes: Any, x_label: str, y_label: str, title: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_SOFT, labelsize=10.5, length=0, pad=6)
    axes.tick_params(axis="x", length=4)
    # Plain text throughout: two dollar signs in a label are no formula.
    axes.set_xlabel(x_label, color=_SOFT, fontsize=11, labelpad=7, parse_math=False)
    above = {"transform": axes.transAxes, "ha": "left", "parse_math": False}
    axes.text(0, 1.035, y_label, color=_SOFT, fontsize=11, **above)
    axes.text(0, 1.115, title, color=_INK, fontsize=15, fontweight="bold", **above)


def _label_ends(axes: Any, canvas: Any, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write each label right of the axes at its own height, moved only where two would touch.

    The axes give up as much of their width as the longest label takes, down to half of the figure.
    """
    low, high = axes.get_ylim()
    wanted = [(min(max((value - low) / (high - low), 0), 1), name, colour) for value, name, colour in labels]
    wanted.sort(key=lambda label: label[0])
    heights = spread([height for height, _, _ in wanted], _LABEL_GAP)
    style = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "fontsize": 11,
        "va": "center",
    }
    texts = [
        axes.annotate(name, (1, height), (10, 0), color=colour, parse_math=False, **style)
        for height, (_, name, colour) in zip(heights, wanted, strict=True)
    ]
    widest = max(text.get_window_extent(canvas.get_renderer()).width for text in texts)
    longest = widest / axes.figure.bbox.width
    left, bottom, _, height = axes.get_position().bounds
    axes.set_position((left, bottom, max(0.5, 0.96 - left - longest), height))


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted ``heights`` moved apart to at least ``gap``, each cluster centred on its own mean."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        while len(clusters) > 1 and _low(clusters[-1], gap) - _high(clusters[-2], gap) < gap:
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    return [_low(cluster, gap) + gap * i for cluster in clusters for i in range(len(cluster))]


def _low(cluster: Sequence[float], gap: float) -> float:
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2


def _high(cluster: Sequence[float], gap: float) -> float:
    return sum(cluster) / len(cluster) + gap * (len(cluster) - 1) / 2
