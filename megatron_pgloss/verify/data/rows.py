"""Synthetic multi-turn rows, a function of the seed alone; nothing here knows the code that the rows judge.

A row is a plain dict in token order (index i is about ``tokens[i]``), the form the oracle reads.
The rows are made so that a wrong loss gives another number than a right one: advantages of both signs and zero, uneven
lengths, several turns with observations between them, holes in the masks, prompts and episodes of
more than one row, some rows truncated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
VOCAB, WIDTH = 32, 40
"""Vocabulary size and longest row of the harness's data."""


class Dice:
    """Draws from one ``torch.Generator``, so that rows depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return bool(torch.rand((), generator=self.generator, dtype=torch.float64) < p)

    def normal(self, count: int, scale: float = 1.0) -> Tensor:
        """Float64 [count] of standard deviation ``scale``."""
        return torch.randn(count, generator=self.generator, dtype=torch.float64) * scale


def make_rows(
    seed: int,
    n_prompts: int = 3,
    episodes_per_prompt: int = 3,
    vocab: int = 32,
    *,
    min_length: int = 8,
    max_length: int = 40,
    split_episodes: bool = True,
    truncated: float = 0.2,
    temperature: bool = False,
) -> list[Row]:
    """Rows of one step, prompt by prompt.

    The first prompt's even episodes have two rows each (``split_episodes``), all others one.
    Each row opens with 1 to 3 prompt tokens and goes on in runs of 1 to 6 action and observation
    tokens by turns; the first two rows have the longest and the shortest length. The user mask
    ``keep`` has holes everywhere. Streams ``old``, ``rollout`` and ``ref`` are made up;
    ``attach_streams`` replaces them by streams near a model's log-probs. ``temperature`` gives each token a
    temperature of its own.
    """
    dice = Dice(seed)
    rows: list[Row] = []
    for prompt in range(n_prompts):
        for episode in range(episodes_per_prompt):
            parts = 2 if split_episodes and prompt == 0 and episode % 2 == 0 else 1
            for part in range(parts):
                # The first rows take the two extreme lengths, so that every data set has both.
                length = dice.whole(min_length, max_length)
                length = {0: max_length, 1: min_length}.get(len(rows), length)
                row = _one_row(dice, length, vocab)
                sign = 1 if (episode + part) % 2 == 0 else -1
                row["advantages"] = _advantages(dice, length, sign)
                row["prompt"], row["episode"] = f"p{prompt}", episode
                row["termination"] = "truncated" if dice.chance(truncated) else "success"
                if temperature:
                    row["temperature"] = [dice.whole(7, 13) / 10 for _ in range(length)]
                rows.append(row)
    made_up = [dice.normal(len(row["tokens"]), 0.5) - 2.0 for row in rows]
    attach_streams(rows, made_up, seed)
    return rows


def attach_streams(rows: list[Row], logprobs: list[Tensor], seed: int, scale: float = 0.25) -> None:
    """Set ``old``, ``rollout`` and ``ref`` of each row, in place, to its log-probs plus noise.

    Args:
        rows: rows in token order.
        logprobs: for each row [L], the log-probs of the policy under test; they are detached.
        seed: the seed of the noise.
        scale: standard deviation of log(pi / old). At 0.25 a clip of 0.2 / 0.28 puts 5 to 40 % of
            the tokens of either sign of advantage on its flat side.
    """
    dice = Dice(seed + 7919)
    for row, logprob in zip(rows, logprobs, strict=True):
        base, length = logprob.detach().to("cpu", torch.float64), len(row["tokens"])
        for name, size in (("old", 1.0), ("rollout", 1.3), ("ref", 1.6)):
            stream = base + dice.normal(length, scale * size)
            row[name] = stream.clamp(max=-1e-3).tolist()


def attach_teacher(rows: list[Row], seed: int, vocab: int = VOCAB, k: int = 4) -> None:
    """Set ``wide`` of each row, in place: a teacher's log-probs at ``k`` ids of every token, some of the ids -1."""
    dice = Dice(seed + 104729)
    for row in rows:
        length = len(row["tokens"])
        logp_LV = (2 * dice.normal(length * vocab).reshape(length, vocab)).log_softmax(1)
        logp_Lk, ids_Lk = logp_LV.topk(k)
        fewer = torch.tensor([[dice.chance(0.2) for _ in range(k)] for _ in range(length)]).reshape(length, k)
        ids_Lk = torch.where(fewer, -1, ids_Lk)
        row["wide"] = {"teacher_ids": ids_Lk.tolist(), "teacher_logprobs": logp_Lk.tolist()}


def attach_kept(rows: list[Row], seed: int, vocab: int = VOCAB, k: int = 20) -> None:
    """Set the sampler's kept sets of each row, in place: ``sampler`` has top-k, top-p and min-p, each off at some
    tokens; ``wide["kept"]`` has up to ``k`` ids per token, none at some tokens, and sometimes not the token itself.
    """
    dice = Dice(seed + 15485863)
    for row in rows:
        length = len(row["tokens"])
        row["sampler"] = {
            "top_k": [dice.whole(vocab // 2, vocab) if dice.chance(0.7) else 0 for _ in range(length)],
            "top_p": [dice.whole(70, 99) / 100 if dice.chance(0.7) else 1.0 for _ in range(length)],
            "min_p": [dice.whole(1, 30) / 100 if dice.chance(0.5) else 0.0 for _ in range(length)],
        }
        ids = [torch.randperm(vocab, generator=dice.generator)[:k].tolist() for _ in range(length)]
        row["wide"]["kept"] = [
            [v if size > j else -1 for j, v in enumerate(one)]
            for one, size in zip(ids, [dice.whole(5, k) if dice.chance(0.8) else 0 for _ in range(length)], strict=True)
        ]


def tail_rows(count: int = 6, length: int = 16, everywhere: int = 0) -> list[Row]:
    """Rows of which only the last two tokens are actions, so that under context parallelism most ranks hold no member.

    In the first ``everywhere`` rows all tokens from the third on are actions. Streams are made up, as in ``make_rows``.
    """
    rows: list[Row] = []
    for i in range(count):
        rows.append(
            {
                "tokens": [(7 * i + 5 * k + k * k) % VOCAB for k in range(length)],
                "action": [k > 1 if i < everywhere else k >= length - 2 for k in range(length)],
                "observation": [False] * length,
                "advantages": [(-1.0) ** i] * length,
                "masks": {"keep": [True] * length},
                "weights": {"rl": [1.0] * length, "ce": [1.0] * length},
                "prompt": f"p{i // 2}",
                "episode": i,
                "termination": "success",
                "temperature": None,
                "turn": None,
            }
        )
    attach_streams(rows, [torch.full((length,), -2.0, dtype=torch.float64)] * count, 3)
    return rows


def _one_row(dice: Dice, length: int, vocab: int) -> Row:
    """Draw the tokens, flags, masks and weights of a row."""
    action = [False] * min(dice.whole(1, 3), length - 2)
    observation = [False] * len(action)
    acting = True
    while len(action) < length:
        room = length - len(action)
        first = acting and not any(action)
        # The first run of actions leaves room for an observation after it.
        run = min(dice.whole(1, 6), room - 1 if first and room > 1 else room)
        action += [acting] * run
        # Now and then a token between turns is neither action nor observation, like a token of a chat template.
        observation += [not acting and not (run > 2 and k == 0) for k in range(run)]
        acting = not acting
    keep = [not dice.chance(0.2) for _ in range(length)]
    for flags in (action, observation):
        keep[flags.index(True)] = True  # the user mask takes no whole component out of a row
    return {
        "tokens": [dice.whole(0, vocab - 1) for _ in range(length)],
        "action": action,
        "observation": observation,
        "masks": {"keep": keep},
        "weights": {
            "rl": [0.5 + dice.whole(0, 10) / 10 for _ in range(length)],
            "ce": [dice.whole(1, 10) / 10 for _ in range(length)],
        },
        "temperature": None,
        "turn": None,
    }


def _advantages(dice: Dice, length: int, sign: int) -> list[float]:
    """Draw advantages, mostly of the given sign, some of the other sign and some exactly 0."""
    size = dice.normal(length).abs() + 0.1
    values = [sign * float(x) for x in size]
    values = [-x if dice.chance(0.15) else x for x in values]
    return [0.0 if dice.chance(0.1) else x for x in values]
