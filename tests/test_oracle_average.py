"""The oracle's normalisers against weights worked out by hand, the arithmetic beside each."""

from __future__ import annotations

import pytest

from megatron_pgloss.errors import DataError
from megatron_pgloss.verify.oracle import oracle_loss
from support.oracle_cases import CE, NAN, REINFORCE, flat, leaves, near, row, run, weights

# Two prompts; p has two episodes, the first of two rows. Action tokens per row: 3, 1, 2, 4; the one
# of 3 in turns of 2 and 1, the one of 4 in turns of 1 and 3.
FOUR = [
    row(".AAoA", prompt="p", episode=0),
    row(".A", prompt="p", episode=0),
    row(".AA", prompt="p", episode=1),
    row(".AoAAA", prompt="q", episode=0),
]
EACH = [  # normaliser, then the weight of each action token, row by row
    ("mean(token)", [[1 / 10] * 3, [1 / 10], [1 / 10] * 2, [1 / 10] * 4]),
    ("mean(sequence) > mean(token)", [[1 / 12] * 3, [1 / 4], [1 / 8] * 2, [1 / 16] * 4]),
    ("mean(sequence) > sum(token)", [[1 / 4] * 3, [1 / 4], [1 / 4] * 2, [1 / 4] * 4]),
    ("mean(sequence)>sum(token)/4096", [[2**-14] * 3, [2**-14], [2**-14] * 2, [2**-14] * 4]),
    ("sum(sequence) > sum(token)/4096", [[2**-12] * 3, [2**-12], [2**-12] * 2, [2**-12] * 4]),
    # p has 6 tokens, q has 4.
    ("mean(prompt) > mean(token)", [[1 / 12] * 3, [1 / 12], [1 / 12] * 2, [1 / 8] * 4]),
    # p: episode 0 of 4 tokens over two rows, episode 1 of 2; q: one episode of 4.
    (
        "mean(prompt) > mean(episode) > mean(token)",
        [[1 / 16] * 3, [1 / 16], [1 / 8] * 2, [1 / 8] * 4],
    ),
    # Three episodes; turns of the first: 2, 1 and 1 tokens; the second: 2; the third: 1 and 3.
    (
        "mean(episode) > mean(turn) > mean(token)",
        [[1 / 18, 1 / 18, 1 / 9], [1 / 9], [1 / 6] * 2, [1 / 6, 1 / 18, 1 / 18, 1 / 18]],
    ),
    (
        "mean(prompt) > mean(episode) > mean(sequence) > mean(turn) > mean(token)",
        [[1 / 32, 1 / 32, 1 / 16], [1 / 8], [1 / 8] * 2, [1 / 4, 1 / 12, 1 / 12, 1 / 12]],
    ),
    ("sum(token)", [[1] * 3, [1], [1] * 2, [1] * 4]),
    ("sum(token)/sqrt", [[10**-0.5] * 3, [10**-0.5], [10**-0.5] * 2, [10**-0.5] * 4]),
    ("sum(token)/avg", [[1 / 10] * 3, [1 / 10], [1 / 10] * 2, [1 / 10] * 4]),
    (
        "mean(sequence) > sum(token)/sqrt",
        [[3**-0.5 / 4] * 3, [1 / 4], [2**-0.5 / 4] * 2, [1 / 8] * 4],
    ),
    (
        "mean(sequence) > sum(token)/pow(2)",
        [[1 / 36] * 3, [1 / 4], [1 / 16] * 2, [1 / 64] * 4],
    ),
    # The mean count of a row is 10 / 4.
    ("mean(sequence) > sum(token)/avg", [[1 / 10] * 3, [1 / 10], [1 / 10] * 2, [1 / 10] * 4]),
    # Rows of a prompt: 3 and 1, on average 2 over the batch.
    (
        "mean(prompt) > sum(sequence)/avg > mean(token)",
        [[1 / 12] * 3, [1 / 4], [1 / 8] * 2, [1 / 16] * 4],
    ),
    (
        "sum(prompt)/sqrt > sum(episode)/pow(0) > sum(token)/2",
        [[2**-1.5] * 3, [2**-1.5], [2**-1.5] * 2, [2**-1.5] * 4],
    ),
]


@pytest.mark.parametrize(("normalizer", "expected"), EACH, ids=[name for name, _ in EACH])
def test_each_normaliser_gives_the_weights_worked_out_by_hand(normalizer, expected):
    near(flat(weights(FOUR, normalizer)), flat(expected))


def test_length_bias_of_sequence_mean_and_none_of_token_mean():
    # 100 tokens of A = +1 and 1,000 of A = -1, log-probs -1: value 100 w_1 - 1000 w_2.
    rows = [row("." + "A" * 100), row("." + "A" * 1000, advantages=-1.0)]
    by_sequence = weights(rows, "mean(sequence) > mean(token)")
    assert set(by_sequence[0]) == {0.005} and set(by_sequence[1]) == {0.0005}
    by_token = weights(rows, "mean(token)")
    assert set(by_token[0]) == set(by_token[1]) == {1 / 1100}
    near(run(rows, REINFORCE | {"normalizer": "mean(sequence) > mean(token)"})["loss"], 0.0)
    near(run(rows, REINFORCE)["loss"], -900 / 1100)


def test_episode_zero_of_two_prompts_is_two_episodes():
    rows = [row(".A", prompt=1, episode=0), row(".AAA", prompt=2, episode=0)]
    near(flat(weights(rows, "mean(episode) > mean(token)")), [1 / 2, 1 / 6, 1 / 6, 1 / 6])


def test_first_token_of_a_row_is_never_a_target():
    assert weights([row("AAA"), row("A")], "mean(token)") == [[0.5, 0.5], []]
    assert weights([row("ooA")], "mean(token)", **CE) == [[1.0]]


def test_turn_is_a_run_as_sampled_and_what_follows_it():
    # Turns of the row: "AAo" and "Ao"; the first "o" belongs to none and is left out, and said so.
    rows = [row(".oAAoAo")]
    ce = CE | {"normalizer": "mean(turn) > mean(token)", "name": "x"}
    result = run(rows, ce)
    near(result["weights"]["x"][0], [0, 0, 0, 0, 0.5, 0, 0.5])
    assert result["counts"]["x"]["turn"] == 2 and result["counts"]["x"]["outside_path"] == 1
    # A row whose observations are all in no turn holds no counted token.
    rows = [row(".oo"), row(".Ao")]
    assert weights(rows, "mean(sequence) > mean(turn) > mean(token)", **CE) == [[], [1.0]]
    # A user mask in the middle of a run does not make two turns of it: 2 tokens, then 1.
    rows = [row(".AAAoA", masks={"keep": [True, True, False, True, True, True]})]
    keep = {"kind": "user_mask", "name": "keep"}
    result = run(rows, REINFORCE | {"normalizer": "mean(turn) > mean(token)"}, masks=[keep])
    near(result["weights"]["rl"][0], [0, 1 / 4, 0, 1 / 4, 0, 1 / 2])
    # Ids given by the caller come first.
    rows = [row(".AAAA", turn=[-1, 0, 1, 1, 1])]
    near(weights(rows, "mean(turn) > mean(token)")[0], [1 / 2, 1 / 6, 1 / 6, 1 / 6])


def test_units_all_counts_units_that_hold_no_counted_token():
    rows = [row(".Aoo"), row(".AA"), row("")]
    path = "mean(sequence) > mean(token)"
    assert weights(rows, path, **CE) == [[0.5, 0.5], [], []]
    assert weights(rows, path, **CE, units="all") == [[0.25, 0.25], [], []]
    # The mean count over the batch is 2 / 1 and 2 / 2.
    path = "sum(sequence) > sum(token)/avg"
    assert weights(rows, path, **CE) == [[0.5, 0.5], [], []]
    assert weights(rows, path, **CE, units="all") == [[1.0, 1.0], [], []]
    # A row without any turn of its own is a sequence of the data all the same.
    path = "mean(sequence) > mean(turn) > mean(token)"
    assert weights([*rows, row("..")], path, **CE, units="all") == [[1 / 6, 1 / 6], [], [], []]


def test_empty_sequences_are_refused_or_leave_the_data():
    rows = [row(".oo"), row(".AA")]
    spec = {"components": [CE | {"units": "all", "normalizer": "mean(sequence) > mean(token)"}]}
    logp = leaves(rows)
    assert oracle_loss(logp, None, rows, spec)["loss"] == 0.5
    assert oracle_loss(logp, None, rows, spec | {"empty_sequences": "exclude"})["loss"] == 1.0
    with pytest.raises(DataError, match="no token of any component"):
        oracle_loss(logp, None, rows, spec | {"empty_sequences": "refuse"})


def test_user_weights_multiply_the_loss_and_divide_only_on_request():
    # Log-probs -1, weights 1/2 and 2: (0.5 + 2) / 2 tokens, or / 2.5 weights.
    rows = [row(".AA", weights={"rl": [NAN, 0.5, 2.0]}), row(".")]
    near(run(rows, REINFORCE)["loss"], 1.25)
    result = run(rows, REINFORCE | {"divide_by": "weights"})
    near(result["loss"], 1.0)
    near(result["grads"][0], [0, -0.2, -0.8])
    near(result["weights"]["rl"][0], [0, 0.4, 0.4])
    # Weights that are all 0 leave nothing, not 0 / 0.
    rows = [row(".AA", weights={"rl": [0.0, 0.0, 0.0]})]
    result = run(rows, REINFORCE | {"divide_by": "weights"})
    near(result["grads"][0], [0, 0, 0])


def test_echo_paper_divides_by_all_observations_and_all_sequences():
    # Rows: 4 observations of which 2 are trained; 1 of which none is; none at all. N = 3.
    keep = [True, True, False, True, False, True]
    rows = [
        row("AooooA", masks={"body": keep}),
        row(".Ao", masks={"body": [True, True, False]}),
        row(".A", masks={"body": [True, True]}),
    ]
    body = {"kind": "user_mask", "name": "body", "on": ["ce"]}
    paper = CE | {
        "normalizer": "mean(sequence) > mean(token)",
        "count": "observations",
        "units": "all",
        "coef": 0.05,
    }
    result = run(rows, paper, masks=[body])
    near(result["weights"]["ce"][0], [0, 1 / 12, 0, 1 / 12, 0, 0])
    near(result["components"]["ce"], 1 / 6)
    near(result["loss"], 0.05 / 6)
    assert result["counts"]["ce"]["members"] == 2 and result["counts"]["ce"]["token"] == 5
    assert result["counts"]["ce"]["masks"] == {"body": 3}
    # prime-rl: the trained observations of the whole step share one mean.
    result = run(rows, CE | {"normalizer": "mean(token)", "coef": 0.1}, masks=[body])
    near(result["weights"]["ce"][0], [0, 1 / 2, 0, 1 / 2, 0, 0])
    near(result["loss"], 0.1)


def test_count_set_by_mask_name_must_hold_the_members():
    rows = [row(".ooA", masks={"O": [False, True, True, True]})]
    assert weights(rows, "mean(token)", **CE, count="O") == [[1 / 3, 1 / 3]]
    rows = [row(".ooA", masks={"O": [False, True, False, True]})]
    with pytest.raises(DataError, match="outside the count set"):
        weights(rows, "mean(token)", **CE, count="O")
