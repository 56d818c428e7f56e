"""Which of many cases are visited: few that show all that the whole product shows, or the product itself.

A fault that needs two axes together (context parallelism and packed rows, say) shows in every case that has both. So a
run visits as many cases as show every pair of what may matter, and every triple that is named; ``--exhaustive`` visits
all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

EXHAUSTIVE = bool(os.environ.get("PGLOSS_EXHAUSTIVE"))
"""Whether everything is visited (``bash tools/test.sh --exhaustive``)."""
NOTES: list[str] = []
"""What was chosen, for the end of the run."""
Case = TypeVar("Case")


def pairs(features: Iterable[Hashable], triples: Sequence[Sequence[Hashable]] = ()) -> set[Hashable]:
    """Every feature, every two together, and those of ``triples`` that are there whole."""
    held = sorted(set(features), key=repr)
    whole = {tuple(triple) for triple in triples if set(triple) <= set(held)}
    return set(held) | set(combinations(held, 2)) | whole


def cover(
    cases: Sequence[Case], shows: Callable[[Case], set[Hashable]], cost: Callable[[Case], float] = lambda _: 1.0,
    always: Iterable[Case] = (),
) -> list[Case]:  # fmt: skip
    """Few of ``cases``, in their order, that show between them all that the cases show.

    Greedy: whoever shows the most that is still missing for its cost comes next. The same cases give the same choice.

    Args:
        cases: all.
        shows: what a case shows.
        cost: of a visit.
        always: visited whatever they show.
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
    """Values of independent axes for ``parametrize``: every two values of two axes together in one case at least.

    Args:
        title: for the note at the end of the run.
        kinds: axis to what of a value is paired with the other axes; the value itself is visited at least once. None:
            the value.
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
    """`cover`, or all in an exhaustive run; a note says which."""
    chosen = list(cases) if EXHAUSTIVE else cover(cases, shows, **options)
    seen = set().union(*map(shows, cases))
    sizes = {n: sum(1 for one in seen if isinstance(one, tuple) and len(one) == n) for n in (2, 3)}
    NOTES.append(
        f"{title}: {len(chosen)} of {len(cases)}, which show all of {len(seen) - sum(sizes.values())} features, "
        f"{sizes[2]} pairs and {sizes[3]} triples"
    )
    return chosen
