"""The views: what a page, a terminal and a curve show, and that no data can break or mislead
them."""

from __future__ import annotations

import html.parser
import io
import json
import math
import re
import sys

import pytest
from rich.console import Console

import megatron_pgloss as pg
from megatron_pgloss.cli import main
from megatron_pgloss.errors import DataError, UnsupportedError
from megatron_pgloss.view import (
    Curve,
    TokenCell,
    TokenRow,
    learning_curve,
    read_rows,
    rows_of_plan,
    token_page,
    token_terminal,
    write_rows,
)
from megatron_pgloss.view.cells import number, signed, summarize
from megatron_pgloss.view.curve import spread
from megatron_pgloss.view.palette import role_colours
from megatron_pgloss.view.text import pieces, printable, visible

OUT = (False, 0.0)


def cell(text: str, role: str = "assistant", author: str = "policy", **more) -> TokenCell:
    more = {"components": {"rl": (True, 0.25), "kl": (True, 0.25), "ce": OUT}, **more}
    return TokenCell(text, role, author, **more)


def prompt_cell(text: str, reason: str = "initial prompt") -> TokenCell:
    return cell(text, "user", "harness", components={"rl": OUT, "kl": OUT, "ce": OUT}, reason=reason)


def row(*tokens: TokenCell, prompt: str = "task-1", episode: str = "0", **header: str) -> TokenRow:
    return TokenRow(f"{prompt}/{episode}", prompt, episode, header, tokens)


ROWS = [
    row(
        prompt_cell("Find"),
        prompt_cell(" it"),
        cell("look", advantage=0.8, logprob=-0.5),
        cell("\n", advantage=0.8, logprob=-2.0, reason="ratio rejected"),
        cell("two", "tool", "environment", components={"rl": OUT, "kl": OUT, "ce": (True, 0.1)}),
        reward="1.0",
        termination="success",
    ),
    row(prompt_cell("Find"), cell("no", advantage=-0.4), prompt="task-2", reward="0.0"),
    row(prompt_cell("Find"), cell("eh", advantage=0.0), episode="1", termination="failure"),
]


class Page(html.parser.HTMLParser):
    """The rendered page, taken apart: tags, tokens with what the tooltip says of them, visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.tags, self.seen, self.open, self.tokens, self.classes, self.at = text, [], [], [], [], [], 0
        self.feed(text)
        self.text = " ".join(" ".join(self.seen).split())
        (kinds,) = re.findall(r'id="kinds">(.*?)</script>', text)
        self.kinds = [dict(facts) for facts in json.loads(kinds)]
        self.under = dict(re.findall(r"\.(k\d+)::after\{content:(.*)\}", text))

    @property
    def titles(self) -> list[dict[str, str]]:
        """As the page's script puts them together."""
        found = []
        for token in self.tokens:
            facts = {"token": token["text"], "position": str(token["position"]), **self.kinds[int(token["kind"][1:])]}
            exact = token.get("data-x") or token.get("data-a")
            facts |= {"advantage": exact} if exact else {}
            facts |= {"log-prob": token["data-l"]} if "data-l" in token else {}
            found.append(facts)
        return found

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)
            self.classes.append(attrs.get("class", ""))
        if attrs.get("class") == "row":
            self.at = 0
        if tag == "span" and re.fullmatch(r"t k\d+", attrs.get("class", "")):
            self.tokens.append({**attrs, "kind": attrs["class"][2:], "position": self.at, "text": ""})
            self.at += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.classes.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.seen.append(data)
            if any(re.fullmatch(r"t k\d+", name) for name in self.classes):
                self.tokens[-1]["text"] += data


def page(tmp_path, rows, **more) -> Page:
    path = token_page(rows, tmp_path / "deep" / "page.html", **{"title": "A page", **more})
    return Page(path.read_text(encoding="utf-8"))


def printed(rows, *, width: int = 120, **more) -> str:
    stream = io.StringIO()
    token_terminal(rows, Console(file=stream, width=width), **more)
    return stream.getvalue()


# Totals.


def test_summary_by_hand():
    summary = summarize(ROWS)
    assert summary.tokens == 9
    assert summary.roles == {"user": 4, "assistant": 4, "tool": 1}
    assert {name: (t.tokens, t.weight) for name, t in summary.components.items()} == {
        "rl": (4, 1.0),
        "kl": (4, 1.0),
        "ce": (1, 0.1),
    }
    assert summary.reasons == {"initial prompt": 4, "ratio rejected": 1}
    assert summary.largest_advantage == 0.8
    assert len(set(summary.signs.values())) == 3


def test_a_weight_of_a_non_member_counts_nowhere():
    lone = row(cell("x", components={"rl": (False, 7.0)}), cell("y", components={"rl": (True, 2.0)}))
    assert summarize([lone]).components["rl"].weight == 2.0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.003124, "0.00312"),
        (3.12e-5, "3.12e−5"),
        (1e20, "1e20"),
        (-0.5, "−0.5"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_short(value, shown):
    assert number(value) == shown


def test_advantages_carry_their_sign():
    assert [signed(value) for value in (0.8, -0.4, 0.0, -0.0)] == ["+0.80", "−0.40", "0", "0"]
    assert [signed(value) for value in (0.00412, -3e-6)] == ["+0.00412", "−3e−6"]


def test_role_colours_are_distinct_and_do_not_depend_on_company():
    usual = role_colours(["system", "user", "assistant", "tool", "environment"])
    assert len(set(usual.values())) == 5
    mixed = role_colours(["judge", "tool", "critic", "assistant"])
    assert mixed["tool"] == usual["tool"] and mixed["assistant"] == usual["assistant"]
    assert len(set(mixed.values())) == 4


# Text.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("a\n\t", "a↵⇥"),
        ("", "∅"),
        ("\x1b[31m", "␛[31m"),
        ("\u200b\u202e", "u+200bu+202e"),  # zero width space, right-to-left override
        ("\ud83d", "u+d83d"),  # half of a surrogate pair: not encodable
        ("日本é", "日本é"),
    ],
)
def test_invisible_text_is_made_visible(text, shown):
    assert visible(text) == shown


def test_pieces_tell_stand_ins_from_text():
    assert pieces(" a b") == [("·", True), ("a", False), ("·", True), ("b", False)]


def test_printable_keeps_spaces_and_takes_anything():
    assert printable("two words\n") == "two words↵"
    assert printable(3) == "3"


# The page.


def test_page_shows_every_field_of_every_token(tmp_path):
    shown = page(tmp_path, ROWS)
    assert len(shown.titles) == 9
    assert shown.titles[2] == {
        "token": "look",
        "position": "2",
        "role": "assistant",
        "author": "policy",
        "● rl": "trained, weight 0.25",
        "▲ kl": "trained, weight 0.25",
        "○ ce": "not trained",
        "advantage": "+0.8",
        "log-prob": "-0.5000",
    }
    assert shown.titles[0]["reason"] == "a: initial prompt"
    assert shown.titles[3]["reason"] == "b: ratio rejected"


def test_page_groups_by_prompt_then_episode_with_headers_and_totals(tmp_path):
    shown = page(tmp_path, ROWS, title="T1", subtitle="S1", legend={"ce": "observed", "absent": "zz"})
    # Rows 0 and 2 share a prompt and come together, before the second prompt.
    order = [shown.text.index(part) for part in ("task-1/0 ·", "task-1/1 ·", "task-2/0 ·")]
    assert order == sorted(order)
    assert [attrs.get("open", "no") for tag, attrs in shown.tags if tag == "details"] == [None, None]
    for part in ("T1 S1", "reward 1.0 termination success", "3 of 5 tokens trained", "observed"):
        assert part in shown.text
    assert "rl 4 1 " in shown.text and "ce observed" not in shown.text and "ce 1 0.1" in shown.text
    assert "zz" not in shown.text


def test_what_stands_under_a_token_by_hand(tmp_path):
    shown = page(tmp_path, [row(cell("x", advantage=-0.4, reason="late"))])
    # One entry for the two components of equal weight, the letter of the reason, the advantage.
    assert shown.under == {"k0": '"●▲ 0.25 a" "\\a " attr(data-a)'} and shown.tokens[0]["data-a"] == "−0.40"
    two = cell("x", components={"rl": (True, 0.5), "kl": (True, 0.25)})
    assert page(tmp_path, [row(two)]).under == {"k0": '"● 0.5\\a ▲ 0.25"'}
    shown = page(tmp_path, [row(prompt_cell("y"))])
    assert shown.under == {"k0": '"○ a"'} and "data-a" not in shown.tokens[0]


def test_page_is_self_contained(tmp_path):
    shown = page(tmp_path, ROWS)
    fetching = {"link", "img", "iframe", "object", "embed", "base"}
    assert not [tag for tag, attrs in shown.tags if tag in fetching or "src" in attrs or "href" in attrs]
    assert not re.search(r"https?:|//\w+\.|@import|url\(", shown.source)
    assert "prefers-color-scheme: dark" in shown.source


EVIL = '</span><script>alert("1")</script>&amp;\'{{ 7 * 7 }}\u202e\ud800\t\n'


def test_text_of_the_data_is_never_markup(tmp_path):
    evil = TokenRow(
        EVIL,
        EVIL,
        EVIL,
        {EVIL: EVIL},
        (TokenCell(EVIL, EVIL, EVIL, {EVIL: (True, 1.0)}, reason=EVIL), cell("fine")),
    )
    shown = page(tmp_path, [evil], title=EVIL, subtitle=EVIL, legend={EVIL: EVIL})
    assert sum(tag == "script" for tag, _ in shown.tags) == 2  # the page's own: its table, and what reads it
    assert shown.open == []
    assert "{{ 7 * 7 }}" in shown.text
    assert "\u202e" not in shown.source
    # A tab or a line break in a name would forge lines of the tooltip.
    assert set(shown.titles[0]) - {f"● {printable(EVIL)}"} == {
        "token",
        "position",
        "role",
        "author",
        "reason",
    }


def test_page_survives_numbers_that_are_wrong(tmp_path):
    odd = [math.nan, math.inf, -math.inf]
    cells = [cell("x", components={"rl": (True, value)}, advantage=value, logprob=value) for value in odd]
    shown = page(tmp_path, [row(*cells)])
    assert [title["advantage"] for title in shown.titles] == ["+nan", "+inf", "−inf"]
    assert [title["log-prob"] for title in shown.titles] == ["nan", "inf", "-inf"]
    assert "nan" in printed([row(*cells)])


def test_advantage_bars_diverge_and_fade(tmp_path):
    tokens = [cell("x", advantage=value) for value in (2.0, -1.0, 0.001, 0.0, None)]
    shown = page(tmp_path, [row(*tokens)])
    bars = re.findall(r"--bar:var\(--(\w+)\);--strength:([\d.]+)", shown.source)
    assert bars == [("plus", "1.0"), ("minus", "0.5"), ("plus", "0.2"), ("zero", "1"), ("none", "1")]


@pytest.mark.parametrize("view", [lambda path: token_page([], path, title=""), lambda _: printed([])])
def test_no_rows_are_refused(tmp_path, view):
    with pytest.raises(DataError, match="no token rows"):
        view(tmp_path / "page.html")


def test_equal_rows_give_equal_bytes(tmp_path):
    assert page(tmp_path, ROWS).source == page(tmp_path, ROWS).source


# The terminal.


def test_terminal_without_a_tty_is_plain_and_complete():
    text = printed(ROWS, title="Traces", legend={"ce": "observed"})
    assert "\x1b" not in text
    for part in ("Traces", "observed", "reward 1.0", "task-1/0, 3 of 5 tokens trained", "○a"):
        assert part in text
    assert text.index("task-1/1,") < text.index("task-2/0,")


def test_terminal_columns_by_hand():
    text = printed([row(prompt_cell("Find"), cell("look", advantage=0.8, logprob=-0.5))])
    lines = [line.rstrip() for line in text.splitlines()[-4:]]
    assert lines == [
        "  user    Find assistant look",
        "  harness ○a   policy    ●▲0.25",
        "                         +0.80",
        "                         −0.50",
    ]


@pytest.mark.parametrize("width", [24, 40, 80])
def test_terminal_lines_fit_and_labels_stay_with_their_tokens(width):
    text = printed([row(*[prompt_cell("Find")] * 4, *[cell("word")] * 9)] * 2, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    labelled = [line for line in lines[lines.index("prompt task-1") :] if "assistant" in line]
    assert labelled and all("word" in line for line in labelled)


def test_a_line_break_token_ends_its_line():
    text = printed([row(cell("a"), cell("\n"), cell("b"))])
    assert not [line for line in text.splitlines() if "↵" in line and " b" in line]


def colour_codes(monkeypatch, **environment: str) -> list[str]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", width=100)
    token_terminal(ROWS, console)
    return re.findall(r"\x1b\[[0-9;]*[34]8;[0-9;]*m", stream.getvalue())


def test_terminal_colours_on_a_tty_and_not_under_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour_codes(monkeypatch)
    assert not colour_codes(monkeypatch, NO_COLOR="1")


def test_escape_sequences_and_markup_of_the_data_stay_text():
    evil = "[bold]\x1b]0;owned\x07[/bold]"
    cells = (TokenCell(evil, evil, evil, {evil: (True, 1.0)}, reason=evil),)
    text = printed([TokenRow(evil, evil, evil, {evil: evil}, cells)], title=evil, width=300)
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]␛]0;owned␇[/bold]" in text


# Curves.

PNG = b"\x89PNG\r\n\x1a\n"


def curve(path, series, **more):
    words = {"title": "t", "x_label": "step", "y_label": "share"}
    return learning_curve(path, series, **{**words, **more})


def test_curve_writes_a_png_of_the_stated_size(tmp_path):
    series = {"with": Curve([0, 1, 2], [0.1, math.nan, 0.9], [0, 0, 0.8], [0.2, 1, 1])}
    path = curve(
        tmp_path / "deep" / "a.png",
        {**series, "without": ([0, 1], [0.1, 0.3])},
        hlines={"random": 0.05, "costs $5 to $6": 1.0},  # no formula
        y_range=(0, 1),
    )
    data = path.read_bytes()
    assert data[:8] == PNG
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1500, 825)


def test_equal_curves_give_equal_bytes(tmp_path):
    files = [curve(tmp_path / f"{i}.png", {"a": ([0, 1], [0, 1])}) for i in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ({}, "no series"),
        ({"a": ([0, 1], [1])}, "y and x differ in length"),
        ({"a": ([0], [math.inf])}, "infinite"),
        ({"a": ([0], [math.nan])}, "no finite y"),
        ({"a": ([], [])}, "no finite y"),
        ({"a": Curve([0], [1], low=[0])}, "one edge only"),
    ],
)
def test_bad_series_are_refused_by_name(tmp_path, series, message):
    with pytest.raises(DataError, match=message) as caught:
        curve(tmp_path / "a.png", series)
    assert not series or "'a'" in str(caught.value)
    assert not (tmp_path / "a.png").exists()


def test_labels_are_spread_only_where_they_would_touch():
    # 0.5 and 0.52 move apart around their mean; 0.9 stays
    assert spread([0.5, 0.52, 0.9], 0.1) == pytest.approx([0.46, 0.56, 0.9])
    # the pair at the top pushes into 0.8, so all three share their mean 0.9
    assert spread([0.8, 0.95, 0.95], 0.1) == pytest.approx([0.8, 0.9, 1.0])
    assert spread([], 0.1) == []


# Missing libraries.


@pytest.mark.parametrize(
    ("library", "view"),
    [
        ("jinja2", lambda path: token_page(ROWS, path, title="")),
        ("rich.console", lambda _: token_terminal(ROWS)),
        ("matplotlib.figure", lambda path: curve(path, {"a": ([0], [0])})),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, tmp_path, library, view):
    monkeypatch.setitem(sys.modules, library, None)  # what an import of an absent library meets
    with pytest.raises(UnsupportedError, match=r"megatron_pgloss\[cli\]") as caught:
        view(tmp_path / "file")
    assert library.split(".")[0] in str(caught.value)


# What is alive comes first.


def still(prompt: str, **more) -> TokenRow:
    return row(prompt_cell("Find"), cell("eh", advantage=0.0), prompt=prompt, **more)


def test_live_prompts_come_first_and_silent_ones_are_marked_and_closed(tmp_path):
    rows = [still("quiet-1"), still("mixed", episode="a"), row(cell("go", advantage=1.0), prompt="mixed", episode="b")]
    shown = page(tmp_path, [*rows, row(prompt_cell("x"), prompt="untrained")])
    order = [shown.text.index(f"{prompt} prompt ·") for prompt in ("mixed", "quiet-1", "untrained")]
    assert order == sorted(order)
    assert shown.text.index("mixed/b ·") < shown.text.index("mixed/a ·")
    details = [attrs for tag, attrs in shown.tags if tag == "details"]
    assert ["open" in attrs for attrs in details] == [True, False, False]
    assert ["silent" in attrs["class"] for attrs in details] == [False, True, True]
    assert "2 of 3 prompts have A = 0" in shown.text and shown.text.count("silent: A = 0") == 1
    assert shown.text.count("1 of 2 tokens trained, A = 0 on all of them") == 2
    assert "1 of 1 tokens trained " in shown.text and "0 of 1 tokens trained " in shown.text
    assert "1 of 2 tokens trained, A = 0 on all of them" in printed(rows)


def test_a_page_where_all_is_silent_has_something_open(tmp_path):
    shown = page(tmp_path, [still("one"), still("two")])
    assert ["open" in attrs for tag, attrs in shown.tags if tag == "details"] == [True, False]


def test_a_long_page_stays_small_and_a_limit_is_said(tmp_path):
    """100,000 tokens in less than 9 MB: 33 before. Prompts beyond the first thousands of tokens are closed."""
    weights = {"rl": (True, 1 / 1800), "kl": (True, 1 / 1800)}
    tokens = [cell("word", components=weights, advantage=0.25, logprob=-1.25)] * 450
    tokens = [prompt_cell("Find")] * 50 + tokens
    rows = [row(*tokens, prompt=f"task {i // 4}", episode=str(i % 4)) for i in range(200)]
    path = token_page(rows, tmp_path / "long.html", title="long")
    assert path.stat().st_size < 9e6
    text = path.read_text(encoding="utf-8")
    assert text.count('<details class="prompt') == 50 and text.count(" open>") == 2  # 2 x 2,000 tokens
    shown = page(tmp_path, rows, limit=1200)
    assert "198 further rows are left out" in shown.text and len(shown.tokens) == 1000


def test_rows_come_back_from_a_file_as_they_were(tmp_path):
    odd = row(
        cell(EVIL, advantage=-0.0, logprob=-math.inf), cell("", components={"other": (True, 1e-300)}), prompt=EVIL
    )
    rows = [*ROWS, odd]
    path = write_rows(rows, tmp_path / "deep" / "rows.jsonl")
    assert path.read_bytes().isascii()
    assert list(read_rows(path)) == rows


HEADER = '{"format": "megatron_pgloss token rows", "version": 1, "components": ["rl"]}\n'
ONE = '{"sample":"s","prompt":"p","episode":"e","header":{},"tokens":[TOKEN]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no token row"),
        ("[]", "no file of token rows"),
        ("{}\n", "no file of token rows"),
        (HEADER.replace("1,", "2,"), "another version"),
        (HEADER + "{}\n", "no token row"),
        (HEADER + "[" * 100_000 + "\n", "no token row"),
        (HEADER + ONE.replace("TOKEN", '["x","r","a",[[1,1.0]],[],null,null,null]'), "no token row"),
        (HEADER + ONE.replace("TOKEN", '["x","r","a",[],[],"0.5",null,null]'), "no token row"),
        (HEADER + '{"sample":3,"prompt":"p","episode":"e","header":{},"tokens":[]}', "no token row"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_rows_is_refused_with_its_line(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=message) as raised:
        list(read_rows(file))
    assert "rows.jsonl, line" in str(raised.value)


def test_the_command_prints_live_rows_first_and_writes_the_page(tmp_path, capsys):
    file = write_rows([still("quiet"), *ROWS], tmp_path / "rows.jsonl")
    assert main(["inspect", str(file), "--rows", "1"]) == 0
    captured = capsys.readouterr()
    assert "look" in captured.out and "quiet" not in captured.out and "3 more rows" in captured.err
    assert main(["inspect", str(file), "--find", "task-2"]) == 0
    assert "task-1" not in capsys.readouterr().out
    assert main(["inspect", str(file), "--html", str(tmp_path / "out.html")]) == 0
    assert (tmp_path / "out.html").read_text().count("<article") == 4
    assert main(["inspect", str(file), "--find", "nowhere"]) == 2
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_rows_of_a_plan_by_hand():
    """Two rows of one prompt; the second is truncated and masked out, its advantage stays to be seen."""
    batch = pg.TokenBatch.from_packed(
        tokens=[5, 6, 7, 8, 5, 6, 7], lengths=[4, 3], action_mask=[False, True, True, False, False, True, True],
        observation_mask=[False, False, False, True, False, False, False], advantages=[1.5, -1.5],
        old_logprobs=[0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -2.0], prompt_ids=["task", "task"], sample_ids=["a", "b"],
        terminations=["success", "truncated"],
    )  # fmt: skip
    spec = pg.presets.dapo(overlong="drop").add(pg.CrossEntropy(coef=0.1))
    plan = pg.plan([batch], spec, split=pg.Split(sequences=2))
    one, two = rows_of_plan(plan, decode=lambda token: f"<{token}>", facts={"reward": [1, 0]})
    assert [c.text for c in one.tokens] == ["<5>", "<6>", "<7>", "<8>"]
    assert one.header == {"end": "success", "reward": "1"} and (one.prompt, one.episode) == ("task", "sample 'a'")
    assert [c.author for c in one.tokens] == ["unknown", "policy", "policy", "environment"]
    assert one.tokens[1].components == {"rl": (True, 0.5), "ce": (False, 0.0)}
    assert one.tokens[3].components == {"rl": (False, 0.0), "ce": (True, 1.0)}
    assert [c.advantage for c in one.tokens] == [None, 1.5, 1.5, None]
    assert [c.logprob for c in one.tokens] == [None, -0.5, -0.25, None]
    assert [c.reason for c in two.tokens] == [None, "truncated", "truncated"] and two.trained == 0
    assert two.tokens[1].advantage == -1.5 and not two.live and one.live
    with pytest.raises(DataError, match=r"facts\['reward'\]"):
        rows_of_plan(plan, facts={"reward": [1]})
    with pytest.raises(DataError, match="no rows to show"):
        rows_of_plan(pg.plan([batch], None, split=pg.Split(sequences=2)))
