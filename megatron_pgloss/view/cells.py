"""Token rows as plain data, and what both renderers derive from them: totals, groups, segments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_pgloss.errors import DataError
from megatron_pgloss.spec.words import closed


@closed
@dataclass(frozen=True, slots=True)
class TokenCell:
    """One token and everything the loss knows about it."""

    text: str
    """The text that the tokenizer decodes the single token to; invisible characters are made visible when it is
    shown."""
    role: str
    """system, user, assistant, tool, ...; it decides the colour."""
    author: str
    """policy, environment, harness, ...; it decides which components the token is in."""
    components: Mapping[str, tuple[bool, float]]
    """Component name to (is a member, weight w); the weight of a non-member is not counted."""
    advantage: float | None = None
    logprob: float | None = None
    """Log-prob of this token given those before it, in nats."""
    reason: str | None = None
    """Why the token is out of the loss (or out of a component), in a word or two."""

    @property
    def members(self) -> dict[str, float]:
        """Components that train this token, with their weights."""
        return {name: weight for name, (member, weight) in self.components.items() if member}


@closed
@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sequence, as the model reads it."""

    sample: str
    prompt: str
    episode: str
    header: Mapping[str, str]
    """Facts about the row, shown in its heading in this order: reward, termination, ..."""
    tokens: tuple[TokenCell, ...]

    @property
    def trained(self) -> int:
        """Tokens that a component trains."""
        return sum(bool(cell.members) for cell in self.tokens)

    @property
    def live(self) -> bool:
        """Whether a trained token has an advantage that is not 0, or no advantage at all. Other rows give no policy
        gradient.
        """
        return any(cell.members and cell.advantage != 0 for cell in self.tokens)


@dataclass(frozen=True, slots=True)
class Total:
    """What a component trains: its member tokens and the sum of their weights."""

    tokens: int
    weight: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals over all rows; every mapping is in the order of first appearance."""

    tokens: int
    roles: Mapping[str, int]
    components: Mapping[str, Total]
    reasons: Mapping[str, int]
    largest_advantage: float
    """max |A| over finite advantages, the end of the colour scale; 0 where none is given."""
    signs: Mapping[str, str]
    """One sign per component, which is shown under each of its members."""
    letters: Mapping[str, str]
    """One letter per reason, which is shown under each token that has it."""


_SIGNS = "●▲■◆▼★✚✖"


def _signs(names: Sequence[str]) -> dict[str, str]:
    return {name: _SIGNS[i] if i < len(_SIGNS) else f"#{i}" for i, name in enumerate(names)}


def _letters(names: Sequence[str]) -> dict[str, str]:
    return {name: chr(ord("a") + i) if i < 26 else str(i) for i, name in enumerate(names)}


def summarize(rows: Sequence[TokenRow]) -> Summary:
    """Tokens per role and per reason, tokens and sum of weights per component, over ``rows``.

    Raises:
        DataError: there is no row.
    """
    if not rows:
        raise DataError("no token rows to show", expected="at least one TokenRow", got="none")
    roles: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    weights: dict[str, list[float]] = {}
    largest = 0.0
    for cell in (cell for row in rows for cell in row.tokens):
        roles[cell.role] += 1
        reasons.update([cell.reason] if cell.reason else [])
        for name, (member, weight) in cell.components.items():
            kept = weights.setdefault(name, [])
            kept += [weight] if member else []
        if cell.advantage is not None and math.isfinite(cell.advantage):
            largest = max(largest, abs(cell.advantage))
    return Summary(
        tokens=roles.total(),
        roles=dict(roles),
        components={name: Total(len(kept), sum(kept)) for name, kept in weights.items()},
        reasons=dict(reasons),
        largest_advantage=largest,
        signs=_signs(list(weights)),
        letters=_letters(list(reasons)),
    )


def by_prompt(rows: Sequence[TokenRow]) -> dict[str, dict[str, list[TokenRow]]]:
    """Rows under their prompt, then their episode; each level in the order of first appearance."""
    groups: dict[str, dict[str, list[TokenRow]]] = {}
    for row in rows:
        groups.setdefault(str(row.prompt), {}).setdefault(str(row.episode), []).append(row)
    return groups


def told(row: TokenRow) -> str:
    """A text: how many tokens of a row are trained, and whether all of them have advantage 0."""
    text = f"{row.trained} of {len(row.tokens)} tokens trained"
    return text if row.live or not row.trained else f"{text}, A = 0 on all of them"


def live_first(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """The rows, sorted: first those of prompts with a live row, live rows before others; else in their own order."""
    prompts = {str(row.prompt) for row in rows if row.live}
    return sorted(rows, key=lambda row: (str(row.prompt) not in prompts, not row.live))


def segments(row: TokenRow) -> Iterator[tuple[str, str, list[tuple[int, TokenCell]]]]:
    """Unbroken runs of one role and author: ``(role, author, [(position, cell), ...])``."""
    for (role, author), run in groupby(enumerate(row.tokens), lambda pair: (pair[1].role, pair[1].author)):
        yield role, author, list(run)


def membership(cell: TokenCell, summary: Summary) -> list[tuple[str, str]]:
    """The marks under a token: (signs, weight), where components of equal weight share one entry."""
    shared: dict[float, str] = {}
    for name, weight in cell.members.items():
        shared[weight] = shared.get(weight, "") + summary.signs[name]
    return [(signs, number(weight)) for weight, signs in shared.items()]


def number(value: float) -> str:
    """``value`` with three significant digits, in the shortest form: ``0.00312``, ``3.1e-5``, ``0``."""
    text = f"{value:.3g}".replace("-", "−")
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return text
    return f"{mantissa}e{'−' if exponent.startswith('−') else ''}{int(exponent.strip('+−'))}"


def signed(value: float) -> str:
    """An advantage as its sign and two decimals, or more where two would be zero; ``0`` for zero."""
    if not value:
        return "0"
    if abs(value) < 0.005:
        return ("+" if value > 0 else "−") + number(abs(value))
    return f"{value:+.2f}".replace("-", "−")
