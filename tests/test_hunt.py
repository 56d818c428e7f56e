"""The number hunt: what it answers, and that its exact numbers are exact, by enumeration."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from examples.hunt import FAILURE, INVALID, RUNNING, SUCCESS, TERMINATIONS, Hunt

SMALL = Hunt(numbers=3, base=2, turns=2)  # codes 00 01 10 valid, 11 not; vocabulary 8


def ids(hunt: Hunt, *names: str) -> list[int]:
    return [hunt.token(name) for name in names]


def everyone(hunt: Hunt) -> torch.Tensor:
    return torch.arange(hunt.numbers)


def answer_once(hunt: Hunt, hidden: int, *guess: str) -> tuple[str, bool]:
    state = hunt.reset(torch.tensor([hidden]))
    observation, done = hunt.step(state, torch.tensor([ids(hunt, *guess)]))
    return hunt.decode(int(observation)), bool(done)


# The vocabulary.


def test_default_vocabulary_by_hand():
    hunt = Hunt()
    assert hunt.vocab == (
        *("0", "1", "2", "3", "bos", "higher", "lower", "found", "invalid", "pad"),
        *("unused0", "unused1"),
    )
    assert [hunt.decode(hunt.token(name)) for name in hunt.vocab] == list(hunt.vocab)
    assert hunt.max_length == 13


@pytest.mark.parametrize(("base", "multiple"), [(2, 4), (3, 4), (4, 4), (5, 8), (6, 4), (6, 1)])
def test_vocabulary_is_padded_to_its_multiple_and_no_further(base, multiple):
    hunt = Hunt(numbers=base, base=base, vocab_multiple=multiple)
    assert hunt.vocab_size % multiple == 0
    assert 0 <= hunt.vocab_size - (base + 6) < multiple
    assert len(set(hunt.vocab)) == hunt.vocab_size


@pytest.mark.parametrize("fields", [{"numbers": 17}, {"numbers": 0}, {"base": 1}, {"turns": 0}, {"vocab_multiple": 0}])
def test_impossible_fields_are_refused(fields):
    with pytest.raises(ValueError, match=r"numbers|turns"):
        Hunt(**fields)


# Answers.


def test_answers_by_hand():
    # base 4: 6 is written 1 2
    hunt = Hunt()
    assert answer_once(hunt, 6, "1", "2") == ("found", True)
    assert answer_once(hunt, 6, "1", "1") == ("higher", False)
    assert answer_once(hunt, 6, "1", "3") == ("lower", False)
    assert answer_once(hunt, 6, "3", "0") == ("invalid", False)  # code 12 of 12 numbers
    assert answer_once(hunt, 11, "2", "3") == ("found", True)


@pytest.mark.parametrize("hunt", [Hunt(), SMALL])
def test_every_guess_of_the_whole_vocabulary(hunt):
    """All vocabulary pairs against all hidden numbers, held against a plain Python rule."""
    pairs = list(itertools.product(range(hunt.vocab_size), repeat=2))
    for hidden in range(hunt.numbers):
        state = hunt.reset(torch.full((len(pairs),), hidden))
        observation, done = hunt.step(state, torch.tensor(pairs))
        for (high, low), token, over in zip(pairs, observation.tolist(), done.tolist(), strict=True):
            code = high * hunt.base + low
            if high >= hunt.base or low >= hunt.base or code >= hunt.numbers:
                expected = "invalid"
            else:
                expected = "found" if code == hidden else "higher" if hidden > code else "lower"
            assert hunt.decode(token) == expected
            assert over == (expected == "found")


def test_done_rows_get_pad_and_change_no_more():
    hunt = Hunt()
    state = hunt.reset(torch.tensor([5, 5]))
    hunt.step(state, torch.tensor([ids(hunt, "1", "1"), ids(hunt, "0", "0")]))
    before = (state.low[0].item(), state.high[0].item(), state.turn[0].item())
    # The finished row's tokens are not read, whatever they are.
    observation, done = hunt.step(state, torch.tensor([[-7, 999], ids(hunt, "2", "0")]))
    assert [hunt.decode(token) for token in observation.tolist()] == ["pad", "lower"]
    assert done.tolist() == [True, False]
    assert (state.low[0].item(), state.high[0].item(), state.turn[0].item()) == before == (5, 5, 1)
    assert (state.low[1].item(), state.high[1].item(), state.turn[1].item()) == (1, 7, 2)


def test_the_last_turn_ends_the_episode_and_is_still_answered():
    hunt = Hunt(turns=3)
    state = hunt.reset(torch.tensor([11]))
    guess = torch.tensor([ids(hunt, "0", "0")])
    seen = [hunt.step(state, guess) for _ in range(4)]
    assert [hunt.decode(int(observation)) for observation, _ in seen] == ["higher"] * 3 + ["pad"]
    assert [bool(done) for _, done in seen] == [False, False, True, True]
    assert TERMINATIONS[int(state.termination)] == "failure"


def test_terminations():
    hunt = Hunt(turns=2)
    hidden = torch.tensor([0, 1, 1])
    state = hunt.reset(hidden)
    assert state.termination.tolist() == [RUNNING] * 3
    zero, pad = ids(hunt, "0", "0"), ids(hunt, "pad", "0")
    hunt.step(state, torch.tensor([zero, zero, pad]))
    assert state.termination.tolist() == [SUCCESS, RUNNING, RUNNING]
    hunt.step(state, torch.tensor([zero, zero, pad]))
    assert state.termination.tolist() == [SUCCESS, FAILURE, FAILURE]
    strict = Hunt(turns=2, invalid_ends=True)
    state = strict.reset(hidden)
    strict.step(state, torch.tensor([zero, zero, pad]))
    assert state.termination.tolist() == [SUCCESS, RUNNING, INVALID]


def test_reward_by_hand():
    hunt = Hunt(turns=2)
    state = hunt.reset(torch.tensor([0, 1, 1]))
    zero, one, pad = ids(hunt, "0", "0"), ids(hunt, "0", "1"), ids(hunt, "pad", "0")
    hunt.step(state, torch.tensor([zero, pad, zero]))
    with pytest.raises(ValueError, match="2 running"):
        hunt.reward(state)
    hunt.step(state, torch.tensor([zero, one, pad]))
    assert hunt.reward(state).tolist() == [1, 1, 0]
    # shares of valid guesses: 1 of 1, 1 of 2, 1 of 2
    assert hunt.reward(state, valid_bonus=0.5).tolist() == [1.5, 1.25, 0.25]


@pytest.mark.parametrize("hidden", [torch.tensor([12]), torch.tensor([-1]), torch.tensor([1.0])])
def test_bad_hidden_numbers_are_refused(hidden):
    with pytest.raises(ValueError, match="hidden: expected"):
        Hunt().reset(hidden)


@pytest.mark.parametrize("guess", [torch.tensor([[0, 12]]), torch.tensor([[-1, 0]]), torch.tensor([0, 0])])
def test_bad_guesses_are_refused(guess):
    hunt = Hunt()
    with pytest.raises(ValueError, match="guess: expected"):
        hunt.step(hunt.reset(torch.tensor([3])), guess)


def test_the_callers_tensor_is_not_kept():
    hunt, hidden = Hunt(), torch.tensor([3])
    state = hunt.reset(hidden)
    hidden.fill_(9)
    assert state.hidden.tolist() == [3]


# Histories.


def test_play_writes_the_history_it_shows_by_hand():
    hunt = Hunt(turns=2)
    shown = []

    def guess(history, state):
        shown.append(history.clone())
        return hunt.encode_guess(torch.where(state.turn == 0, 4, state.low))

    tokens, state = hunt.play(guess, torch.tensor([4, 5, 0]))
    written = [" ".join(hunt.decode(token) for token in row) for row in tokens.tolist()]
    assert written == [
        "bos 1 0 found pad pad pad",
        "bos 1 0 higher 1 1 found",
        "bos 1 0 lower 0 0 found",
    ]
    assert [history.shape[1] for history in shown] == [1, 4]
    assert torch.equal(shown[1], tokens[:, :4])
    assert state.done.all()


def test_masks_go_by_position_whatever_the_policy_emits():
    """Sampled `found` and `pad` tokens are actions; the end is told by the environment's answer."""
    hunt = Hunt(turns=3)
    history = torch.tensor(
        [
            ids(hunt, "bos", "found", "pad", "invalid", "0", "0", "found", "pad", "pad", "pad"),
            ids(hunt, "bos", "pad", "pad", "invalid", "1", "0", "lower", "0", "1", "higher"),
        ]
    )
    action = hunt.action_mask(history).int().tolist()
    observation = hunt.observation_mask(history).int().tolist()
    assert action == [[0, 1, 1, 0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]]
    assert observation == [[0, 0, 0, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0, 1, 0, 0, 1]]


def test_masks_of_a_start_are_empty_and_odd_lengths_are_refused():
    hunt = Hunt()
    start = torch.full((2, 1), hunt.token("bos"))
    assert hunt.action_mask(start).tolist() == [[False], [False]]
    with pytest.raises(ValueError, match="1 \\+ 3 turns"):
        hunt.action_mask(torch.zeros(2, 3, dtype=torch.int64))


# Exact success rates.


def enumerated_success(hunt: Hunt, outcomes: list[tuple[int, int]]) -> Fraction:
    """Share of (hidden number, sequence of guesses) that ends in success, all of them played."""
    sequences = list(itertools.product(outcomes, repeat=hunt.turns))
    guesses = torch.tensor(sequences)
    found = 0
    for hidden in range(hunt.numbers):
        state = hunt.reset(torch.full((len(sequences),), hidden))
        for turn in range(hunt.turns):
            hunt.step(state, guesses[:, turn])
        found += int((state.termination == SUCCESS).sum())
    return Fraction(found, hunt.numbers * len(sequences))


@pytest.mark.parametrize("invalid_ends", [False, True])
@pytest.mark.parametrize(("numbers", "turns"), [(3, 1), (3, 2)])
def test_blind_success_over_the_vocabulary_equals_enumeration(numbers, turns, invalid_ends):
    # base 2 needs no padding: 8 ids, 64 guesses, 64^turns sequences
    hunt = Hunt(numbers=numbers, base=2, turns=turns, invalid_ends=invalid_ends)
    every = list(itertools.product(range(hunt.vocab_size), repeat=2))
    assert hunt.random_success() == float(enumerated_success(hunt, every))


@pytest.mark.parametrize(("numbers", "turns"), [(3, 1), (4, 3), (12, 2)])
def test_blind_success_over_valid_guesses_equals_enumeration(numbers, turns):
    hunt = Hunt(numbers=numbers, turns=turns)
    valid = [tuple(pair) for pair in hunt.encode_guess(everyone(hunt)).tolist()]
    assert hunt.random_success("valid") == float(enumerated_success(hunt, valid))


def test_random_success_by_hand():
    # 12 ids: a guess is right with 1/144; four turns: 1 - (143/144)^4
    assert Hunt().random_success() == float(1 - Fraction(143, 144) ** 4)
    assert Hunt().random_success("valid") == float(1 - Fraction(11, 12) ** 4)


@pytest.mark.parametrize("numbers", range(1, 17))
@pytest.mark.parametrize("turns", range(1, 6))
def test_optimal_success_is_what_binary_search_reaches(numbers, turns):
    """k turns tell at most 2^k - 1 numbers apart: a closed form the programme does not use."""
    hunt = Hunt(numbers=numbers, turns=turns)
    assert hunt.optimal_success() == min(numbers, 2**turns - 1) / numbers
    _, state = hunt.play(hunt.optimal_policy, everyone(hunt))
    assert (state.termination == SUCCESS).double().mean().item() == hunt.optimal_success()


@pytest.mark.parametrize(("numbers", "turns"), [(2, 1), (3, 1), (3, 2), (4, 2)])
def test_no_strategy_beats_the_optimum(numbers, turns):
    """Every deterministic strategy (a guess per sequence of answers) of a small hunt, by force."""

    def best(possible: frozenset[int], left: int) -> int:
        if not left or not possible:
            return 0
        return max(
            (guess in possible)
            + best(frozenset(n for n in possible if n < guess), left - 1)
            + best(frozenset(n for n in possible if n > guess), left - 1)
            for guess in range(numbers)  # also those already ruled out
        )

    hunt = Hunt(numbers=numbers, turns=turns)
    assert hunt.optimal_success() == best(frozenset(range(numbers)), turns) / numbers


def test_optimal_guess_by_hand():
    hunt = Hunt()
    assert hunt.optimal_guess(0, 2, 2) == 1
    assert hunt.optimal_guess(4, 4, 1) == 4
    assert hunt.optimal_guess(0, 11, 4) == 5  # of 5 and 6 the lower
    for low, high, left in [(3, 2, 1), (0, 12, 1), (0, 3, 0)]:
        with pytest.raises(ValueError, match="low"):
            hunt.optimal_guess(low, high, left)


# The environment's own entropy.


def test_observation_surprisal_by_hand():
    """12 numbers, guess 3 (3 below, 8 above), higher; then 4..11 and guess 11 (7 below), lower."""
    hunt = Hunt(turns=4)
    names = ("bos", "0", "3", "higher", "pad", "0", "invalid", "2", "3", "lower", "0", "3")
    history = torch.tensor([ids(hunt, *names, "higher")])
    floor = hunt.observation_surprisal(history)
    first = -(3 / 12 * math.log(3 / 12) + 8 / 12 * math.log(8 / 12) + 1 / 12 * math.log(1 / 12))
    third = -(7 / 8 * math.log(7 / 8) + 1 / 8 * math.log(1 / 8))
    # An invalid guess, and one outside the interval still possible, have one answer: no entropy.
    expected = torch.tensor([[first, 0, third, 0]], dtype=torch.float64)
    torch.testing.assert_close(floor.entropy, expected, rtol=1e-14, atol=0)
    surprise = torch.tensor([[-math.log(8 / 12), 0, -math.log(7 / 8), 0]], dtype=torch.float64)
    torch.testing.assert_close(floor.surprisal, surprise, rtol=1e-14, atol=0)
    assert floor.members.all()
    mean = (first + third) / 4
    assert hunt.observation_entropy(history) == pytest.approx(mean, rel=1e-14)


def middle(hunt: Hunt):
    return hunt.optimal_policy


def upwards(hunt: Hunt):
    return lambda history, state: hunt.encode_guess(state.turn)


def clumsy(hunt: Hunt):
    """Invalid first, then a fixed number: guesses that the interval has ruled out occur."""
    bad = torch.tensor([hunt.token("pad"), 0])
    return lambda history, state: (
        bad.expand(len(history), 2) if history.shape[1] == 1 else hunt.encode_guess(state.low * 0 + 2)
    )


@pytest.mark.parametrize("policy", [middle, upwards, clumsy])
@pytest.mark.parametrize("hunt", [Hunt(), Hunt(numbers=7, base=3, turns=5), SMALL])
def test_entropy_is_the_frequency_of_answers_over_all_hidden_numbers(hunt, policy):
    """All hidden numbers played: rows with one history share a posterior, counted by frequency."""
    tokens, _ = hunt.play(policy(hunt), everyone(hunt))
    floor = hunt.observation_surprisal(tokens)
    rows = tokens.tolist()
    total = 0.0
    for turn in range(hunt.turns):
        end = 3 * turn + 3
        for row, history in enumerate(rows):
            if not floor.members[row, turn]:
                continue
            alike = [other[end] for other in rows if other[:end] == history[:end]]
            shares = [alike.count(token) / len(alike) for token in set(alike)]
            counted = -sum(share * math.log(share) for share in shares)
            assert floor.entropy[row, turn].item() == pytest.approx(counted, abs=1e-13)
            chosen = alike.count(history[end]) / len(alike)
            assert floor.surprisal[row, turn].item() == pytest.approx(-math.log(chosen), abs=1e-13)
            total += counted
    played = int(hunt.observation_mask(tokens).sum())
    assert hunt.observation_entropy(tokens) == pytest.approx(total / played, rel=1e-12)
    # Over all hidden numbers, the surprisals add up to what the history as a whole tells.
    distinct = {tuple(row): rows.count(row) for row in rows}
    information = -sum(count * math.log(count / len(rows)) for count in distinct.values())
    assert floor.surprisal.sum().item() == pytest.approx(information, rel=1e-12)
    assert floor.entropy.sum().item() == pytest.approx(information, rel=1e-12)


@pytest.mark.parametrize(
    "names",
    [
        ("bos", "0", "0", "lower"),  # nothing lies below 0
        ("bos", "0", "0", "invalid"),
        ("bos", "3", "3", "found"),  # no valid guess
        ("bos", "1", "0", "higher", "0", "3", "lower"),  # contradicts the first answer
        ("bos", "1", "0", "bos"),
    ],
)
def test_impossible_answers_are_refused(names):
    hunt = Hunt()
    with pytest.raises(ValueError, match="row 0 holds an answer it rules out itself"):
        hunt.observation_surprisal(torch.tensor([ids(hunt, *names)]))


def test_entropy_without_an_answer_is_refused():
    hunt = Hunt()
    with pytest.raises(ValueError, match="at least one answer"):
        hunt.observation_entropy(torch.full((3, 1), hunt.token("bos")))


def test_equal_calls_give_equal_bits():
    hunt = Hunt()
    first, _ = hunt.play(hunt.optimal_policy, everyone(hunt))
    second, _ = hunt.play(hunt.optimal_policy, everyone(hunt))
    assert torch.equal(first, second)
    floors = [hunt.observation_surprisal(tokens) for tokens in (first, second)]
    assert torch.equal(floors[0].entropy, floors[1].entropy)
