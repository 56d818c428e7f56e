"""The results of `bench_loss.py`, as tables on the terminal, in a Markdown page, and as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import collectives, plan

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def _lines(results: dict[str, dict]) -> list[list[str]]:
    """Name, ms, times the copy, times the best peer with an entropy gradient, extra bytes per logit; fastest first."""
    copy = results["copy"]["ms"]
    peers = [r["ms"] for name, r in results.items() if r["entropy"] and not name.startswith("ours")]
    best = min(peers, default=float("nan"))
    lines = []
    for name, row in sorted(results.items(), key=lambda item: item[1]["ms"]):
        note = "" if row["entropy"] or name == "copy" else " (log-prob only)"
        extra = "" if row.get("extra") is None else f"{row['extra']:.2f}"
        ms = row["ms"]
        lines.append([name + note, f"{ms:.1f}", f"{ms / copy:.1f}", f"{ms / best:.2f}" if peers else "", extra])
    return lines


HEADS = ["", "ms", "x copy", "x best peer", "extra B/logit"]


def show(
    title: str, results: dict[str, dict], skipped: dict[str, str], profile: dict[str, float] | None = None
) -> None:
    """One table on the terminal."""
    print(f"\n{title}", flush=True)
    for line in [HEADS, *_lines(results)]:
        print(f"{line[0]:40}" + "".join(f"{cell:>14}" for cell in line[1:]))
    for name, reason in skipped.items():
        print(f"{name:40}skipped: {reason}", flush=True)
    if profile:
        print(_where(profile), flush=True)


def _where(profile: dict[str, float]) -> str:
    return "Where our time goes, in ms: " + "; ".join(f"{name} {ms:.1f}" for name, ms in profile.items()) + "."


def write_page(report: dict[str, Any], page: Path, command: str) -> None:
    """Replace the text between the markers of ``page`` by the results."""
    parts = [
        f"Measured on {report['date']}: {report['machine']}, {report['threads']} threads, load {report['load']:.1f} at "
        f"the start, torch {report['versions']['torch']}, Python {report['versions']['python']}, medians of "
        f"{report['rounds']} rounds. Again: `python tools/bench_loss.py {command}`.",
    ]
    for title, table in report["tables"].items():
        rows = ["| " + " | ".join(line) + " |" for line in [HEADS, ["---"] * len(HEADS), *_lines(table["results"])]]
        parts += [f"**{title}**", "\n".join(rows)]
        skipped = "; ".join(f"{name} ({reason})" for name, reason in table["skipped"].items())
        parts += [_where(table["profile"])] if "profile" in table else []
        parts += [f"Not run: {skipped}."] if skipped else []
    parts.append(plan.markdown(report["rest"]))
    if "collectives" in report:
        parts.append(collectives.markdown(report["collectives"]))
    text = page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(before + "\n\n" + "\n\n".join(parts) + "\n\n" + after)


def draw(report: dict[str, Any], path: str) -> None:
    """Bars of all tables, one panel each, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = report["tables"]
    heights = [len(table["results"]) + 1.5 for table in tables.values()]
    figure, axes = pyplot.subplots(
        len(tables), 1, figsize=(8, 0.27 * sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, (title, table) in zip(axes[:, 0], tables.items(), strict=True):
        rows = sorted(((name, row["ms"]) for name, row in table["results"].items()), key=lambda row: -row[1])
        colours = ["#1b7f79" if name.startswith("ours") else "#999999" for name, _ in rows]
        bars = axis.barh([name for name, _ in rows], [ms for _, ms in rows], color=colours)
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.set_title(f"{title}: ms, forward + backward", fontsize=11, loc="left")
        axis.margins(x=0.08)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
