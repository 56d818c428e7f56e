"""Faults that a plan finds before any forward pass: the kind of error, and where it points."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.rollouts import broken
from support.steps import NAN, ONE, pictured, refused

NAMES = ["first", "second"]
ROWS = ("cAA", "cAoA")  # tokens 0..2 and 3..6; actions 1, 2 | 1, 3 of the rows


def batch(**given: Any) -> pg.TokenBatch:
    return pictured(*ROWS, sample_ids=NAMES, **given)


def at(position: int, value: float, elsewhere: float = -1.0) -> list[float]:
    return [value if k == position else elsewhere for k in range(7)]


EVERY = pg.presets.grpo(entropy=0.01, corrections=[pg.TruncatedIS()], masks=[pg.DropZeroAdvantage()]).add(
    pg.CrossEntropy()
)
STREAMS = {"old_logprobs": -1.0, "rollout_logprobs": -1.0, "ref_logprobs": -1.0}


def test_the_whole_spec_is_content_with_good_data() -> None:
    pg.plan([batch(**STREAMS)], EVERY, split=ONE, vocab_size=8)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("stream", "argument", "component"),
    [
        ("advantages", "advantages", "rl"),
        ("old", "old_logprobs", "rl"),
        ("rollout", "rollout_logprobs", "rl"),
        ("ref", "ref_logprobs", "kl"),
        ("weights['kl']", "weights", "kl"),
    ],
)
def test_a_nonfinite_value_inside_a_component(stream: str, argument: str, component: str, value: float) -> None:
    """Token 6 of all is token 3 of the second sample, an action."""
    given = STREAMS | {argument: {"kl": at(6, value)} if argument == "weights" else at(6, value)}
    place = f"rank 0, sample 'second', token 3, stream {stream!r}"
    words = (f"non-finite value inside component {component!r}", f"{value} (1 such tokens)", place, "Fix: ")
    refused(pg.DataError, lambda: pg.plan([batch(**given)], EVERY, split=ONE), *words)
    # The same value where nobody looks: at the answer, the context, or in a stream that the spec does not read.
    outside = STREAMS | {argument: {"kl": at(5, value)} if argument == "weights" else at(5, value)}
    pg.plan([batch(**outside)], EVERY, split=ONE)
    if argument in ("rollout_logprobs", "ref_logprobs"):
        pg.plan([batch(old_logprobs=-1.0, **{argument: at(6, value)})], pg.presets.ppo(), split=ONE)


def test_the_first_token_of_a_sequence_cannot_be_an_action() -> None:
    wrong = pictured("cA", "AAo", sample_ids=NAMES)
    words = ("first token", "nothing predicts it", "sample 'second', token 0, stream 'action_mask'")
    refused(pg.DataError, lambda: pg.plan([wrong], pg.presets.reinforce(), split=ONE), *words)
    pg.plan([pictured("oA")], pg.presets.reinforce(), split=ONE)  # an answer there is no target, and that is all


@pytest.mark.parametrize("spec", [EVERY, None], ids=["training", "scoring"])
def test_tokens_off_the_vocabulary(spec: pg.LossSpec | None) -> None:
    """Tokens are 1 to 7. Context counts too: the model reads it."""
    good = batch(**STREAMS)
    words = ("off the vocabulary", "below 7", "got 7", "sample 'second', token 3, stream 'tokens'")
    refused(pg.DataError, lambda: pg.plan([good], spec, split=ONE, vocab_size=7), *words)
    tokens = torch.tensor([1, 2, 3, -1, 5, 6, 7])
    flags = torch.tensor([False, True] + [False] * 5)
    negative = pg.TokenBatch.from_packed(tokens=tokens, lengths=[3, 4], action_mask=flags, advantages=torch.ones(2))
    words = ("off the vocabulary", "0 or more", "got -1", "row 1, token 0")
    refused(pg.DataError, lambda: pg.plan([negative], pg.presets.reinforce(), split=ONE), *words)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, float("inf")])
@pytest.mark.parametrize("token", [6, 5])
@pytest.mark.parametrize("spec", [EVERY, None], ids=["training", "scoring"])
def test_temperature_must_be_positive_where_tokens_are_scored(
    value: float, token: int, spec: pg.LossSpec | None
) -> None:
    """At an action and at an answer; what a sampler reports for context is never read."""
    heat = torch.tensor(at(token, value, 0.7))
    words = ("temperature must be positive", f"sample 'second', token {token - 3}, stream 'temperature'")
    refused(pg.DataError, lambda: pg.plan([batch(temperature=heat, **STREAMS)], spec, split=ONE), *words)
    pg.plan([batch(temperature=torch.tensor(at(3, value, 0.7)), **STREAMS)], spec, split=ONE)


@pytest.mark.parametrize(
    ("spec", "given", "words"),
    [
        (pg.presets.ppo(), {}, ("old is absent", "old_logprobs, read by rl", "old='policy'")),
        (pg.presets.grpo(), {"old_logprobs": -1.0}, ("ref is absent", "ref_logprobs, read by kl", "into='ref'")),
        (pg.presets.ppo(old="rollout"), {"old_logprobs": -1.0}, ("rollout is absent", "read by rl")),
        (pg.presets.ppo(corrections=[pg.TruncatedIS()]), {"old_logprobs": -1.0}, ("rollout is absent", "TruncatedIS")),
        (
            pg.LossSpec(components=[pg.Term("t", lambda x: x.logp, needs=("ref",))]),
            {},
            ("ref is absent", "ref_logprobs, read by t"),
        ),
        (pg.presets.reinforce(masks=[pg.DropTruncated()]), {}, ("terminations are absent", "DropTruncated")),
        (pg.presets.reinforce(masks=[pg.UserMask(name="m")]), {"masks": {"n": True}}, ("mask 'm'", "got n")),
        (pg.presets.reinforce(), {"weights": {"lr": 1.0}}, ("weights for 'lr'", "not a component", "rl")),
        (
            pg.LossSpec(components=[pg.PolicyGradient(surrogate=pg.Reinforce(), count="wide")]),
            {},
            ("mask 'wide'", "no masks"),
        ),
    ],
)
def test_what_the_spec_reads_must_be_there(spec: pg.LossSpec, given: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(pg.DataError, lambda: pg.plan([batch(**given)], spec, split=ONE), *words)


def test_advantages_must_be_there() -> None:
    form = {"tokens": torch.arange(2), "lengths": [2], "action_mask": torch.tensor([False, True])}
    bare = pg.TokenBatch.from_packed(**form)
    words = ("advantages is absent", "read by rl")
    refused(pg.DataError, lambda: pg.plan([bare], pg.presets.reinforce(), split=ONE), *words)


def test_a_sequence_without_a_member_of_any_component() -> None:
    lost = pictured("cA", "ccoo", "c", sample_ids=["a", "b", "z"])
    words = ("no member of any component", "2 such sequences", "sample 'b'", "empty_sequences='exclude'")
    refused(pg.DataError, lambda: pg.plan([lost], pg.presets.reinforce(), split=ONE), *words)
    # With cross entropy the second has members; the single token has not.
    both = pg.presets.reinforce().add(pg.CrossEntropy())
    refused(pg.DataError, lambda: pg.plan([lost], both, split=ONE), "1 such sequences", "sample 'z'")
    # Rules come later: what a mask empties was a sequence with members.
    masked = pictured("cA", "cA", masks={"m": [True, True, False, False]})
    pg.plan([masked], pg.presets.reinforce(masks=[pg.UserMask(name="m")]), split=ONE)


@pytest.mark.parametrize("batches", [[], [pictured("coo")], [pictured("", "")]])
def test_no_action_anywhere(batches: list[pg.TokenBatch]) -> None:
    spec = pg.presets.reinforce(empty_sequences="exclude").add(pg.CrossEntropy())
    refused(pg.DataError, lambda: pg.plan(batches, spec, split=ONE), "no action anywhere", "'rl'", "action_mask")
    pg.plan(batches, pg.LossSpec(components=[pg.CrossEntropy()], empty_sequences="exclude"), split=ONE)


def test_one_batch_is_not_a_list() -> None:
    words = ("list of TokenBatch", "got TokenBatch", "plan([batch], spec, ...)")
    refused(pg.DataError, lambda: pg.plan(batch(), pg.presets.reinforce(), split=ONE), *words)  # type: ignore[arg-type]
    rows: Any = [{"tokens": [1]}]
    refused(pg.DataError, lambda: pg.plan(rows, pg.presets.reinforce(), split=ONE), "list of TokenBatch", "dict")


def test_more_components_than_a_row_of_counts_holds() -> None:
    parts = [pg.PolicyGradient(name=f"p{k}", surrogate=pg.Reinforce()) for k in range(20)]
    spec = pg.LossSpec(components=parts)
    refused(pg.LayoutError, lambda: pg.plan([batch()], spec, split=ONE), "too many components", "<= 96", "140")


def test_a_fault_kept_in_a_batch_comes_out_of_the_plan() -> None:
    kept = broken(pg.DataError("advantages has the wrong shape", where="row 3"))
    words = ("advantages has the wrong shape", "rank 0, row 3")
    refused(pg.DataError, lambda: pg.plan([batch(), kept], pg.presets.reinforce(), split=ONE), *words)


def test_errors_are_one_readable_line_and_survive_pickling() -> None:
    long = pictured("cA", sample_ids=["x" * 5000], advantages=NAN)
    error = refused(
        pg.DataError, lambda: pg.plan([long], pg.presets.reinforce(), split=ONE), "non-finite", "sample 'xxx"
    )
    assert "\n" not in str(error) and len(str(error)) < 1000  # it has to fit a row of the agreement
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is pg.DataError and str(again) == str(error) and again.where == error.where
    for kind in (pg.SpecError, pg.DataError, pg.LayoutError, pg.UnsupportedError, pg.NonFiniteError):
        assert issubclass(kind, pg.PGLossError) and issubclass(kind, ValueError)
        text = str(pickle.loads(pickle.dumps(kind("Wrong.", expected=[1], got=0, where="row 1", fix="do"))))
        assert text == "Wrong; expected [1]; got 0; at row 1. Fix: do"
