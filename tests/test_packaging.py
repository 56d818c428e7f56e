"""The distribution: what it needs, what it carries, and what importing it must not need."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_pgloss"
PAIRS = {"311": "0.16.1", "312": "0.19.2"}

BLOCKED_IMPORT = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        return None

sys.meta_path.insert(0, Block())
import megatron_pgloss
for public in getattr(megatron_pgloss, "__all__", []):
    getattr(megatron_pgloss, public)
print(megatron_pgloss.__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lib/ (what a wheel would carry) and the egg-info, built from a copy."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, source / "megatron_pgloss", ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    command += ["build", "--build-base", "build", "--build-lib", str(folder / "lib")]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def requirements_of(built: Path) -> dict[str, list[Requirement]]:
    """Requirements by extra; the empty name is what every install needs."""
    found: dict[str, list[Requirement]] = {"": []}
    section = ""
    for line in (built / "megatron_pgloss.egg-info" / "requires.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            found.setdefault(section, []).append(Requirement(line))
    return found


def pins_of(python: str) -> dict[str, str]:
    lines = (ROOT / f"constraints-py{python}.txt").read_text().splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pinned}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_build_carries_every_file_of_the_package(built: Path) -> None:
    def files(top: Path) -> set[str]:
        found = (path.relative_to(top) for path in top.rglob("*") if path.is_file())
        return {str(path) for path in found if "__pycache__" not in path.parts}

    assert files(built / "lib" / "megatron_pgloss") == files(PACKAGE)
    assert "py.typed" in files(PACKAGE)
    assert [path.name for path in (built / "lib").iterdir()] == ["megatron_pgloss"]


def test_core_requirements_are_these_four(built: Path) -> None:
    needed = {canonical(r.name) for r in requirements_of(built)[""]}
    assert needed == {"torch", "megatron-core", "pydantic", "packaging"}


def test_apex_of_the_index_is_required_nowhere(built: Path) -> None:
    for extra, requirements in requirements_of(built).items():
        assert "apex" not in {canonical(r.name) for r in requirements}, extra
    for python in PAIRS:
        assert "apex" not in pins_of(python)


@pytest.mark.parametrize("python", sorted(PAIRS))
def test_constraints_pin_all_that_tests_install(built: Path, python: str) -> None:
    pins = pins_of(python)
    wanted = requirements_of(built)
    for requirement in wanted[""] + wanted["cli"] + wanted["test"]:
        version = pins.get(canonical(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned for Python {python}"
        assert version in requirement.specifier
    assert pins["megatron-core"] == PAIRS[python]


def test_version_is_the_same_in_metadata_and_module(built: Path) -> None:
    from megatron_pgloss import __version__

    metadata = (built / "megatron_pgloss.egg-info" / "PKG-INFO").read_text()
    assert f"\nVersion: {__version__}\n" in metadata
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_import_needs_neither_megatron_core_nor_optional_libraries() -> None:
    blocked = "megatron,transformer_engine,triton,apex,rich,matplotlib,jinja2"
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, blocked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == PACKAGE / "__init__.py"


@pytest.mark.parametrize("script", ["tools/test.sh", "tools/train.sh"])
def test_script_explains_itself_without_installing(script: str) -> None:
    done = subprocess.run(["bash", str(ROOT / script), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{script} [" in done.stdout


def test_unknown_python_is_refused_by_name() -> None:
    command = ["bash", str(ROOT / "tools/setup_env.sh"), "3.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "3.9" in done.stderr and "3.12 3.11" in done.stderr


def test_the_index_shows_no_link_that_leads_nowhere(built: Path) -> None:
    """On a package index no folder of the repository lies beside the README: its links must not be relative."""

    def links(text: str) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", text)

    relative = [link for link in links((ROOT / "README.md").read_text()) if not link.startswith(("https:", "#"))]
    assert len(relative) > 5  # the page has such links, in the repository, where they work
    assert all((ROOT / link.split("#")[0]).exists() for link in relative)
    shown = (built / "megatron_pgloss.egg-info" / "PKG-INFO").read_text()
    assert links(shown) and all(link.startswith(("https:", "#")) for link in links(shown)) and "![" not in shown
    for_the_index = runpy.run_path(str(ROOT / "setup.py"), run_name="asked")["for_the_index"]
    page = "![curve](docs/images/curve.png) [docs](docs/README.md) [web](https://e.org)"
    there = for_the_index(page, "https://e.org/v1/")
    assert there == (
        "![curve](https://e.org/v1/docs/images/curve.png?raw=true) [docs](https://e.org/v1/docs/README.md) "
        "[web](https://e.org)"
    )


def test_the_command_is_installed_by_its_name(built: Path) -> None:
    text = (built / "megatron_pgloss.egg-info" / "entry_points.txt").read_text()
    assert text.split() == ["[console_scripts]", "pgloss", "=", "megatron_pgloss.cli:main"]
