"""`doctor` looks without importing, and knows NVIDIA's apex from the other project of that name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pgloss.cli import doctor, main


def found(name: str) -> doctor.Finding:
    return next(row for row in doctor.examine() if row.name == name)


def install(folder: Path, name: str, version: str | None = None, *packages: str) -> None:
    """A package that must not be imported, as it would lie in site-packages."""
    for package in (name, *(f"{name}/{inner}" for inner in packages)):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise SystemExit('imported')\n")
    if version is not None:
        (folder / f"{name}-{version}.dist-info").mkdir()
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_the_machine_of_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert sys.version.split()[0] in text and "gloo" in text and "tested: 0.16.1 and 0.19.2" in text
    assert "! " not in text


def test_an_impostor_is_told_from_nvidia_s_apex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "other", "apex", "0.9.10")
    install(tmp_path / "nvidia", "apex", None, "optimizers")
    monkeypatch.syspath_prepend(tmp_path / "other")
    assert found("NVIDIA apex").wrong and "pip uninstall apex" in found("NVIDIA apex").means
    assert main(["doctor"]) == 1 and "! NVIDIA apex" in capsys.readouterr().out
    monkeypatch.syspath_prepend(tmp_path / "nvidia")
    assert not found("NVIDIA apex").wrong and "fused optimizers" in found("NVIDIA apex").means


def test_half_a_transformer_engine_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "half", "transformer_engine", "2.1.0")
    monkeypatch.syspath_prepend(tmp_path / "half")
    assert found("Transformer Engine").wrong and "torch part" in found("Transformer Engine").means
    install(tmp_path / "rest", "transformer_engine_torch")
    monkeypatch.syspath_prepend(tmp_path / "rest")
    assert not found("Transformer Engine").wrong


@pytest.mark.parametrize("absent", ["torch", "pydantic"])
def test_without_what_it_needs_the_doctor_says_so(absent: str) -> None:
    """The case that the command is for. Nothing but the doctor works, and says why."""

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = f"import sys, runpy; sys.modules[{absent!r}] = None; sys.argv[1:] = {list(arguments)}; "
        program += "runpy.run_module('megatron_pgloss', run_name='__main__', alter_sys=True)"
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    done = ran("doctor")
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(rf"! {absent} +absent +.*pip install {absent}", done.stdout)
    done = ran("explain", "grpo", "--set", "kl=0")
    assert done.returncode == 2 and done.stderr == (
        "explain needs what is not installed here; see python -m megatron_pgloss doctor\n"
    )
    program = f"import sys; sys.modules[{absent!r}] = None; import megatron_pgloss; megatron_pgloss.plan"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert f"ModuleNotFoundError: megatron_pgloss needs {absent}" in done.stderr


def test_a_source_tree_of_megatron_core_on_the_path_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron is a namespace: the first folder on the path that has core/ is what would be imported."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\nPATCH = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    assert found("megatron-core").found == "0.15.7" and found("megatron-core").wrong
