"""`explain` is made from the spec: every preset, every part, every number of a part shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import megatron_pgloss as pg
from megatron_pgloss.cli import _elsewhere, _example, explain, main
from megatron_pgloss.presets import PRESETS
from megatron_pgloss.spec import division, latex, letters, parse
from megatron_pgloss.spec.components import AnyComponent
from megatron_pgloss.spec.corrections import Correction
from megatron_pgloss.spec.gates import AnyGate
from megatron_pgloss.spec.masks import Mask
from megatron_pgloss.spec.ratios import SHORT
from megatron_pgloss.spec.surrogates import AnySurrogate


def built(name: str) -> pg.LossSpec:
    return PRESETS[name].build(**PRESETS[name].example)


def table(text: str) -> list[str]:
    """The lines of the example's table: its header and a line a component."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "rollout of 100" in line)
    return lines[start:]


def well_formed(text: str) -> None:
    """Braces and brackets of LaTeX in balance, nothing half translated."""
    assert text.count("{") == text.count("}") and text.count(r"\Bigl") == text.count(r"\Bigr")
    assert text.count("(") == text.count(")")
    set_as_text = r"\\(?:text|mathrm|operatorname|begin|end)\{[^{}]*\}"
    bare = re.sub(r"\\[A-Za-z]+|\\.", " ", re.sub(set_as_text, " ", text))
    assert not re.findall(r"[A-Za-z]{2,}", bare), bare


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_explained(name: str) -> None:
    spec = built(name)
    text = explain.explain(spec, name)
    assert PRESETS[name].source in text and PRESETS[name].equation in text
    for line in str(spec).splitlines():
        assert line in text
    for part in spec.components:
        assert f"{part.name}: {part.normalizer}" in text and division.weight(part.path) in text
    for stream, who in spec.readers.items():
        assert f"{stream}: {', '.join(who)}" in text
    for library in _elsewhere.LIBRARIES:
        assert f"{library}: " in text
    assert "changed" not in text.splitlines()[0]
    well_formed(latex.latex(spec))


def kinds(union: Any) -> tuple[type, ...]:
    return get_args(get_args(union)[0])


def mine(x: Any) -> Any:
    """A function of the user's own."""
    return x.log_ratio


EXAMPLES: dict[str, dict[str, Any]] = {
    "CISPO": {"high": 4.0}, "TVGate": {"high": 0.2}, "SequenceGate": {"threshold": 0.1}, "Veto": {"low": 0.1},
    "RatioMask": {"low": 0.5, "high": 2.0}, "Reject": {"high": 1.0}, "Staleness": {"max_lag": 2},
    "Surrogate": {"fn": mine}, "Gate": {"fn": mine},
    "Term": {"fn": mine, "name": "t"},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*kinds(AnySurrogate), *kinds(AnyComponent), *kinds(AnyGate), *kinds(Correction)])
def test_every_part_has_a_formula(kind: type) -> None:
    part = kind(**EXAMPLES.get(kind.__name__, kind.example))
    if kind in kinds(AnyComponent):
        spec = pg.LossSpec(components=[part])
    elif kind in kinds(AnySurrogate):
        spec = pg.LossSpec(components=[pg.PolicyGradient(surrogate=part)])
    else:
        field = "gates" if kind in kinds(AnyGate) else "corrections"
        spec = pg.LossSpec(components=[pg.PolicyGradient()], **{field: [part]})
    text = str(spec)
    assert "  " in text and "None" not in text and "object at" not in text
    if "fn" in EXAMPLES.get(kind.__name__, {}):
        assert "test_explain:mine" in text
    else:
        well_formed(latex.latex(spec))


@pytest.mark.parametrize("ratio", SHORT)
def test_every_ratio_has_a_formula_of_its_own(ratio: str) -> None:
    def line(name: str) -> str:
        return str(pg.LossSpec(components=[pg.PolicyGradient(ratio=name)])).splitlines()[1]

    assert len({line(name) for name in SHORT}) == len(SHORT) and "r = " in line(ratio)
    well_formed(latex.latex(pg.LossSpec(components=[pg.PolicyGradient(ratio=ratio)])))


def numbers(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number in nested data, with the way to it."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, key), value
        else:
            yield from numbers(value, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


IDLE = {("kl_cov", "low"), ("kl_cov", "high"), ("kl_cov", "seed")}
"""Numbers that do nothing there: a gate of the largest draws nothing and has no band."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_a_preset_is_in_its_equation(name: str) -> None:
    """Each number in turn is moved a little: the printed equation must not stay the same."""
    data = built(name).to_dict()
    moved = 0
    for path, value in numbers(data):
        if (name, path[-1]) in IDLE:
            continue
        # Some are whole numbers, some may not go up (a lower bound below its upper one), some not down.
        for other in sorted({value + 1, value * 0.9, value * 1.1} - {value}):
            try:
                spec = pg.LossSpec.from_dict(changed(data, path, other))
            except pg.SpecError:
                continue
            moved += 1
            assert str(spec) != str(built(name)), path
    assert moved


BASE = pg.presets.ppo(kl=0.1, entropy=0.01)


@pytest.mark.parametrize(
    ("change", "weights_too"),
    [
        (lambda s: pg.presets.ppo(kl=0.1, entropy=0.01, normalizer="mean(sequence) > mean(token)"), True),
        (lambda s: pg.presets.ppo(kl=0.1, entropy=0.01, normalizer="mean(sequence) > sum(token)/512"), True),
        (lambda s: pg.presets.ppo(kl=0.1, entropy=0.01, coef=2.0), True),
        (lambda s: pg.presets.ppo(kl=0.2, entropy=0.01), True),
        (lambda s: s.add(pg.CrossEntropy()), True),
        (lambda s: pg.presets.ppo(kl=0.1, entropy=0.01, high=0.3), False),
        (lambda s: pg.presets.ppo(kl=0.1, entropy=0.01, kl_estimator="k1"), False),
        (lambda s: s.replace(old="rollout"), False),
        (lambda s: s.replace(corrections=[pg.TruncatedIS()]), False),
        (lambda s: s.replace(masks=[pg.DropTruncated()]), False),
        (lambda s: s.replace(log_ratio_bound=5.0), False),
        (lambda s: s.replace(empty_sequences="exclude"), False),
        (lambda s: s.replace(roles=pg.RoleTable(ce={"tool": 0.5})), False),
    ],
)
def test_one_field_changed_changes_equation_and_weights(change: Any, weights_too: bool) -> None:
    spec = change(BASE)
    assert str(spec) != str(BASE)
    assert (latex.latex(spec) != latex.latex(BASE)) or not weights_too
    before, after = table(explain.example(BASE)), table(explain.example(spec))
    assert (before != after) == weights_too


def test_the_example_is_the_design_s_check_on_paper() -> None:
    """1/1100 for all under the token mean; 1/200 and 1/2000 under the sequence mean; 20 and 50 observations."""
    spec = pg.presets.ppo().add(pg.CrossEntropy(coef=0.5, normalizer="mean(sequence) > mean(token)"))
    (short, long), (seen, more) = _example.shares(spec).values()
    assert (short.tokens, long.tokens, seen.tokens, more.tokens) == (100, 1000, 20, 50)
    assert [short.token, long.token] == pytest.approx([1 / 1100, 1 / 1100], rel=1e-6)
    assert [seen.token, more.token, seen.total] == pytest.approx([0.5 / 40, 0.5 / 100, 0.25], rel=1e-6)
    ((short, long),) = _example.shares(pg.presets.gspo()).values()
    assert [short.token, long.token, short.total] == pytest.approx([0.005, 0.0005, 0.5], rel=1e-6)


def test_the_weights_follow_streams_masks_and_counts_of_the_user() -> None:
    """Bounds as streams, a mask, a count set by name, weights in the denominator: the example brings them all."""
    part = pg.PolicyGradient(surrogate=pg.Clip(low="lo", high="hi"), count="box", divide_by="weights")
    spec = pg.LossSpec(components=[part], masks=[pg.UserMask(name="keep")])
    ((short, long),) = _example.shares(spec).values()
    # The named mask counts every position with a target of both rows: 1120 + 20 - ... tokens, all of weight 1.
    assert short.token == long.token > 0 and "clip(r, 1 - lo, 1 + hi)" in str(spec)


@pytest.mark.parametrize("mode", _elsewhere.MODES)
def test_every_mode_of_another_library_can_be_compared(mode: str) -> None:
    path, note = _elsewhere.MODES[mode]
    name = f"{mode}@4096" if "{}" in path else mode
    text = explain.compare([name, "mean(token)"])
    assert str(parse(path.format(4096))) in text and note in text
    assert ("not the same weights" in text) == (path != "mean(token)")


def test_compare_prints_weights_side_by_side() -> None:
    text = explain.compare(["verl:token-mean", "trl:dapo", "TRL:grpo", "gspo", "mean(prompt) > sum(token)/sqrt"])
    rows = {
        line.split()[0]: line.split()[1:3]
        for line in text.splitlines()
        if re.match(r"\S+:|gspo", line) and "mean" in line
    }
    assert rows["verl:token-mean"] == rows["trl:dapo"] == ["0.000909091", "0.000909091"]
    assert rows["TRL:grpo"] == rows["gspo"] == ["0.005", "0.0005"]
    assert "0.0301511" in text and "not the same weights" in text  # 1 / sqrt(1100)


def test_the_flag_table_knows_only_presets_and_libraries_that_are() -> None:
    assert set(_elsewhere.ELSEWHERE) <= set(PRESETS) and set(_elsewhere.ALWAYS) == set(_elsewhere.LIBRARIES)
    for known in _elsewhere.ELSEWHERE.values():
        assert set(known) <= set(_elsewhere.LIBRARIES)
    for name in ("reinforce", "ppo", "grpo", "dr_grpo", "dapo", "echo", "gspo", "cispo"):
        assert _elsewhere.ELSEWHERE[name]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*arguments: str, code: int = 0) -> str:
        assert main(["explain", *arguments]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "1 / (N_sequence * 2048)" in output("dr_grpo", "--set", "budget=2048") and "PRESET" not in output("dapo")
    text = output("grpo", "--set", "kl=0", "--set", "normalizer=mean(prompt) > mean(token)")
    assert ", changed: arXiv 2402.03300" in text and "N_prompt: prompts of the step with a counted token" in text
    file = tmp_path / "loss.toml"
    file.write_text(pg.presets.dapo(old="rollout").to_toml())
    assert "r = pi/mu" in output(str(file)) and "elsewhere" not in output(str(file))  # no library has flags for it
    assert "verl:token-mean" in output() and "dapo " in output()
    assert "the same weights" in output("--compare", "verl:token-mean", "trl:dapo")
    assert "did you mean 'dapo'?" in output("dpao", code=2)
    assert "did you mean 'trl:dapo'?" in output("--compare", "trl:dpao", code=2)
    assert "@4096" in output("--compare", "trl:dr_grpo", code=2)
    assert "not used" in output("--compare", "trl:dapo@3", code=2)
    assert "NAME=VALUE" in output("grpo", "--set", "kl", code=2)
    assert "'klx'" in output("grpo", "--set", "klx=0", code=2)


def test_remarks_say_what_is_easily_overlooked() -> None:
    assert any("by its length" in note for note in explain.remarks(pg.presets.gspo(normalizer="mean(token)")))
    assert not explain.remarks(pg.presets.gspo())
    assert any("exactly 1" in note for note in explain.remarks(pg.presets.reinforce()))
    assert any("what gates drop stays" in note for note in explain.remarks(pg.presets.dppo_tv()))


@pytest.mark.parametrize(
    ("path", "weight", "text"),
    [
        ("mean(token)", "1 / N_token", r"\frac{1}{N_{\mathrm{token}}}\sum_{t}"),
        ("sum(token)", "1", r"\sum_{t}"),
        ("sum(sequence) > sum(token)/7", "1 / 7", r"\sum_{i} \frac{1}{7}\sum_{t\in i}"),
        ("mean(prompt) > mean(token)", "1 / (N_prompt * n_token(prompt))",
         r"\frac{1}{N_{\mathrm{prompt}}}\sum_{p} \frac{1}{n^{\mathrm{token}}_{p}}\sum_{t\in p}"),
        ("mean(episode) > sum(turn)/sqrt > sum(token)/pow(0.3)",
         "1 / (N_episode * sqrt(n_turn(episode)) * n_token(turn)^0.3)",
         r"\frac{1}{N_{\mathrm{episode}}}\sum_{e} \frac{1}{\sqrt{n^{\mathrm{turn}}_{e}}}\sum_{j\in e} "
         r"\frac{1}{(n^{\mathrm{token}}_{j})^{0.3}}\sum_{t\in j}"),
        ("mean(sequence) > sum(token)/avg", "1 / (N_sequence * mean of n_token(sequence))",
         r"\frac{1}{N_{\mathrm{sequence}}}\sum_{i} \frac{1}{\overline{n}^{\,\mathrm{token}}}\sum_{t\in i}"),
    ],
)  # fmt: skip
def test_a_path_as_a_weight_and_as_sums(path: str, weight: str, text: str) -> None:
    assert division.weight(parse(path)) == weight and latex.normalizer(parse(path)) == text


def test_counts_are_said_in_words() -> None:
    lines = division.words(pg.presets.echo().component("ce"))
    assert "N_sequence: sequences of the step (with or without a counted token), on all ranks together" in lines
    assert any("all observations, trained or not" in line for line in lines)
    weighted = division.words(pg.PolicyGradient(divide_by="weights", count_rejected=False))
    assert any("sum of the user's rl weights" in line for line in weighted)
    assert any("without those that a correction or gate rejected" in line for line in weighted)
    assert any("mask 'box'" in line for line in division.words(pg.PolicyGradient(count="box")))


def test_masks_say_their_reason() -> None:
    for mask in kinds(Mask):
        part = mask(on=("rl",), **({"name": "m"} if mask is pg.UserMask else {}))
        assert f"mask: {part.reason} on" in str(pg.presets.ppo(masks=[part]))
    assert letters.BASES.keys() == {"given", "policy", "record", "rollout", "interpolate"}


def flags_of(text: str) -> dict[str, str]:
    """Library to its line in the section "elsewhere"."""
    lines = text[text.index("\nelsewhere") :].splitlines()
    found = (line.strip().split(": ", 1) for line in lines if re.match(r"  \S", line) and ", always" not in line)
    return {pair[0]: pair[1] for pair in found if len(pair) == 2}


@pytest.mark.parametrize("name", _elsewhere.ELSEWHERE)
def test_a_preset_as_it_is_has_the_flags_of_the_table(name: str) -> None:
    for library, line in flags_of(explain.explain(built(name), name)).items():
        assert ("no counterpart" in line) == (library not in _elsewhere.ELSEWHERE[name])
        assert "no flag" not in line and "{" not in line and "  " not in line


@pytest.mark.parametrize(
    ("arguments", "verl", "trl"),
    [
        ("dapo low=0.3", "clip_ratio_low=0.3 actor.clip_ratio_high=0.28", "epsilon=0.3, epsilon_high=0.28"),
        ("grpo kl=0.5", "kl_loss_coef=0.5 actor.kl_loss_type=low_var_kl", "beta=0.5"),
        ("grpo kl=0", "actor.loss_agg_mode=seq-mean-token-mean", "beta=0"),
        ("grpo kl_estimator=k2", "kl_loss_type=mse", "no flag that we know of for a KL term of estimator k2"),
        ("grpo normalizer='mean(token)'", "token-mean", "loss_type='dapo'"),
        ("grpo normalizer='sum(token)'", "no flag that we know of for sum(token)", "no flag"),
        ("dr_grpo budget=512", "seq-mean-token-sum-norm actor.loss_scale_factor=512", "max_completion_length=512"),
        ("ppo dual=3", "clip_ratio_c=3", "no flag that we know of for dual"),
        ("ppo entropy=0.5", "entropy_coeff=0.5", "no flag that we know of for entropy=0.5"),
        ("cispo high=3", "clip_ratio_high=3", "epsilon_high=4"),
        ("icepop ceiling=7", "rollout_is_threshold='0.5_7'", "no flags"),
        ("dapo log_ratio_bound=10", "no flags that we know of", "no flags that we know of"),
        ("dapo old='rollout'", "no flags that we know of", "no flags that we know of"),
    ],
)
def test_flags_are_those_of_the_changed_spec_or_not_shown(
    arguments: str, verl: str, trl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, part = arguments.split(" ", 1)
    assert main(["explain", name, "--set", part.replace("'", "") if "normalizer" in part else part]) == 0
    found = flags_of(capsys.readouterr().out)
    assert verl in found["verl"] and trl in found["TRL"]


def test_a_file_has_the_flags_of_the_preset_that_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "loss.toml"
    file.write_text(pg.presets.gspo(high=5e-4).to_toml())
    assert main(["explain", str(file)]) == 0
    text = capsys.readouterr().out
    assert "elsewhere (this is gspo)" in text
    assert "clip_ratio_low=0.0003 actor.clip_ratio_high=0.0005" in flags_of(text)["verl"]


def test_compare_takes_the_preset_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "dapo", "--set", "coef=2", "--compare", "grpo"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line.startswith(("dapo", "grpo"))]
    assert rows == [["dapo", "0.00181818", "0.00181818"], ["grpo", "0.005", "0.0005"]]


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As ``explain grpo | head -1``: the pipe is closed before anything is written."""
    program = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from megatron_pgloss.cli import main; "
    program += "sys.exit(main(['explain', 'grpo']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
