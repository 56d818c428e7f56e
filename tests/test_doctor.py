"""`doctor` looks without importing, and knows NVIDIA's apex from the other project of that name."""

from __future__ import annotations

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


def test_an_old_megatron_core_and_half_a_transformer_engine_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("megatron_core", "0.15.3"), ("transformer_engine", "2.1.0")):
        install(tmp_path / "half", name, version)
    monkeypatch.syspath_prepend(tmp_path / "half")
    assert found("megatron-core").wrong and "0.15.3" in found("megatron-core").found
    assert found("Transformer Engine").wrong and "torch part" in found("Transformer Engine").means
    install(tmp_path / "rest", "transformer_engine_torch")
    monkeypatch.syspath_prepend(tmp_path / "rest")
    assert not found("Transformer Engine").wrong
