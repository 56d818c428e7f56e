"""Against verl itself, where it is installed: tools/compare_verl.sh puts it into an environment of its own, and CI runs
the whole table there.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "verl.md").read_text(encoding="utf-8")


def test_the_committed_table_explains_every_difference() -> None:
    """A line that is not equal on both sides has a reason; the modes and losses of verl are all there."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line[:2] == "| "]
    body = [cells for cells in lines if len(cells) >= 4 and cells[0] not in ("verl", "---")]
    assert len(body) > 35
    for cells in body:
        assert cells[2:4] == ["equal", "equal"] or len(cells[-1]) > 10, cells
    for name in (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "vanilla",
        "gspo",
        "sapo",
        "gpg",
        "cispo",
        "dro",
        "geo_mean",
        "dppo_tv",
        "dppo_kl",
        "kl_cov",
        "clip_cov",
    ):
        assert re.search(rf"`{name}`", PAGE), name


@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here: tools/compare_verl.sh"
)
def test_every_mode_and_loss_equals_verls_or_differs_as_explained(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    from compare_verl.__main__ import main

    assert main([]) == 0, capsys.readouterr().err
