"""The words of a normaliser: grammar, one written form, aliases, and what is refused."""

from __future__ import annotations

import pytest

import megatron_pgloss as pg
from megatron_pgloss.spec import parse
from support.steps import refused


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("mean(token)", "mean(token)"),
        (" mean( sequence )>mean(token) ", "mean(sequence) > mean(token)"),
        ("sum(token) / 4096.0", "sum(token)/4096"),
        ("sum(token)/1e-3", "sum(token)/0.001"),
        ("sum(token)/pow(0.5)", "sum(token)/sqrt"),
        ("sum(token)/pow( 2 )", "sum(token)/pow(2)"),
        ("sum(prompt)/avg > sum(episode) > mean(turn) > sum(token)/sqrt",) * 2,
        ("token-mean", "mean(token)"),
        ("seq-mean-token-mean", "mean(sequence) > mean(token)"),
        ("seq-mean-token-sum", "mean(sequence) > sum(token)"),
        ("token-sum", "sum(token)"),
        ("prompt-mean", "mean(prompt) > mean(token)"),
        ("sequence_mean", "mean(sequence) > mean(token)"),
        ("verl:token-mean", "mean(token)"),
        ("verl<=0.7.0:seq-mean-token-mean", "mean(sequence) > mean(token)"),
        # The one mode that changed its meaning, by verl's loss_scale_factor.
        ("seq-mean-token-sum-norm/4096", "mean(sequence) > sum(token)/4096"),
        ("verl>=0.7.1:seq-mean-token-sum-norm/4096", "mean(sequence) > sum(token)/4096"),
        ("verl<=0.7.0:seq-mean-token-sum-norm/4096", "sum(sequence) > sum(token)/4096"),
        ("verl==0.6.1:seq-mean-token-sum-norm / 512", "sum(sequence) > sum(token)/512"),
    ],
)
def test_a_path_is_kept_in_one_written_form(written: str, kept: str) -> None:
    assert str(parse(written)) == kept == str(parse(kept)) == pg.KL(normalizer=written).normalizer


def test_units_are_named_outermost_first() -> None:
    assert parse("mean(prompt) > sum(sequence) > mean(token)").units == ("prompt", "sequence", "token")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("mean(token) > mean(sequence)", ("must descend", "prompt > episode > sequence > turn > token")),
        ("mean(token) > mean(token)", ("must descend",)),
        ("mean(sequence)", ("does not end with the token level", "add '> mean(token)'")),
        ("mean(token)/2", ("a mean takes no divisor",)),
        ("sum(token)/0", ("divisor must be positive",)),
        ("sum(token)/-3", ("divisor must be positive",)),
        ("sum(token)/nan", ("cannot read the divisor",)),
        ("sum(token)/inf", ("cannot read the divisor",)),
        ("sum(token)/pow(x)", ("cannot read the divisor", "sqrt, pow(a) or avg")),
        ("sum(token)/root", ("cannot read the divisor",)),
        ("", ("cannot read the level",)),
        ("mean(sequence) >", ("cannot read the level", "''")),
        ("median(token)", ("cannot read the level",)),
        ("mean(word)", ("cannot read the level", "prompt, episode, sequence, turn, token")),
        ("batch-mean", ("cannot read the level",)),
        # Its divisor would be the padded width: another one for every padding.
        ("verl<=0.7.0:seq-mean-token-sum-norm", ("refused", "padded width")),
        ("verl<=0..7:seq-mean-token-sum-norm/4", ("cannot read the version",)),
        ("verl:seq-mean-token-sum-norm/0", ("divisor must be positive",)),
        ("verl:token-mean/4", ("cannot read the level",)),
        ("seq-mean-token-sum-norm", ("refused", "padded width", "mean(sequence) > sum(token)/BUDGET")),
    ],
)
def test_what_is_no_path_is_refused(written: str, words: tuple[str, ...]) -> None:
    refused(pg.SpecError, lambda: pg.KL(normalizer=written), *words)
