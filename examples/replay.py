"""Writing rollouts to a file and reading them back. A run with ``--replay`` depends on the file and the seed alone."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch.distributed as dist
from rollouts import Rollout

from megatron_pgloss import DataError
from megatron_pgloss.megatron import Layout


class Recorder:
    """Writes every iteration's rollouts of all ranks, one JSON object per line, in order of (iteration, index)."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if dist.get_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("")

    def write(self, rollouts: list[Rollout], layout: Layout) -> None:
        """Add one iteration. A collective over the data-parallel group."""
        everyone = gather(rollouts, layout)
        if dist.get_rank() == 0:
            with self.path.open("a") as file:
                for rollout in sorted((r for part in everyone for r in part), key=lambda r: r.index):
                    file.write(json.dumps(asdict(rollout)) + "\n")


def gather(mine: list, layout: Layout) -> list[list]:
    """Every data-parallel rank's list, in rank order."""
    if layout.dp is None:
        return [mine]
    out: list[list] = [[] for _ in range(layout.dp_size)]
    dist.all_gather_object(out, mine, group=layout.dp)
    return out


def read(path: str) -> list[list[Rollout]]:
    """Rollouts of a record file, one list per iteration.

    Raises:
        DataError: there is no such file, it has no rollouts, or a line has another form.
    """
    names = {field.name for field in fields(Rollout)}
    found: dict[int, list[Rollout]] = {}
    if not Path(path).is_file():
        raise DataError("no such record file", got=path, fix="make one with --record FILE")
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        data = json.loads(line)
        if set(data) != names:
            raise DataError("not a rollout", expected=sorted(names), got=sorted(data), where=f"{path}:{number}")
        found.setdefault(data["iteration"], []).append(Rollout(**data))
    if not found:
        raise DataError("a record file without rollouts", got=path)
    return [found[iteration] for iteration in sorted(found)]


def deal(rollouts: list[Rollout], rank: int, size: int) -> list[Rollout]:
    """A data-parallel rank's rows. The deal is uneven on purpose, and the rollouts of a prompt lie on several ranks.

    The first rollout of each prompt goes to the last rank, the others round robin to the rest: the last rank has far
    fewer rows, so that some of its micro-batches stay empty.
    """
    if size == 1:
        return rollouts
    seen: dict[int, int] = {}
    mine = []
    for rollout in rollouts:
        place = seen.get(rollout.hidden, 0)
        seen[rollout.hidden] = place + 1
        owner = size - 1 if place == 0 else (place - 1) % (size - 1)
        if owner == rank:
            mine.append(rollout)
    return mine
