"""What comes from outside the program runs nothing, is converted by nobody, and ends in an error of the package."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.cli import main
from megatron_pgloss.logprobs.rows import backends
from megatron_pgloss.logprobs.rows.cache import folder_problem
from megatron_pgloss.spec.toml import LONGEST
from megatron_pgloss.view import TokenCell, TokenRow, learning_curve, token_page
from support.steps import refused

OWN = 'components = [{kind = "term", name = "own", fn = "NAME"}]'


@pytest.fixture(autouse=True)
def _nothing_imported() -> Iterator[None]:
    """What a test imports on purpose must not stay for the next one, whatever their order."""
    yield
    sys.modules.pop("evil_mod", None)


def evil(folder: Path) -> Path:
    """A module that leaves a mark when it is imported, and a spec that names it."""
    (folder / "evil_mod.py").write_text(
        "from pathlib import Path\nfrom os.path import join\nPath(__file__).with_suffix('.ran').touch()\n"
        "def square(x):\n    return x.log_ratio.square()\n"
    )
    (folder / "loss.toml").write_text(OWN.replace("NAME", "evil_mod:square"))
    return folder / "evil_mod.ran"


@pytest.mark.parametrize("name", ["evil_mod:square", "evil_mod:missing", "os:system", ".rel:x", ":", "evil_mod"])
def test_nothing_that_a_file_names_is_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = evil(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "loss.toml"
    file.write_text(OWN.replace("NAME", name))
    assert main(["explain", str(file)]) == 2
    said = capsys.readouterr().err
    assert "nothing that a spec names is imported" in said and "--functions MODULE" in said and "loss.toml" in said
    refused(pg.SpecError, lambda: pg.Term("own", name), "nothing that a spec names is imported", repr(name))
    refused(pg.SpecError, lambda: pg.LossSpec.from_toml(file, functions={}), "not among those", repr(name))
    assert not ran.exists() and "evil_mod" not in sys.modules


def test_functions_are_looked_up_among_those_that_the_caller_gives(tmp_path: Path) -> None:
    def fn(x: Any) -> Any:
        return x.log_ratio

    file = tmp_path / "loss.toml"
    file.write_text(OWN.replace("NAME", "my.loss:fn"))
    spec = pg.LossSpec.from_toml(file, functions={"my.loss:fn": fn})
    assert spec.component("own").fn is fn  # type: ignore[attr-defined]
    refused(pg.SpecError, lambda: pg.LossSpec.from_toml(file, functions={"my.loss:fm": fn}), "'my.loss:fm'?", str(file))
    data = {"components": [{"kind": "policy_gradient", "surrogate": {"kind": "custom", "fn": "a:b"}}]}
    assert pg.LossSpec.from_dict(data, functions={"a:b": fn}).component("rl").surrogate.fn is fn  # type: ignore[attr-defined]


def test_the_command_line_imports_the_one_module_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = evil(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", str(tmp_path / "loss.toml"), "--functions", "evil_mod"]) == 0
    assert ran.exists() and "evil_mod:square" in capsys.readouterr().out
    sys.modules.pop("evil_mod")  # imported anew below
    # Its own functions alone: `join` came from another module, `Path` is no function.
    for name in ("join", "Path", "no"):
        (tmp_path / "loss.toml").write_text(OWN.replace("NAME", f"evil_mod:{name}"))
        assert main(["explain", str(tmp_path / "loss.toml"), "--functions", "evil_mod"]) == 2
        assert "expected evil_mod:square" in capsys.readouterr().err
    assert main(["explain", "--functions", "no_such_module_at_all"]) == 2
    assert "no such module" in capsys.readouterr().err
    for wrong in (".rel", "a:b", "a/b"):
        with pytest.raises(SystemExit):
            main(["explain", "--functions", wrong])


KL = "components = [{kind = 'kl', coef = VALUE}]"
FILES: dict[str, bytes] = {
    "text as a number": KL.replace("VALUE", "'0.01'").encode(),
    "a bool as a number": KL.replace("VALUE", "true").encode(),
    "infinity": KL.replace("VALUE", "inf").encode(),
    "5,000 digits": KL.replace("VALUE", "9" * 5000).encode(),
    "4,000 digits": KL.replace("VALUE", "9" * 4000).encode(),
    "deep lists": ("components = " + "[" * 5000 + "]" * 5000).encode(),
    "lists of lists": ("components = [" + "[" * 40 + "]" * 40 + "]").encode(),
    "deep tables": ("[" + ".".join("a" * 1 for _ in range(3000)) + "]").encode(),
    "a number as a flag": b"components = [{kind = 'kl', count_rejected = 1}]",
    "text as a flag": b"components = [{kind = 'kl', count_rejected = 'no'}]",
    "a fraction as a whole number": b"corrections = [{kind = 'staleness', max_lag = 2.0}]",
    "a number as a name": b"components = [{kind = 'kl', name = 3}]",
    "no list": b"components = 3",
    "a component that is none": b"components = [3]",
    "a kind that is a list": b"components = [{kind = ['kl']}]",
    "binary": bytes(range(256)),
    "utf-16": "components = []".encode("utf-16"),
    "too long": b"#" * (LONGEST + 1),
    "a steep exponent": b"components = [{kind = 'kl', normalizer = 'sum(token)/pow(1e9)'}]",
    "a long normalizer": b"components = [{kind = 'kl', normalizer = '" + b"9" * 5000 + b"'}]",
    "a date": b"components = 2020-01-01",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_bad_file_is_refused_with_its_name(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "loss.toml"
    file.write_bytes(text)
    refused(pg.SpecError, lambda: pg.LossSpec.from_toml(file), "loss.toml")


def batch() -> pg.TokenBatch:
    return pg.TokenBatch.from_packed(
        tokens=[1, 2, 3], lengths=[3], action_mask=[False, True, True], terminations=["success"]
    )


CALLS: dict[str, Callable[[], Any]] = {
    "from_dict(None)": lambda: pg.LossSpec.from_dict(None),  # type: ignore[arg-type]
    "from_dict of a list": lambda: pg.LossSpec.from_dict([]),  # type: ignore[arg-type]
    "from_dict with a number as a key": lambda: pg.LossSpec.from_dict({1: 2}),  # type: ignore[dict-item]
    "coef of 400 digits": lambda: pg.KL(coef=10**400),
    "coef of 5,000 digits": lambda: pg.KL(coef=10**5000),
    "coef is a list": lambda: pg.KL(coef=[1.0]),
    "a name in bytes": lambda: pg.KL(name=b"kl"),
    "a steep exponent": lambda: pg.KL(normalizer="sum(token)/pow(-1e9)"),
    "a surrogate of a preset": lambda: pg.presets.ppo(surrogate=pg.Clip()),
    "a ratio of a preset": lambda: pg.presets.gspo(ratio="token"),
    "parts that are no list": lambda: pg.presets.ppo(masks=3),
    "a tensor as kl": lambda: pg.presets.ppo(kl=torch.ones(2)),
    "text as kl": lambda: pg.presets.ppo(kl="0.1"),
    "a flag that is text": lambda: pg.presets.ppo(count_rejected="no"),
    "dr_grpo without a budget": lambda: pg.presets.dr_grpo(),  # type: ignore[call-arg]
    "lambda is a tensor": lambda: pg.advantages.gae(batch(), [1.0], values=torch.zeros(3), lam=torch.ones(2)),
    "gamma is text": lambda: pg.advantages.gae(batch(), [1.0], values=torch.zeros(3), gamma="1"),
    "gamma is NaN": lambda: pg.advantages.gae(batch(), [1.0], values=torch.zeros(3), gamma=float("nan")),
    "scale is a list": lambda: pg.advantages.of_rewards([1.0], [0], scale=["group"]),  # type: ignore[arg-type]
    "min_voters is text": lambda: pg.advantages.of_rewards([1.0], [0], min_voters="2"),  # type: ignore[arg-type]
    "rewards of text": lambda: pg.advantages.of_rewards(["a"], [0]),
    "rewards that are sparse": lambda: pg.advantages.of_rewards(torch.ones(1).to_sparse(), [0]),
    "prompt ids that are a number": lambda: pg.advantages.of_rewards([1.0], 3),
    "values that are a list": lambda: pg.advantages.gae(batch(), [1.0], values=[0.0, 0.0, 0.0]),  # type: ignore[arg-type]
    "a price per token that is text": lambda: pg.advantages.linear_length([1], "0.1"),  # type: ignore[arg-type]
    "a limit that is a list": lambda: pg.advantages.soft_overlong([1], [3], 1),  # type: ignore[arg-type]
    "lengths of text": lambda: pg.advantages.linear_length(["a"], 0.1),
    "a coefficient that is text": lambda: pg.advantages.kl_penalty(batch(), "0.1"),  # type: ignore[arg-type]
    "a mask that is a list": lambda: pg.advantages.whiten(batch().with_stream("advantages", torch.ones(3)), mask=[1]),  # type: ignore[arg-type]
    "voters that are text": lambda: pg.advantages.of_rewards([1.0], [0], voters="yes"),
    "values of turns that are a number": lambda: pg.advantages.per_turn(batch(), 3),  # type: ignore[arg-type]
    "a turn's value that is text": lambda: pg.advantages.per_turn(batch(), [["a"]]),
    "with_stream of a number as a name": lambda: batch().with_stream(3, torch.ones(3)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_bad_argument_ends_in_an_error_of_the_package(call: Callable[[], Any]) -> None:
    with pytest.raises(pg.PGLossError):
        call()


def test_a_cache_that_others_can_write_to_is_not_loaded_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    made = tmp_path / "new" / "cache"
    assert folder_problem(made) is None and stat.S_IMODE(made.stat().st_mode) == 0o700
    for mode, problem in ((0o755, None), (0o775, "mode 0775"), (0o702, "mode 0702")):
        made.chmod(mode)
        found = folder_problem(made)
        assert (found is None) if problem is None else (found is not None and problem in found)
    made.chmod(0o700)
    (tmp_path / "link").symlink_to(made)
    assert "is a link" in str(folder_problem(tmp_path / "link"))
    (tmp_path / "file").touch()
    assert "cannot be used" in str(folder_problem(tmp_path / "file"))
    made.parent.chmod(0o777)
    assert "others can replace it" in str(folder_problem(made))
    made.parent.chmod(0o1777)  # as /tmp is: only the owner of a folder can replace it
    assert folder_problem(made) is None
    monkeypatch.setattr(os, "getuid", lambda: made.stat().st_uid + 1)
    assert "belongs to user" in str(folder_problem(made))


def test_the_compiled_backend_is_refused_with_such_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backends._problem.cache_clear()
    try:
        assert "TORCHINDUCTOR_CACHE_DIR to a folder of your own" in str(backends.backend_problem("compiled"))
        assert "no compiled: Inductor's cache" in backends.backend_report()["cpu"]
    finally:
        backends._problem.cache_clear()


def test_a_link_where_a_page_goes_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    row = TokenRow("s", "p", "e", {}, (TokenCell("x", "user", "harness", {}),))
    for name, make in (
        ("page.html", lambda path: token_page([row], path, title="")),
        ("curve.png", lambda path: learning_curve(path, {"a": ([0, 1], [0, 1])}, title="", x_label="", y_label="")),
    ):
        (tmp_path / name).symlink_to(precious)
        assert make(tmp_path / name) == tmp_path / name
        assert precious.read_text() == "mine" and not (tmp_path / name).is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "page.html", "precious"]
