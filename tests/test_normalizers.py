"""Every normaliser is a per-token weight. The numbers are worked out by hand, in the docstrings or beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_pgloss as pg
from support.steps import ONE, near, pictured, refused, weights_of, weights_under


def test_length_bias_table() -> None:
    """Two rollouts of one group, 100 tokens with A = +1 and 1,000 with A = -1: under the sequence mean a token of the
    short one weighs (1/2)/100 = 0.005, of the long one (1/2)/1000 = 0.0005; under the token mean all weigh 1/1100."""
    batch = pictured("c" + "A" * 100, "c" + "A" * 1000, advantages=[1.0, -1.0], prompt_ids=["task"] * 2)
    assert weights_under("mean(sequence) > mean(token)", batch) == [0.005] * 100 + [0.0005] * 1000
    assert weights_under("mean(token)", batch) == [1 / 1100] * 1100
    single = pictured("c" + "A" * 100, "c" + "A" * 1000, dtype=torch.float32, advantages=[1.0, -1.0])
    low = torch.tensor(weights_under("mean(sequence) > mean(token)", single), dtype=torch.float32)
    assert low.tolist() == torch.tensor([0.005] * 100 + [0.0005] * 1000, dtype=torch.float32).tolist()


# Three sequences of 2, 3 and 1 action tokens. Prompt p has the first two, each its own episode; prompt q the last.
TABLE = {
    "mean(token)": [1 / 6] * 6,
    "mean(sequence) > mean(token)": [1 / 6] * 2 + [1 / 9] * 3 + [1 / 3],
    "mean(sequence) > sum(token)": [1 / 3] * 6,
    "mean(sequence) > sum(token)/4096": [1 / 3 / 4096] * 6,
    "sum(sequence) > sum(token)/4096": [1 / 4096] * 6,
    "mean(prompt) > mean(token)": [1 / 10] * 5 + [1 / 2],
    "mean(prompt) > mean(episode) > mean(token)": [1 / 8] * 2 + [1 / 12] * 3 + [1 / 2],
    "sum(token)": [1.0] * 6,
    "sum(token)/sqrt": [6**-0.5] * 6,
    "sum(token)/pow(2)": [1 / 36] * 6,
    "sum(token)/pow(0)": [1.0] * 6,
    "sum(token)/pow(-1)": [6.0] * 6,
    "sum(token)/avg": [1 / 6] * 6,  # the batch is one group of tokens, so its mean count is 6
    "sum(sequence)/2 > mean(token)": [1 / 4] * 2 + [1 / 6] * 3 + [1 / 2],
    "mean(sequence) > sum(token)/sqrt": [1 / 3 * 2**-0.5] * 2 + [1 / 3 * 3**-0.5] * 3 + [1 / 3],
    "mean(sequence) > sum(token)/avg": [1 / 6] * 6,  # 6 tokens in 3 sequences: 2 on average
    "sum(prompt)/sqrt > mean(token)": [2**-0.5 / 5] * 5 + [2**-0.5],
    "mean(prompt) > sum(sequence)/avg > mean(token)": [1 / 2 / 1.5 / n for n in (2, 2, 3, 3, 3, 1)],
    "mean(episode) > sum(sequence) > mean(token)": [1 / 6] * 2 + [1 / 9] * 3 + [1 / 3],
}


@pytest.mark.parametrize("normalizer", TABLE)
def test_every_row_of_the_table(normalizer: str) -> None:
    batch = pictured("cAA", "cAAA", "cA", prompt_ids=["p", "p", "q"], episode_ids=[0, 1, 0])
    near(weights_under(normalizer, batch), TABLE[normalizer])


def test_turns_nest_like_any_level() -> None:
    """Episode 0 has turns of 2, 1 and 3 tokens, episode 1 one turn of 1. mean(episode) > mean(turn) > mean(token):
    1/2 * 1/3 * 1/n in the first, 1/2 in the second. With all five levels, episode 0 in a prompt of its own and two
    sequences of (2, 1) and (3): 1/2 * 1 * 1/2 * 1/turns * 1/tokens."""
    batch = pictured("cAAoAoAAA", "cA", prompt_ids=[7, 7], episode_ids=[0, 1])
    expected = [1 / 12] * 2 + [1 / 6] + [1 / 18] * 3 + [1 / 2]
    near(weights_under("mean(episode) > mean(turn) > mean(token)", batch), expected)
    near(weights_under("mean(turn) > mean(token)", batch), [1 / 8] * 2 + [1 / 4] + [1 / 12] * 3 + [1 / 4])
    near(weights_under("sum(turn)/avg > sum(token)", batch), [1 / 4] * 7)
    cut = pictured("cAAoA", "oAAA", "cA", prompt_ids=["a", "a", "b"], episode_ids=[0, 0, 0])
    path = "mean(prompt) > mean(episode) > mean(sequence) > mean(turn) > mean(token)"
    near(weights_under(path, cut), [1 / 16] * 2 + [1 / 8] + [1 / 12] * 3 + [1 / 2])


def test_units_straddle_rows_and_batches() -> None:
    """Episode (p, 0) lies in two rows of two batches, 2 + 1 tokens; (q, 0) is another episode, of 2. By prompt, episode
    and token: 1/2 * 1 * 1/3 and 1/2 * 1 * 1/2. Without prompts "0" is one episode of 5 tokens."""
    first = pictured("cAA", prompt_ids=["p"], episode_ids=[0])
    second = pictured("cA", "cAA", prompt_ids=["p", "q"], episode_ids=[0, 0])
    path = "mean(prompt) > mean(episode) > mean(token)"
    near(weights_under(path, [first, second]), [1 / 6] * 3 + [1 / 4] * 2)
    near(weights_under("mean(episode) > mean(token)", [first, second]), [1 / 6] * 3 + [1 / 4] * 2)
    near(weights_under("mean(episode) > mean(sequence) > mean(token)", [first, second]), [1 / 8] * 2 + [1 / 4] * 3)
    plain = [pictured("cAA", episode_ids=[0]), pictured("cA", "cAA", episode_ids=[0, 0])]
    near(weights_under("mean(episode) > mean(token)", plain), [1 / 5] * 5)
    # The integer 0 and the text "0" are two prompts.
    near(weights_under("mean(prompt) > mean(token)", pictured("cAA", "cA", prompt_ids=[0, "0"])), [1 / 4] * 2 + [1 / 2])


LEFT = {"keep": [True] * 3 + [False] * 2 + [True] * 4 + [True, False, False, True]}
# Rows of 2, 1, 3 and 2 + 1 tokens; the mask empties the second row and the second turn of the last.
EMPTIED = ("cAA", "cA", "cAAA", "cAoA")


@pytest.mark.parametrize(
    ("normalizer", "counted", "every"),
    [
        ("mean(token)", [1 / 6] * 6, [1 / 6] * 6),
        ("mean(sequence) > mean(token)", [1 / 6] * 2 + [1 / 9] * 3 + [1 / 3], [1 / 8] * 2 + [1 / 12] * 3 + [1 / 4]),
        ("mean(turn) > mean(token)", [1 / 6] * 2 + [1 / 9] * 3 + [1 / 3], [1 / 10] * 2 + [1 / 15] * 3 + [1 / 5]),
        (
            "mean(sequence) > mean(turn) > mean(token)",
            [1 / 6] * 2 + [1 / 9] * 3 + [1 / 3],
            [1 / 8] * 2 + [1 / 12] * 3 + [1 / 8],
        ),
        # Prompt a has rows 0 and 2 (5 tokens), b row 1 (none left), c row 3 (1 token).
        ("mean(prompt) > mean(token)", [1 / 10] * 5 + [1 / 2], [1 / 15] * 5 + [1 / 3]),
        ("mean(episode) > mean(token)", [1 / 6] * 2 + [1 / 9] * 3 + [1 / 3], [1 / 8] * 2 + [1 / 12] * 3 + [1 / 4]),
        ("sum(sequence)/avg > mean(token)", [1 / 6] * 2 + [1 / 9] * 3 + [1 / 3], [1 / 8] * 2 + [1 / 12] * 3 + [1 / 4]),
    ],
)
def test_units_that_a_mask_emptied(normalizer: str, counted: list[float], every: list[float]) -> None:
    """``units="counted"`` leaves them out of their level's count, ``"all"`` keeps them in."""
    batch = pictured(*EMPTIED, masks=LEFT, prompt_ids=["a", "b", "a", "c"], episode_ids=[0, 1, 2, 3])
    for units, expected in (("counted", counted), ("all", every)):
        part = pg.PolicyGradient(surrogate=pg.Reinforce(), normalizer=normalizer, units=units)
        spec = pg.LossSpec(components=[part], masks=[pg.UserMask(name="keep")])
        near(weights_of(batch, spec), expected)


def test_fault_rows_and_excluded_rows_never_count() -> None:
    """Of three rows one broke and one has no action: a single sequence of 2 tokens remains, even with units="all"."""
    batch = pictured("cAA", "cA", "ccc", terminations=["success", "fault", "failure"])
    part = pg.PolicyGradient(surrogate=pg.Reinforce(), normalizer="mean(sequence) > mean(token)", units="all")
    spec = pg.LossSpec(components=[part], empty_sequences="exclude")
    near(weights_of(batch, spec), [1 / 2] * 2)


def ce(batch: pg.TokenBatch, **more: Any) -> list[float]:
    """Weights of a cross entropy that trains what the mask ``some`` leaves."""
    parts = [*pg.presets.reinforce().components, pg.CrossEntropy(**more)]
    spec = pg.LossSpec(old="policy", components=parts, masks=[pg.UserMask(name="some", on=("ce",))])
    return weights_of(batch, spec, "ce")


def test_count_set_may_be_wider_than_what_is_trained() -> None:
    """O has 3 tokens in row 0 and 1 in row 1; O' keeps two of the first and none of the second. The denominators are
    O's: token mean 1/4; sequence mean 1/2 * 1/3, for the second sequence counts through its observation."""
    some = [True] * 3 + [False] + [True] + [True] * 3 + [True, True, False, True]
    batch = pictured("cAoooAAA", "cAoA", masks={"some": some})
    near(ce(batch), [1 / 2] * 2)
    near(ce(batch, count="observations"), [1 / 4] * 2)
    near(ce(batch, count="observations", normalizer="mean(sequence) > mean(token)"), [1 / 6] * 2)
    near(ce(batch, normalizer="mean(sequence) > mean(token)"), [1 / 2] * 2)
    near(ce(batch, normalizer="mean(sequence) > mean(token)", units="all"), [1 / 4] * 2)


def test_count_set_may_be_a_mask() -> None:
    """``wide`` holds 4 of the 5 actions, ``narrow`` trains 2 of them: 1/4 each; by sequence 1/2 * 1/3 and 1/2 * 1."""
    masks = {
        "wide": [False, True, True, True, False, True, False],
        "narrow": [True] * 2 + [False] * 2 + [True] * 2 + [False],
    }
    batch = pictured("cAAA", "cAA", masks=masks)
    rules = [pg.UserMask(name="narrow")]

    def under(normalizer: str) -> list[float]:
        part = pg.PolicyGradient(surrogate=pg.Reinforce(), count="wide", normalizer=normalizer)
        return weights_of(batch, pg.LossSpec(components=[part], masks=rules))

    near(under("mean(token)"), [1 / 4] * 2)
    near(under("mean(sequence) > mean(token)"), [1 / 6, 1 / 2])


def test_a_member_outside_the_count_set_is_refused_with_its_place() -> None:
    batch = pictured("cAAA", masks={"wide": [True, True, False, True]}, sample_ids=["s"])
    part = pg.PolicyGradient(surrogate=pg.Reinforce(), count="wide")
    words = ("rl", "'wide'", "1 outside", "sample 's', token 2")
    refused(pg.DataError, lambda: weights_of(batch, pg.LossSpec(components=[part])), *words)


def test_divide_by_weights() -> None:
    """User weights 1, 3 in one row and 2 in the other. Divided by tokens: u/3. By weights: u/6; by sequence, 1/2 * u/4
    and 1/2 * 2/2. A row of weights 0 has no measure: its tokens weigh 0 and it does not count."""
    batch = pictured("cAA", "cA", weights={"rl": [9.0, 1.0, 3.0, 9.0, 2.0]})
    near(weights_under("mean(token)", batch), [1 / 3, 1.0, 2 / 3])
    near(weights_under("mean(token)", batch, divide_by="weights"), [1 / 6, 3 / 6, 2 / 6])
    near(weights_under("mean(sequence) > mean(token)", batch, divide_by="weights"), [1 / 8, 3 / 8, 1 / 2])
    idle = pictured("cAA", "cA", weights={"rl": [9.0, 1.0, 3.0, 9.0, 0.0]}, prompt_ids=[0, 1])
    for level in ("sequence", "turn", "prompt"):
        near(weights_under(f"mean({level}) > mean(token)", idle, divide_by="weights"), [1 / 4, 3 / 4, 0.0])
    near(weights_under("mean(sequence) > mean(token)", idle, divide_by="weights", units="all"), [1 / 8, 3 / 8, 0.0])
    none = pictured("cAA", weights={"rl": 0.0})
    near(weights_under("mean(token)", none, divide_by="weights"), [0.0, 0.0])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_weights_that_divide_must_be_fit_to(value: float) -> None:
    """Also at a counted token that is not trained."""
    batch = pictured(
        "cAoo", weights={"ce": [1.0, 1.0, 1.0, value]}, masks={"some": [True, True, True, False]}, sample_ids=["s"]
    )
    words = ("ce", "sample 's', token 3", "weights['ce']")
    refused(pg.DataError, lambda: ce(batch, count="observations", divide_by="weights"), *words)


@pytest.mark.parametrize(
    ("normalizer", "given_ids", "missing"),
    [
        ("mean(prompt) > mean(token)", {"episode_ids": [0, 1]}, "prompt"),
        ("mean(episode) > mean(token)", {"prompt_ids": [0, 1]}, "episode"),
    ],
)
def test_a_path_that_names_a_level_without_ids_is_refused(normalizer: str, given_ids: Any, missing: str) -> None:
    words = (f"{missing}_ids are absent", "rl", normalizer)
    refused(pg.DataError, lambda: weights_under(normalizer, pictured("cA", "cA", **given_ids)), *words)


def test_a_counted_token_outside_all_turns_is_refused_with_its_place() -> None:
    batch = pictured("cA", "coA", sample_ids=["s", "t"])
    spec = pg.presets.reinforce().add(pg.CrossEntropy(normalizer="mean(turn) > mean(token)"))
    words = ("ce", "names turns", "1 tokens in no turn", "sample 't', token 1", "turn_ids")
    refused(pg.DataError, lambda: pg.plan([batch], spec, split=ONE), *words)


def test_pow_of_nothing_is_not_taken() -> None:
    spec = pg.presets.reinforce().add(pg.CrossEntropy(normalizer="sum(token)/pow(-1)"))
    assert weights_of(pictured("cA"), spec, "ce") == []


@given(data=st.data())
def test_relabelled_ids_and_permuted_rows_never_matter(data: st.DataObject) -> None:
    """Bitwise: counts are integers, so no order can show."""
    actions = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    prompts = [data.draw(st.integers(0, 2)) for _ in actions]
    episodes = [data.draw(st.integers(0, 2)) for _ in actions]
    normalizer = data.draw(st.sampled_from(sorted(TABLE)))
    names = data.draw(st.permutations(["x", "y", -5]))
    order = data.draw(st.permutations(range(len(actions))))

    def rows_weights(places: Any, rename: Any) -> list[list[float]]:
        rows = ["c" + "A" * actions[i] for i in places]
        ids = {"prompt_ids": [rename(prompts[i]) for i in places], "episode_ids": [rename(episodes[i]) for i in places]}
        flat = weights_under(normalizer, pictured(*rows, **ids))
        return [[flat.pop(0) for _ in range(actions[i])] for i in places]

    plain = rows_weights(range(len(actions)), lambda i: i)
    permuted = rows_weights(order, lambda i: names[i])
    assert [plain[i] for i in order] == permuted
