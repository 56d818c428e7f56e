"""Choose which of many cases a run visits: a few that together have all features of all cases, or all cases.

A fault that needs two axes together (context parallelism and packed rows, say) shows in every case that has both. So a
run visits enough cases to have every pair of features that some case has, and every named triple; ``--exhaustive``
visits all cases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

EXHAUSTIVE = bool(os.environ.get("PGLOSS_EXHAUSTIVE"))
"""Whether everything is visited (``bash tools/test.sh --exhaustive``)."""
NOTES: list[str] = []
"""Notes on what was chosen, printed at the end of the run."""
Case = TypeVar("Case")


def pairs(features: Iterable[Hashable], triples: Sequence[Sequence[Hashable]] = ()) -> set[Hashable]:
    """Every feature, every two features together, and those of ``triples`` whose three features are all there."""
    held = sorted(set(features), key=repr)
    whole = {tuple(triple) for triple in triples if set(triple) <= set(held)}
    return set(held) | set(combinations(held, 2)) | whole


def cover(
    cases: Sequence[Case], shows: Callable[[Case], set[Hashable]], cost: Callable[[Case], float] = lambda _: 1.0,
    always: Iterable[Case] = (),
) -> list[Case]:  # fmt: skip
    """A few of ``cases``, in their order, that together show everything that all cases show.

    The choice is greedy: the next case is the one that shows the most of what is still missing, relative to its cost.
    The same cases always give the same choice.

    Args:
        cases: all cases.
        shows: a function from a case to what it shows.
        cost: a function from a case to the cost of visiting it.
        always: cases that are visited whatever they show.
    """
    shown = [shows(case) for case in cases]
    kept = list(always)
    chosen = {at for at, case in enumerate(cases) if case in kept}
    left = set().union(*shown).difference(*(shown[at] for at in chosen))
    while left:
        best = max(range(len(cases)), key=lambda at: len(shown[at] & left) / cost(cases[at]))
        chosen.add(best)
        left -= shown[best]
    return [cases[at] for at in sorted(chosen)]


def paired(
    title: str, *, kinds: Mapping[str, Callable[[Any], Hashable]] | None = None, **axes: Iterable[Any]
) -> list[Any]:
    """Cases of independent axes for ``parametrize``: every two values of two axes occur together in some case.

    Args:
        title: the title of the note at the end of the run.
        kinds: axis to a function from a value to its kind. Of such an axis, kinds are paired with the other axes, and
            each value occurs at least once.
        axes: name to values.
    """
    names, kinds = list(axes), kinds or {}
    cases = list(product(*axes.values()))

    def shows(case: tuple[Any, ...]) -> set[Hashable]:
        values = {f"{name} {value}" for name, value in zip(names, case, strict=True)}
        kind = [f"{name} {kinds.get(name, str)(value)}" for name, value in zip(names, case, strict=True)]
        return values | pairs(kind)

    return visited(title, cases, shows)


def visited(title: str, cases: Sequence[Case], shows: Callable[[Case], set[Hashable]], **options: Any) -> list[Case]:
    """The cases that `cover` chooses, or all in an exhaustive run, with a note for the end of the run."""
    chosen = list(cases) if EXHAUSTIVE else cover(cases, shows, **options)
    seen = set().union(*map(shows, cases))
    sizes = {n: sum(1 for one in seen if isinstance(one, tuple) and len(one) == n) for n in (2, 3)}
    NOTES.append(
        f"{title}: {len(chosen)} of {len(cases)}, which show all of {len(seen) - sum(sizes.values())} features, "
        f"{sizes[2]} pairs and {sizes[3]} triples"
    )
    return chosen
