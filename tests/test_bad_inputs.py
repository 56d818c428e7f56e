"""Bad inputs on one of two ranks: each ends on both with the same error of the package, within seconds.

What one rank raises by itself would leave the other waiting in a collective for the whole timeout. The table is made of
values of every type for every argument, beside single mistakes in the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support.worlds import world_fixture

pytestmark = pytest.mark.multiproc
GUILTY, LIMIT = 1, 10.0
SPLIT = pg.Split(sequences=1)
SPEC = pg.LossSpec(
    components=[pg.PolicyGradient(normalizer="mean(prompt) > mean(sequence) > mean(token)"), pg.KL(), pg.TopKDistill()],
    corrections=[pg.TruncatedIS(), pg.Staleness(max_lag=5)],
    masks=[pg.DropTruncated(), pg.UserMask(name="m", on=("kl",))],
)
VALUES: dict[str, Any] = {
    "text": "high", "a list of text": ["a", "b"], "a dict": {"a": 1}, "a set": {1, 2}, "an object": object(),
    "bytes": b"12", "complex": torch.zeros(2, 3, dtype=torch.complex64), "a function": len,
    "a ragged list": [[1.0], []],
    "0-d": torch.tensor(1.0), "4-d": torch.zeros(1, 1, 2, 3), "numpy text": np.array(["a", "b"]),
    "numpy objects": np.array([None, 1], dtype=object), "meta": torch.zeros(2, 3, device="meta"),
    "sparse": torch.eye(2, 3).to_sparse(), "empty": torch.zeros(0), "too long": torch.zeros(7, 3), "nested": [[[1.0]]],
    "None inside": [[None, 1.0, 1.0], [1.0, 1.0, 1.0]],
}  # fmt: skip
ARGUMENTS = ("tokens", "lengths", "action_mask", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs",
             "temperature", "versions", "prompt_ids", "terminations", "masks")  # fmt: skip
HOLES: dict[str, Any] = {
    "None": [None, -1.0], "text": ["a", "b"], "a dict": {}, "one": [-1.0], "a word": "x"
}  # fmt: skip
FINE = {
    ("advantages", "0-d"), ("old_logprobs", "0-d"), ("rollout_logprobs", "0-d"), ("ref_logprobs", "0-d"),
    ("temperature", "0-d"), ("prompt_ids", "a list of text"), ("prompt_ids", "numpy text"),
}  # fmt: skip
"""Values that are no mistake there."""


def given() -> dict[str, Any]:
    """Two rows of three tokens; the last two of each are actions."""
    return {
        "tokens": torch.arange(6).reshape(2, 3), "lengths": [3, 3],
        "action_mask": torch.tensor([[False, True, True]] * 2), "advantages": [1.0, -1.0],
        "old_logprobs": torch.full((2, 3), -1.0), "rollout_logprobs": torch.full((2, 3), -1.0),
        "ref_logprobs": torch.full((2, 3), -1.0), "prompt_ids": [0, 1], "sample_ids": ["a", "b"],
        "terminations": ["success", "success"], "versions": 1, "masks": {"m": torch.ones(2, 3, dtype=torch.bool)},
        "streams": {"teacher_ids": torch.ones(2, 3, 2, dtype=torch.int64), "teacher_logprobs": -torch.ones(2, 3, 2)},
    }  # fmt: skip


def batch(**changes: Any) -> pg.TokenBatch:
    return pg.TokenBatch.from_padded(**given() | changes)


def planned(batches: Any, **more: Any) -> pg.Plan:
    options: dict[str, Any] = {"spec": SPEC, "split": SPLIT, "version": 2} | more
    return pg.plan(batches, options.pop("spec"), group=dist.group.WORLD, **options)


Case = Callable[[bool], Any]
"""What a rank does; true on the guilty one."""


def arguments() -> Iterator[tuple[str, Case]]:
    """Every argument of a batch with a value of every type."""
    for name in ARGUMENTS:
        for what, value in VALUES.items():
            if (name, what) not in FINE:
                wrong = {name: {"m": value} if name == "masks" else value}
                yield f"{name}: {what}", lambda me, wrong=wrong: planned([batch(**wrong) if me else batch()])


def data() -> Iterator[tuple[str, Case]]:
    """Single values that cannot be."""
    nan, inf = float("nan"), float("inf")
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "temperature"):
        for value in (nan, inf, -inf, *(() if name == "advantages" else (1.5,) if name != "temperature" else (0.0,))):
            stream = torch.full((2, 3), 1.0 if name == "temperature" else -1.0)
            stream[1, 2] = value
            yield f"{name} = {value}", lambda me, one={name: stream}: planned([batch(**one) if me else batch()])
    teacher = -torch.ones(2, 3, 2)
    teacher[0, 1, 0] = nan
    odd: dict[str, dict[str, Any]] = {
        "a teacher without a number": {"streams": given()["streams"] | {"teacher_logprobs": teacher}},
        "masks of mixed names": {"masks": {"m": torch.ones(2, 3, dtype=torch.bool), 3: torch.ones(2, 3)}},
        "no teacher": {"streams": {}}, "no prompts": {"prompt_ids": None}, "no old": {"old_logprobs": None},
        "a later version": {"versions": 9}, "two authors": {"observation_mask": torch.ones(2, 3, dtype=torch.bool)},
        "an action first": {"action_mask": torch.ones(2, 3, dtype=torch.bool)}, "lengths too long": {"lengths": [3, 9]},
        "negative lengths": {"lengths": [-1, 3]}, "no action": {"action_mask": torch.zeros(2, 3, dtype=torch.bool)},
        "negative tokens": {"tokens": -torch.ones(2, 3, dtype=torch.int64)}, "an unknown word": {"old_logprob": -1.0},
        "weights for nobody": {"weights": {"r": 1.0}}, "ids of two kinds": {"prompt_ids": [0, None]},
    }  # fmt: skip
    for name, wrong in odd.items():
        yield name, lambda me, wrong=wrong: planned([batch(**wrong) if me else batch()])


def options() -> Iterator[tuple[str, Case]]:
    """Arguments of `plan` of every type, and traces with holes in their log-probs."""
    for what, value in {"None": None, "text": "x", "a number": 3, "a batch": "batch", "a list": [1, None]}.items():
        yield f"batches: {what}", lambda me, v=value: planned((batch() if v == "batch" else v) if me else [batch()])
    for what, value in {"None": None, "text": "sequences=1", "a number": 4, "a dict": {"sequences": 1}}.items():
        yield f"split: {what}", lambda me, v=value: planned([batch()], split=v if me else SPLIT)
    for what, value in {
        "a list": [1.0], "text": "rl", "a huge number": {"rl": 10**400}, "nan": {"rl": float("nan")},
        "a word": {"rl": "big"}, "nobody": {"r": 1.0}, "a tensor of two": {"rl": torch.ones(2)}, "None": {"rl": None},
    }.items():  # fmt: skip
        yield f"coef: {what}", lambda me, v=value: planned([batch()], coef=v if me else None)
    for what, value in {"text": "x", "a dict": {}, "a preset": pg.presets.ppo}.items():
        yield f"spec: {what}", lambda me, v=value: planned([batch()], spec=v if me else SPEC)
    for name in ("version", "vocab_size"):
        for what, value in {"text": "3", "a float": 1.5, "a list": [1], "a bool": True}.items():
            yield f"{name}: {what}", lambda me, one={name: value}: planned([batch()], **one if me else {})
    for what, logprobs in HOLES.items():

        def traced(me: bool, logprobs: Any = logprobs) -> Any:
            given = logprobs if me else [-1.0, -1.0]
            spans = [
                pg.Span(tokens=[1], author="environment", role="user"),
                pg.Span(tokens=[2, 3], author="policy", role="assistant", logprobs=given),
            ]
            rows = pg.TokenBatch.from_traces([pg.Trace(spans=spans, prompt_id=0, sample_id="a", advantage=1.0)])
            return planned([rows], spec=pg.presets.ppo(old="rollout"))

        yield f"a span's log-probs: {what}", traced


def others() -> Iterator[tuple[str, Case]]:
    """The other public functions with a collective."""
    deal: dict[str, dict[str, Any]] = {
        "by an unknown unit": {"by": "foo"}, "count 0": {"count": 0}, "count -3": {"count": -3},
        "count text": {"count": "2"},
        "count a float": {"count": 1.5}, "a seed of text": {"seed": "x"}, "by None": {"by": None},
        "batches None": {"batches": None}, "batches a number": {"batches": [3]},
        "a broken batch": {"batches": "broken"},
    }  # fmt: skip
    for name, wrong in deal.items():

        def dealt(me: bool, wrong: dict[str, Any] = wrong) -> Any:
            one: dict[str, Any] = {"batches": [batch()], "count": 2, "by": "prompt"} | (wrong if me else {})
            if one["batches"] == "broken":
                one["batches"] = [batch(tokens="x")]
            return list(pg.minibatches(one.pop("batches"), one.pop("count"), group=dist.group.WORLD, **one))

        yield f"minibatches: {name}", dealt
    group = {"group": dist.group.WORLD}
    for what, value in {
        "text": "high", "None": None, "a number of rows": [1.0], "sparse": torch.eye(2).to_sparse(),
        "nan": [1.0, float("nan")], "meta": torch.zeros(2, device="meta"),
        "a dict": {"a": 1}, "complex": torch.zeros(2, dtype=torch.complex64),
    }.items():  # fmt: skip
        pick = lambda me, v=value: v if me else [1.0, 2.0]  # noqa: E731
        yield (
            f"group_relative: {what}",
            lambda me, pick=pick: pg.advantages.group_relative([batch()], pick(me), **group),
        )
        yield (
            f"gae: {what}",
            lambda me, pick=pick: pg.advantages.gae(
                [batch()], pick(me), values=torch.zeros(6), bootstrap="none", **group
            ),
        )
        yield f"of_rewards: {what}", lambda me, pick=pick: pg.advantages.of_rewards(pick(me), [0, 0], **group)
    bad = {"tokens": "x"}
    for name, given in {"none": {}, "group": {"baseline": "group"}}.items():
        yield (
            f"reinforce_plus_plus, baseline {name}: a broken batch",
            lambda me, given=given: pg.advantages.reinforce_plus_plus(
                [batch(**bad if me else {})], [1.0, 2.0], **given, **group
            ),
        )
    for what, value in {"text": "x", "a number": 3, "another shape": torch.ones(2, dtype=torch.bool)}.items():
        yield (
            f"whiten: mask {what}",
            lambda me, v=value: pg.advantages.whiten([batch()], mask=v if me else None, **group),
        )
    yield "whiten: no batches", lambda me: pg.advantages.whiten(5 if me else [batch()], **group)  # type: ignore[type-var]
    yield "episode_lengths: no batches", lambda me: pg.advantages.episode_lengths(5 if me else [batch()], **group)  # type: ignore[arg-type]


def passes() -> Iterator[tuple[str, Case]]:
    """Users' functions in the statistics pass, before collectives over the data-parallel ranks."""

    def passed(me: bool, part: pg.PolicyGradient, gates: list[Any]) -> Any:
        spec = pg.LossSpec(components=[part], gates=[pg.CovarianceGate(select="top", share=0.5), *gates])
        plan = planned([batch()], spec=spec)
        scored = [pg.TokenLogprobs(logprob=torch.full(micro.shape, -1.0)) for micro in plan.microbatches()]
        return pg.statistics_pass(plan, scored)

    def raising(me: bool, what: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fn(x: Any) -> Any:
            if me:
                raise KeyError("mine")
            return what(x)

        return fn

    strict = {"count_rejected": False}
    yield (
        "statistics pass: a gate that raises",
        lambda me: passed(me, pg.PolicyGradient(**strict), [pg.Gate(raising(me, lambda x: x.logp > -9))]),
    )
    yield (
        "statistics pass: a gate of another shape",
        lambda me: passed(me, pg.PolicyGradient(**strict), [pg.Gate(lambda x: x.logp[:1] > -9 if me else x.logp > -9)]),
    )
    yield (
        "statistics pass: a soft gate",
        lambda me: passed(me, pg.PolicyGradient(**strict), [pg.Gate(lambda x: x.logp.exp() if me else x.logp > -9)]),
    )
    yield (
        "statistics pass: a ratio that raises",
        lambda me: passed(me, pg.PolicyGradient(ratio=pg.CustomRatio(raising(me, lambda x: x.logp - x.old))), []),
    )


def disagreements() -> Iterator[tuple[str, Case]]:
    """Both ranks are right by themselves."""
    for name, wrong in {"seed": {"seed": 7}, "count": {"count": 1}, "by": {"by": "sequence"}}.items():

        def dealt(me: bool, wrong: dict[str, Any] = wrong) -> Any:
            one: dict[str, Any] = {"count": 2, "by": "prompt", "seed": 0} | (wrong if me else {})
            return list(pg.minibatches([batch()], one.pop("count"), group=dist.group.WORLD, **one))

        yield f"minibatches: {name}", dealt
    yield "plan: split", lambda me: planned([batch()], split=pg.Split(sequences=2) if me else SPLIT)
    yield "plan: version", lambda me: planned([batch()], version=3 if me else 2)


def cases() -> dict[str, Case]:
    """Name to what a rank does."""
    return dict((*arguments(), *data(), *options(), *others(), *passes()))


def outcome(call: Callable[[], Any]) -> tuple[str, str, float]:
    started = time.monotonic()
    kind, text = "fine", ""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # what is no error of the package fails the test
        kind, text = type(error).__name__, str(error)
    return kind, text, time.monotonic() - started


def tour(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    found = {}
    for name, case in (cases() | dict(disagreements())).items():
        found[name] = outcome(lambda case=case: case(rank == GUILTY))
    # Nothing is left over of all that: the next plan is one.
    found["in the end"] = outcome(lambda: planned([batch()]))
    return found


found = world_fixture(tour, 2, timeout=100)


def agreed(found: Any, name: str) -> tuple[str, str]:
    one, two = (by_rank[name] for by_rank in found)
    assert one[:2] == two[:2], f"{name}: {one} and {two}"
    assert max(one[2], two[2]) < LIMIT, name
    assert one[0] in pg.errors.KINDS, f"{name}: {one}"
    return one[:2]


def test_a_bad_input_is_the_same_error_on_both_ranks(found: Any) -> None:
    names = cases()
    assert len(names) >= 200
    for name in names:
        kind, text = agreed(found, name)
        # Somebody is named: the guilty rank, or the two that differ.
        assert f"rank {GUILTY}" in text, f"{name}: {kind}: {text}"
    assert found[0]["in the end"][0] == "fine", found[0]["in the end"]


def test_a_disagreement_is_the_same_error_on_both_ranks(found: Any) -> None:
    for name, _ in disagreements():
        kind, text = agreed(found, name)
        assert kind == "LayoutError" and "rank 0 and rank 1" in text, f"{name}: {text}"
