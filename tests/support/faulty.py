"""Inputs with one fault each, and worlds of processes that plan them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import megatron_pgloss as pg
from support import jobs
from support.data import Row

Given = dict[str, Any]
GUILTY = 2
"""The rank that has the fault, in a world of four."""


def padded(rows: Sequence[Row]) -> Given:
    """Arguments of ``from_padded`` for these rows."""
    width = max(len(row["tokens"]) for row in rows)

    def matrix(values: list[list[Any]], fill: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*line, *[fill] * (width - len(line))] for line in values], dtype=dtype)

    def column(name: str, dtype: torch.dtype, fill: Any = 0) -> torch.Tensor:
        return matrix([row[name] for row in rows], fill, dtype)

    return dict(
        tokens=column("tokens", torch.int64),
        lengths=torch.tensor([len(row["tokens"]) for row in rows]),
        action_mask=column("action", torch.bool),
        observation_mask=column("observation", torch.bool),
        advantages=column("advantages", torch.float64),
        old_logprobs=column("old", torch.float64),
        rollout_logprobs=column("rollout", torch.float64),
        ref_logprobs=column("ref", torch.float64),
        prompt_ids=[row["prompt"] for row in rows],
        episode_ids=[row["episode"] for row in rows],
        sample_ids=[f"s{row['prompt']}.{row['episode']}.{len(row['tokens'])}" for row in rows],
        terminations=[row["termination"] for row in rows],
        masks={"keep": matrix([row["masks"]["keep"] for row in rows], False, torch.bool)},
    )


def spec() -> pg.LossSpec:
    """A spec that reads every stream and has turns in a normaliser, so that faults in all of them show."""
    return pg.LossSpec(
        components=[
            pg.PolicyGradient(normalizer="mean(prompt) > mean(turn) > mean(token)"),
            pg.KL(coef=0.1),
            pg.CrossEntropy(coef=0.1, normalizer="mean(sequence) > mean(token)"),
        ],
        corrections=[pg.TruncatedIS()],
        masks=[pg.DropTruncated(), pg.UserMask(name="keep", on=("kl",))],
    )


def at_action(given: Given, name: str, value: float) -> Given:
    """Set stream ``name`` at the first action token of the first row that was not truncated."""
    row = next(i for i, state in enumerate(given["terminations"]) if state != "truncated")
    token = int(given["action_mask"][row].to(torch.int8).argmax())
    stream = given[name].clone()
    stream[row, token] = value
    return given | {name: stream}


def action_place(given: Given) -> str:
    """The words by which errors name that token."""
    row = next(i for i, state in enumerate(given["terminations"]) if state != "truncated")
    return f"sample '{given['sample_ids'][row]}', token {int(given['action_mask'][row].to(torch.int8).argmax())}"


def first_token(given: Given) -> Given:
    mask = given["action_mask"].clone()
    mask[0, 0] = True
    return given | {"action_mask": mask, "observation_mask": given["observation_mask"] & ~mask}


def no_member(given: Given) -> Given:
    row = given["tokens"].shape[0] - 1
    keep = torch.arange(row + 1)[:, None] != row
    return given | {key: given[key] & keep for key in ("action_mask", "observation_mask")}


def before_turns(given: Given) -> Given:
    return given | {"turn_ids": torch.full_like(given["tokens"], -1)}


def cut(name: str) -> Callable[[Given], Given]:
    return lambda given: given | {name: given[name][:, :-1]}


def swap(**changes: Any) -> Callable[[Given], Given]:
    """Replace arguments; a function is applied to the old value."""
    return lambda given: given | {k: v(given[k]) if callable(v) else v for k, v in changes.items()}


def without(name: str) -> Callable[[Given], Given]:
    return lambda given: {key: value for key, value in given.items() if key != name}


@dataclass(frozen=True)
class Fault:
    """A mistake of one rank."""

    spoil: Callable[[Given], Given]
    words: tuple[str, ...]
    """Words that the error must have, beside the rank."""
    kind: str = "DataError"


# Errors of the builder, on the guilty rank alone; the batch holds them until it is planned.
BUILD = {
    "a stream's shape": Fault(cut("old_logprobs"), ("old_logprobs has the wrong shape",)),
    "a mask's shape": Fault(cut("action_mask"), ("action_mask has the wrong shape",)),
    "bf16 log-probs": Fault(swap(old_logprobs=torch.Tensor.bfloat16), ("old_logprobs is torch.bfloat16", "allow_low")),
    "tokens as floats": Fault(swap(tokens=torch.Tensor.double), ("tokens must be an integer tensor", "torch.float64")),
    "a mask as floats": Fault(swap(action_mask=torch.Tensor.float), ("action_mask must be bool",)),
    "a length beyond the width": Fault(swap(lengths=lambda n: n + 99), ("a length is larger than the width",)),
    "no lengths": Fault(without("lengths"), ("either lengths or attention_mask",)),
    "two authors": Fault(swap(observation_mask=torch.ones_like), ("marked as action and as observation",)),
    "ids too short": Fault(swap(prompt_ids=["p"]), ("prompt_ids has the wrong length",)),
    "unknown termination": Fault(swap(terminations=lambda t: ["lost"] * len(t)), ("unknown termination",)),
    "unknown argument": Fault(swap(old_logprob=1.0), ("no argument 'old_logprob'", "did you mean 'old_logprobs'")),
    "text for a tensor": Fault(swap(advantages="high"), ("advantages is not a tensor",)),
    "a meta tensor": Fault(swap(ref_logprobs=lambda r: r.to("meta")), ("ref_logprobs is a meta tensor",)),
    "rows of two lengths": Fault(swap(versions=[[1, 2], [3]]), ("versions has rows of different lengths",)),
    "an action in the padding": Fault(swap(lengths=lambda n: n - 1), ("action_mask is true outside of its row",)),
    "no tokens": Fault(without("tokens"), ("from_padded has no tokens",)),
}
# Errors that only the plan can find, because they depend on the spec.
PLAN = {
    "NaN in old": Fault(lambda g: at_action(g, "old_logprobs", float("nan")), ("non-finite", "'rl'", "stream 'old'")),
    "inf in ref": Fault(lambda g: at_action(g, "ref_logprobs", float("inf")), ("non-finite", "'kl'", "stream 'ref'")),
    "NaN advantage": Fault(lambda g: at_action(g, "advantages", float("nan")), ("non-finite", "stream 'advantages'")),
    "action on a first token": Fault(first_token, ("first token of a sequence", "token 0", "stream 'action_mask'")),
    "a sequence without member": Fault(no_member, ("no member of any component", "sample 's")),
    "a counted token in no turn": Fault(before_turns, ("counted token belongs to none", "turn_ids")),
    "a stream the spec reads": Fault(without("ref_logprobs"), ("ref is absent", "read by kl")),
    "terminations": Fault(without("terminations"), ("terminations are absent", "DropTruncated")),
    "prompt ids": Fault(without("prompt_ids"), ("prompt_ids are absent",)),
    "a mask the spec reads": Fault(without("masks"), ("reads a mask 'keep'",)),
    "weights for no component": Fault(
        lambda g: g | {"weights": {"r1": torch.ones_like(g["old_logprobs"])}}, ("weights for 'r1'",)
    ),
    "a negative token": Fault(swap(tokens=lambda t: t - 1000), ("off the vocabulary", "stream 'tokens'")),
    "temperature 0": Fault(swap(temperature=0.0), ("temperature must be positive", "stream 'temperature'")),
}


def outcome(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Type and text of the error that ``call`` raised ("fine" for none), and how long it took."""
    started = time.monotonic()
    try:
        call()
        kind, text = "fine", ""
    except pg.PGLossError as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.monotonic() - started


def dealt(rank: int, world: int) -> list[Row]:
    """This rank's rows of the shared step."""
    return jobs.share(jobs.rows_of_step(0), rank, world)


def plan_faults(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    """Plan each fault on one of several data-parallel ranks, and return the error of this rank."""
    found = {}
    for name, fault in (BUILD | PLAN).items():
        given = padded(dealt(rank, world))
        given = fault.spoil(given) if rank == GUILTY else given

        def call(given: Given = given) -> Any:
            batch = pg.TokenBatch.from_padded(**given)
            return pg.plan([batch], spec(), split=pg.Split(sequences=2), group=dist.group.WORLD)

        found[name] = outcome(call)
    return found
