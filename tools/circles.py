"""Find circles of imports inside each room of the package, imports for types alone and inside functions included.

    python tools/circles.py

A room is a package; its parts are its modules, its folders (each as a whole), and its own ``__init__``. Parts that
import each other, directly or not, form a circle. `KNOWN` lists the circles that are still to be resolved: a circle
that it does not list fails the check, and so does a listed one that no longer exists, so that the table can only
shrink.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_pgloss"
KNOWN: dict[str, tuple[str, ...]] = {}
"""Room to its circles, each the names of its parts in order."""


def circles(graph: grimp.ImportGraph, room: str) -> list[str]:
    """The circles of one room, each as the names of its parts in alphabetical order."""
    parts = {child.rpartition(".")[2]: graph.find_descendants(child) | {child} for child in graph.find_children(room)}
    parts["__init__"] = {room}
    owner = {module: part for part, modules in parts.items() for module in modules}
    imports: dict[str, set[str]] = {part: set() for part in parts}
    for module, part in owner.items():
        imports[part] |= {owner[other] for other in graph.find_modules_directly_imported_by(module) if other in owner}
    reach = {part: _reached(imports, part) for part in imports}
    rings = {tuple(sorted(other for other in reach[part] if part in reach[other])) for part in imports}
    return sorted(" ".join(ring) for ring in rings if len(ring) > 1)


def _reached(imports: dict[str, set[str]], start: str) -> set[str]:
    """All parts that ``start`` imports, directly or not."""
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        for part in imports[ahead.pop()] - reached:
            reached.add(part)
            ahead.append(part)
    return reached


def all_circles(package: str = PACKAGE) -> dict[str, tuple[str, ...]]:
    """Room to its circles; rooms without one are left out."""
    graph = grimp.build_graph(package, cache_dir=None)
    rooms = sorted(module for module in graph.modules if graph.find_children(module))
    found = {room: tuple(circles(graph, room)) for room in rooms}
    return {room: rings for room, rings in found.items() if rings}


def differences(found: dict[str, tuple[str, ...]], known: dict[str, tuple[str, ...]]) -> Iterable[str]:
    """One line for each difference between ``found`` and ``known``."""
    for room in sorted(found.keys() | known.keys()):
        here, listed = found.get(room, ()), known.get(room, ())
        yield from (f"{room}: a circle of imports: {ring}" for ring in here if ring not in listed)
        yield from (f"{room}: no circle any more, take it out of KNOWN: {ring}" for ring in listed if ring not in here)


def main() -> int:
    """Print the differences from `KNOWN`; return 1 if there are any."""
    sys.path.insert(0, str(ROOT))
    wrong = list(differences(all_circles(), KNOWN))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
