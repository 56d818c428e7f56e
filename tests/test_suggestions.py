"""A wrong word is answered with the right one, also where it is another library's."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import megatron_pgloss as pg
from megatron_pgloss.presets.known import keywords
from megatron_pgloss.spec.words import ELSEWHERE, closed
from support.steps import refused


def trace(**more: Any) -> pg.Trace:
    span = pg.Span(role="assistant", author="policy", tokens=[1, 2])
    return pg.Trace(**{"spans": [pg.Span(role="user", author="harness", tokens=[3]), span], **more})


def roles(*seen: str, **table: float) -> Callable[[], Any]:
    spans = [pg.Span(role="assistant", author="policy", tokens=[1])]
    spans += [pg.Span(role=role, author="environment", tokens=[2]) for role in seen]
    return lambda: pg.TokenBatch.from_traces([pg.Trace(spans=spans)], roles=pg.RoleTable(ce=table))


WRONG: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "klcoef": (lambda: pg.presets.grpo(klcoef=1), ("grpo has no keyword 'klcoef'", "did you mean 'kl'?")),
    "beta": (lambda: pg.presets.grpo(beta=0.04), ("did you mean 'kl'?",)),
    "clip_ratio_low": (lambda: pg.presets.dapo(clip_ratio_low=0.2), ("did you mean 'low'?",)),
    "epsilon": (lambda: pg.presets.dapo(epsilon=0.2), ("did you mean 'low' and 'high'?",)),
    "clip_ratio_c": (lambda: pg.presets.ppo(clip_ratio_c=3), ("did you mean 'dual'?",)),
    "loss_agg_mode": (lambda: pg.presets.ppo(loss_agg_mode="token-mean"), ("did you mean 'normalizer'?",)),
    "max_completion_length": (lambda: pg.presets.dr_grpo(8, max_completion_length=8), ("did you mean 'budget'?",)),
    "low_var_kl": (lambda: pg.KL(estimator="low_var_kl"), ("KL.estimator", "did you mean 'k3'?")),
    "low_var_kl of a preset": (lambda: pg.presets.grpo(kl_estimator="low_var_kl"), ("did you mean 'k3'?",)),
    "tis": (lambda: pg.LossSpec.from_toml("components = [{kind = 'kl'}]\ncorrections = [{kind = 'tis'}]"),
            ("did you mean 'truncated_is'?",)),
    "surrogate by name": (lambda: pg.PolicyGradient(surrogate="clip"), ("given by a name, 'clip'", "pg.Clip(...)")),
    "surrogate by a name of verl": (lambda: pg.PolicyGradient(surrogate="geo_mean"), ("surrogate=pg.GMPO(...)",)),
    "preset": (lambda: pg.presets.get("grp"), ("did you mean 'grpo'?",)),
    "termination": (
        lambda: pg.TokenBatch.from_traces([trace(), trace(termination="succes")]), ("some traces only",)),
    "terminations": (
        lambda: pg.TokenBatch.from_traces([trace(termination="failure"), trace(termination="succes")]),
        ("unknown termination", "'succes'", "row 1", "did you mean 'success'?")),
    "author": (
        lambda: pg.TokenBatch.from_traces([trace(spans=[pg.Span(role="r", author="polcy", tokens=[1])])]),
        ("'polcy'", "did you mean 'policy'?")),
    "Split": (lambda: pg.Split(max_token=5), ("Split has no argument 'max_token'", "did you mean 'max_tokens'?")),
    "Trace": (lambda: trace(advantages=1.0), ("Trace has no argument 'advantages'", "did you mean 'advantage'?")),
    "Trace without spans": (lambda: pg.Trace(), ("Trace has no spans", "Trace(spans=...)")),
    "Span": (lambda: pg.Span(role="r", author="policy", tokens=[], logprob=[]), ("did you mean 'logprobs'?",)),
    "a stream of a span": (
        lambda: pg.TokenBatch.from_traces([trace(spans=[pg.Span(role="r", author="policy", tokens=[1],
                                                               streams={"old_log_probs": [0.0]})])]),
        ("did you mean 'old_logprobs'?", "trace 0, span 0")),
    "log-probs": (
        lambda: pg.TokenBatch.from_traces([trace(sample_id="s-7", spans=[
            pg.Span(role="r", author="policy", tokens=[1, 2], logprobs=[0.0])])]),
        ("another number of log-probs than tokens", "trace 's-7', span 0")),
    "from_packed": (
        lambda: pg.TokenBatch.from_packed(tokens=[1], lengths=[1], loss_mask=[True]), ("did you mean 'action_mask'?",)),
    "a bound": (lambda: pg.Clip(low=-0.1), ("Clip.low: ", "greater than or equal to 0", "got -0.1")),
    "a bound that is neither": (lambda: pg.Clip(low="0.01"), ("valid number", "pattern", "'0.01'")),
    "log_ratio_bound": (
        lambda: pg.presets.ppo(log_ratio_bound=100), ("float32", "at most 80", "got 100", "20 (the default)")),
    "a role": (roles("tool", tools=0.5), ("'tools'", "did you mean 'tool'?", "trace 0, span 1 of role 'tool'")),
}  # fmt: skip


@pytest.mark.parametrize(("build", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_word_is_answered_with_the_right_one(build: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(pg.PGLossError) as raised:
        build()
    assert "constrained" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_a_role_that_no_span_has_is_no_typo_by_itself() -> None:
    roles("search", tool=0.5)()
    roles("tool", "tools", tool=0.5)()
    roles("tool", tool=0.5, tools=0.0)()


def test_a_preset_that_is_none_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="did you mean 'grpo'"):
        pg.presets.grp  # noqa: B018
    assert not hasattr(pg.presets, "__path_of_nothing__")


@pytest.mark.parametrize("name", pg.presets.PRESETS)
def test_a_preset_lists_its_own_keywords_first_and_takes_what_it_lists(name: str) -> None:
    row = pg.presets.PRESETS[name]
    error = refused(pg.SpecError, lambda: row.build(**row.example, no_such_keyword_at_all=1), name)
    listed = str(error.expected).split(", ")
    assert listed == list(keywords(name)) and len(set(listed)) == len(listed)
    plain = row.build(**row.example)
    defaults = {
        "normalizer": plain.components[0].normalizer, "coef": 0.5, "kl": 0.1, "kl_estimator": "k1", "entropy": 0.1,
        "ratio": "token", "name": "rl", "count_rejected": True, "masks": [], "gates": [], "corrections": [],
        "log_ratio_bound": 10, "empty_sequences": "exclude", "roles": pg.RoleTable(), "kept": None,
    }  # fmt: skip
    for keyword in listed:
        if keyword in defaults:
            row.build(**{**row.example, keyword: defaults[keyword]})
    assert row.build(**{**row.example, "old": plain.old}) == plain


def test_words_of_others_lead_to_words_that_are_known_somewhere() -> None:
    known = {keyword for name in pg.presets.PRESETS for keyword in keywords(name)}
    parts = [part for part in vars(pg.spec.parts).values() if hasattr(part, "model_fields")]
    known |= {name for part in parts for name in part.model_fields}
    known |= {part.model_fields["kind"].default for part in parts if "kind" in part.model_fields}
    known |= set(pg.TokenBatch.from_packed.__signature__.parameters) | set(pg.Trace.__dataclass_fields__)  # type: ignore[attr-defined]
    known |= {state.value for state in pg.Termination} | set(pg.Split.__dataclass_fields__)
    known |= {"k1", "k2", "k3", "exact", "sequence"}
    for word, meant in ELSEWHERE.items():
        assert known.issuperset(meant), (word, set(meant) - known)


def closed_ones() -> dict[str, Callable[..., Any]]:
    """Every public class and function that takes keywords, but those that a micro-batch calls."""
    from megatron_pgloss import megatron as pgm
    from megatron_pgloss import view

    found: dict[str, Callable[..., Any]] = {}
    for room in (pg, pg.advantages, view, pgm):
        for name in room.__all__:
            one = getattr(room, name)
            of_ours = getattr(one, "__module__", "").startswith("megatron_pgloss") and callable(one)
            frozen = isinstance(one, type) and (issubclass(one, Exception | enum.Enum) or hasattr(one, "model_fields"))
            if of_ours and not frozen and name not in NOT_CLOSED:
                found[name] = one
    return found


NOT_CLOSED = (
    "policy_loss", "weighted_sum", "token_logprobs", "TokenLogprobs", "LossOutput",  # in every micro-batch
    "MicroBatch", "Plan", "TokenBatch", "Layout", "GAEReport", "GroupReport", "Moments", "SilentGroup", "Effect",
    "Curve", "add_pgloss_args", "spec_from_args", "split_from_args",  # of positions
)  # fmt: skip


def test_an_unknown_keyword_of_anything_public_gets_a_suggestion() -> None:
    ones = closed_ones()
    assert {"PolicyLossStep", "ValueHead", "Split", "Span", "token_page", "plan", "gae", "minibatches"} <= ones.keys()
    assert len(ones) > 30
    for name, one in ones.items():
        if name == "rloo":  # it hands on to group_relative
            refused(pg.DataError, lambda: pg.advantages.rloo([], [], grop=None), "did you mean 'group'?")
            continue
        keywords = [key for key, item in inspect.signature(one).parameters.items() if item.kind is not item.VAR_KEYWORD]
        word = max(keywords, key=len)
        typo = word[:-2] + word[-1] if len(word) > 2 else word + "x"  # a letter is gone
        with pytest.raises(pg.PGLossError) as raised:
            one(**{typo: None})
        assert f"did you mean {word!r}?" in str(raised.value), name


def test_a_missing_keyword_is_named_and_positions_count() -> None:
    @closed
    def call(a: int, b: int, *, c: int, d: int = 4) -> tuple[int, ...]:
        return a, b, c, d

    assert call(1, 2, c=3) == (1, 2, 3, 4) and call(1, c=3, b=2, d=0) == (1, 2, 3, 0)
    refused(pg.DataError, lambda: call(1, 2), "call has no c", "call(c=...)")
    refused(pg.DataError, lambda: call(1, c=3), "call has no b")
    refused(pg.DataError, lambda: call(1, 2, c=3, e=5), "call has no argument 'e'", "a, b, c, d")
