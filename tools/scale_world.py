"""One rank of a world that no test can start: it makes its real plan, and the other ranks' rows are made up.

The rank plans its share of a step through torch's ``fake`` process-group backend, which takes a collective's arguments
and moves nothing. What the gather would have brought is put in its place: a row from every other rank, each with its
own counts and keys, made from the lengths of the whole step's sequences. `N` sequences, `D` data ranks, `W` ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_pgloss as pg
from megatron_pgloss.planning import Arrangement, plan, units
from megatron_pgloss.planning.agreement import FIELDS, HEAD, ROW, Ranks
from megatron_pgloss.planning.members import reasons
from megatron_pgloss.planning.wire import SLOTS

SPLIT = pg.Split(sequences=4)
REPLICA = 16
"""Number of ranks that hold the same data (TP 4 x PP 4, say); together they are one data-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of one step and of its world."""

    world: int
    sequences: int = 100_000
    tokens: int = 1_000_000_000
    """About how many tokens the whole step has."""
    keyed: bool = False
    """Whether the normaliser names prompts and episodes."""

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        return self.world // REPLICA

    @property
    def spec(self) -> pg.LossSpec:
        """A spec of two components over the sampled tokens."""
        path = "mean(prompt) > mean(episode) > mean(token)" if self.keyed else "mean(token)"
        return pg.LossSpec(components=[pg.PolicyGradient(normalizer=path), pg.Entropy(coef=1e-3)], old="given")


class Step:
    """The lengths of all sequences of a step: uneven, ten to a prompt, dealt to the data-parallel ranks in order."""

    def __init__(self, case: Case) -> None:
        self.case, n = case, case.sequences
        dice = torch.Generator().manual_seed(0)
        mean = case.tokens // n
        self.length_N = torch.randint(mean // 2, mean + mean // 2 + 1, (n,), generator=dice)
        self.actions_N = self.length_N - self.length_N // 8
        self.prompt_N = torch.arange(n) // 10
        self.episode_N = torch.arange(n) % 10
        # A rank's number of sequences is no multiple of ten, so prompts straddle ranks.
        self.owner_N = torch.arange(n) * case.data // n
        self.first_D = torch.searchsorted(self.owner_N, torch.arange(case.data))
        self.count_D = torch.bincount(self.owner_N, minlength=case.data)

    def per_rank(self, values_N: Tensor) -> Tensor:
        """Sums over each data rank's sequences, int64 [D]."""
        return torch.zeros(self.case.data, dtype=torch.int64).index_add_(0, self.owner_N, values_N)

    def ids(self, rows: slice) -> dict[str, list[int]]:
        """Prompt and episode ids of the sequences ``rows``."""
        return {"prompt_ids": self.prompt_N[rows].tolist(), "episode_ids": self.episode_N[rows].tolist()}

    def share(self, rank: int) -> pg.TokenBatch:
        """The rows of one data-parallel rank, with the streams that the spec reads."""
        rows = slice(int(self.first_D[rank]), int(self.first_D[rank] + self.count_D[rank]))
        length_S = self.length_N[rows]
        total = int(length_S.sum())
        start_S = length_S.cumsum(0) - length_S
        place_T = torch.arange(total) - torch.repeat_interleave(start_S, length_S)
        action_T = place_T >= torch.repeat_interleave(length_S // 8, length_S)
        return pg.TokenBatch.from_packed(
            tokens=place_T % 32_000, lengths=length_S, action_mask=action_T,
            advantages=torch.where(place_T % 2 == 0, 1.0, -1.0), old_logprobs=torch.full((total,), -1.0),
            **self.ids(rows),
        )  # fmt: skip


@dataclass(kw_only=True)
class Wire:
    """Records every gather, and makes up the rows of the other ranks."""

    step: Step
    rank: int
    calls: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds spent on making up rows, which are no part of a plan's time."""

    def fill(self, mine: Tensor, size: int) -> Tensor:
        """The gathered rows [size, ...]: this rank's own rows, and made-up rows of every other rank."""
        began = time.process_time()
        world = size == self.step.case.world
        kind = "keyed counts" if not world else "counts" if mine.numel() == ROW else "metrics"
        rows = {"counts": self._world, "keyed counts": self._keyed, "metrics": self._metrics}[kind](mine)
        if not torch.equal(rows[self.rank * REPLICA if world else self.rank], mine):
            raise SystemExit(f"the {kind} made up for this rank are not what it sends: the simulation is out of date")
        sent = mine.numel() * mine.element_size()
        self.calls.append({"carries": kind, "over": "world" if world else "dp", "sent": sent, "received": sent * size})
        self.seconds += time.process_time() - began
        return rows

    def _world(self, mine: Tensor) -> Tensor:
        step = self.step
        rank_W = torch.arange(step.case.world) // REPLICA
        rows = mine.repeat(step.case.world, 1)
        tokens_D, actions_D = step.per_rank(step.length_N), step.per_rank(step.actions_N)
        longest_D = torch.zeros_like(tokens_D).scatter_reduce_(0, step.owner_N, step.length_N, "amax")
        micro_D = -(-step.count_D // 4)
        heads = {
            "data_rank": torch.arange(step.case.data), "rows": step.count_D, "tokens": tokens_D, "actions": actions_D,
            "width": longest_D, "microbatches": micro_D, "unit_rows": step.count_D * int(step.case.keyed),
        }  # fmt: skip
        heads["batch"] = mine[FIELDS.index("batch")] ^ torch.arange(step.case.data) ^ self.rank
        for name, values_D in heads.items():
            rows[:, FIELDS.index(name)] = values_D[rank_W]
        slots = dict.fromkeys(SLOTS, actions_D) | {"sequence": step.count_D, "turn": step.count_D}
        stride = len(SLOTS) + len(reasons(step.case.spec))
        for c in range(len(step.case.spec.components)):
            for i, name in enumerate(SLOTS):
                rows[:, HEAD + c * stride + i] = slots[name][rank_W]
        return rows

    def _metrics(self, mine: Tensor) -> Tensor:
        # One rank of each replica reports its counts, here the first.
        rows = mine.repeat(self.step.case.world, 1)
        rows[:, 0] = (torch.arange(self.step.case.world) % REPLICA == 0).to(torch.int64)
        return rows

    def _keyed(self, mine: Tensor) -> Tensor:
        step, n = self.step, self.step.case.sequences
        # Real keys, from rows of two tokens.
        tiny = pg.TokenBatch.from_packed(
            tokens=torch.zeros(2 * n, dtype=torch.int64), lengths=torch.full((n,), 2),
            action_mask=torch.tensor([False, True]).repeat(n), **step.ids(slice(None)),
        )  # fmt: skip
        found = units.find(tiny)
        one = torch.ones(n, dtype=torch.int64)
        counts = [one, one, one, step.actions_N] * len(step.case.spec.components)
        keys = found.key["prompt"][found.parent["episode", "prompt"]]
        rows_N = torch.cat([one[:, None], found.key["episode"], keys, torch.stack(counts, 1)], 1)
        table = torch.zeros(step.case.data, *mine.shape, dtype=torch.int64)
        table[step.owner_N, torch.arange(n) - step.first_D[step.owner_N]] = rows_N
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated(Ranks):
    """`Ranks` whose gathers go through the ``fake`` backend and return made-up rows."""

    wire: Wire

    def gather(self, rows: Tensor, group: Any, size: int) -> Tensor:
        """Rows of all ranks, int64 [size, ...], as from `Ranks.gather`."""
        Ranks.gather(self, rows, group, size)  # the collective itself: shapes and groups as in a real job
        return self.wire.fill(rows, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The attributes of a layout that `finish.collect` reads."""

    ranks: Simulated
    speaks: bool = True
    last_stage: bool = True


def measure(case: Case) -> dict[str, Any]:
    """Plan one rank's share and close the step; bytes of every collective, CPU seconds, peak memory beyond the data.

    Raises:
        SystemExit: the plan did not count what the whole step has.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    try:
        step, rank = Step(case), case.data // 2
        group = dist.new_group(list(range(0, case.world, REPLICA)))
        wire = Wire(step=step, rank=rank)
        ranks = Simulated(
            world=dist.group.WORLD, data=group, world_rank=rank * REPLICA, world_size=case.world, data_rank=rank,
            data_size=case.data, wire=wire,
        )  # fmt: skip
        batch = step.share(rank)
        before, began = _memory(reset=True), time.process_time()
        made = plan([batch], case.spec, split=SPLIT, ranks=ranks, arrangement=Arrangement(fixed=True, left=True))
        seconds, peak = time.process_time() - began - wire.seconds, _memory() - before
        end = _finish(made, Place(ranks=ranks), wire)
    finally:
        dist.destroy_process_group()
    _check(made, step)
    return {
        "plan": seconds, "finish": end, "peak": peak, "calls": wire.calls, "tokens": int(batch.cu_S1[-1]),
        "rows": len(batch), "microbatches": made.num_microbatches, "width": made.width,
    }  # fmt: skip


def _finish(made: pg.Plan, place: Any, wire: Wire) -> float:
    """CPU seconds of the gather that ends a step: the first micro-batch's metrics stand for all of them."""
    from megatron_pgloss.megatron import finish

    micro = next(iter(made.microbatches()))
    logp = micro.stream("old") + 0.1
    out = pg.policy_loss(pg.TokenLogprobs(logprob=logp, entropy=torch.full_like(logp, 2.0)), micro)
    report = {name: metric.pack() for name, metric in out.metrics.items()}
    before, began = wire.seconds, time.process_time()
    found = finish.collect([report] * made.num_microbatches, list(report), made, place)
    seconds = time.process_time() - began - (wire.seconds - before)
    if found.place is not None or len(found.metrics) != len(report):
        raise SystemExit(f"the end of the step found {found.place}, {len(found.metrics)} of {len(report)} metrics")
    return seconds


def _check(made: pg.Plan, step: Step) -> None:
    """Check that the plan's counts are those of the whole step, and its weights those of the formula."""
    case, counts = step.case, made.counts["rl"]
    wanted = {"token": int(step.actions_N.sum()), "sequence": case.sequences}
    if case.keyed:
        wanted |= {"prompt": int(step.prompt_N[-1]) + 1, "episode": case.sequences}
    if any(counts[name] != value for name, value in wanted.items()):
        raise SystemExit(f"the plan counted {counts}, the step has {wanted}")
    mine_N = step.owner_N == made.ranks.data_rank
    weight = float(made.components["rl"].weight_T.double().sum())
    share = float(step.actions_N[mine_N].sum()) / wanted["token"]
    if case.keyed:
        per_prompt = torch.bincount(step.prompt_N)
        share = float((1 / per_prompt[step.prompt_N[mine_N]].double()).sum()) / wanted["prompt"]
    if abs(weight / share - 1) > 1e-5:  # float32 weights, summed
        raise SystemExit(f"this rank's weights add up to {weight}, by the formula to {share}")


def _memory(*, reset: bool = False) -> int:
    """Peak resident bytes of this process; ``reset`` starts a new peak from now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS" if reset else "VmHWM"].split()[0]) * 1024
