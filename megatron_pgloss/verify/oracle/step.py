"""The oracle's view of a step: a user's rows laid end to end, in token order, without any shift.

Shapes: T all tokens of all rows, first tokens included; M the members of one component.
Index t of every stream is about token t itself; the first token of a row is never a target.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError, SpecError

Row = Mapping[str, Any]
LEVELS = ("prompt", "episode", "sequence", "turn", "token")
DEFAULT_BOUND = 20.0


def setting(table: Mapping[str, Any], key: str, default: Any) -> Any:
    """Value of ``key``; ``default`` where the key is missing or None."""
    value = table.get(key)
    return default if value is None else value


def choice(value: Any, allowed: Sequence[str], what: str) -> str:
    """``value`` if it is one of ``allowed``, or raise SpecError: the oracle guesses nothing."""
    if value not in allowed:
        raise SpecError(f"the oracle knows no such {what}", expected=list(allowed), got=repr(value))
    return str(value)


@dataclass(frozen=True)
class Step:
    """All rows of one optimizer step as flat lists and tensors.

    Attributes:
        rows: the user's rows, unchanged.
        where: per token the pair (row, index in the row).
        target_T: bool [T], every token but the first of its row.
        present_T: bool [T], False on rows that broke (termination "fault") or that the spec excludes as a whole.
    """

    rows: Sequence[Row]
    where: list[tuple[int, int]]
    target_T: Tensor
    present_T: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Step:
        """Lay ``rows`` end to end; all of them are present but those that an infrastructure fault ended."""
        where = [(i, k) for i, row in enumerate(rows) for k in range(len(row["tokens"]))]
        target = torch.tensor([k > 0 for _, k in where], dtype=torch.bool)
        present = torch.tensor([rows[i].get("termination") != "fault" for i, _ in where], dtype=torch.bool)
        return cls(rows, where, target, present)

    def laid_out(self, what: str, pick: Callable[[Row], Any], absent: float | bool) -> Tensor:
        """Float64 or bool [T] of what ``pick`` finds in each row, ``absent`` where that is None."""
        dtype = torch.bool if isinstance(absent, bool) else torch.float64
        parts = [torch.zeros(0, dtype=dtype)]
        for i, row in enumerate(self.rows):
            length, value = len(row["tokens"]), pick(row)
            part = torch.as_tensor(absent if value is None else value, dtype=dtype).detach()
            part = part.expand(length) if part.dim() == 0 else part
            if part.shape != (length,):
                raise DataError(
                    f"{what} is not aligned with the tokens",
                    expected=(length,),
                    got=tuple(part.shape),
                    where=f"row {i}",
                )
            parts.append(part)
        return torch.cat(parts)

    def flags(self, key: str) -> Tensor:
        """Bool [T] of the targets flagged ``action`` or ``observation``; ``all``: every target."""
        if key == "all":
            return self.target_T
        return self.laid_out(key, lambda row: row.get(key), False) & self.target_T

    def user_mask(self, name: str) -> Tensor:
        """Bool [T] of the targets for which the user's mask ``name`` is True."""
        for i, row in enumerate(self.rows):
            if len(row["tokens"]) and (row.get("masks") or {}).get(name) is None:
                raise DataError(f"the spec reads the mask {name!r}, the data has none", where=f"row {i}")
        flag_T = self.laid_out(name, lambda row: (row.get("masks") or {}).get(name), False)
        return flag_T & self.target_T

    def weights(self, component: str) -> Tensor:
        """Float64 [T], the user weights of ``component``; 1 where none were given."""
        return self.laid_out(f"weights of {component}", lambda row: (row.get("weights") or {}).get(component), 1.0)

    def stream(self, key: str) -> Tensor:
        """Float64 [T], NaN where a row has none: ``old``, ``rollout``, ``ref``, ``advantages``, ``values``,
        ``returns``, ``version``, or a stream of the user's own, under ``streams``.
        """
        return self.laid_out(key, lambda row: row.get(key, (row.get("streams") or {}).get(key)), float("nan"))

    def finite(self, value_M: Tensor, index_M: Tensor, what: str) -> Tensor:
        """``value_M`` itself, or DataError naming the first member that has no finite value."""
        bad = (~torch.isfinite(value_M.detach())).nonzero()
        if len(bad):
            first = int(bad[0])
            row, k = self.where[int(index_M[first])]
            raise DataError(
                f"{what} is missing or not finite inside a component",
                expected="a finite number",
                got=float(value_M[first]),
                where=f"row {row}, token {k}",
            )
        return value_M

    def has_ids(self, level: str) -> bool:
        """Whether every row has the ids of ``level``; the levels below episode need none."""
        return all(level not in ("prompt", "episode") or r.get(level) is not None for r in self.rows)

    def keys(self, level: str) -> list[Hashable | None]:
        """Per token the key of its unit at ``level``, ids from prompt down; None if in no turn.

        DataError if the level's ids were not given.
        """
        if level == "sequence":
            return [row for row, _ in self.where]
        if level == "turn":
            turns = [turn_ids(row) for row in self.rows]
            return [None if turns[i][k] < 0 else (i, turns[i][k]) for i, k in self.where]
        if level == "token":
            return list(self.where)
        missing = [i for i, row in enumerate(self.rows) if row.get(level) is None and len(row["tokens"])]
        if missing:
            raise DataError(
                f"the spec names {level!r}, whose ids were not given",
                where=f"row {missing[0]}",
                fix=f"give every row a {level} id",
            )
        rows = [self.rows[i] for i, _ in self.where]
        return [r["prompt"] if level == "prompt" else (r.get("prompt"), r["episode"]) for r in rows]

    def units(self, unit: str, keep_T: Tensor) -> list[tuple[list[int], list[int]]]:
        """The units, each as (its tokens that ``keep_T`` flags, all its tokens), both in order.

        In a prompt or an episode a row that is not there has no say about the others: none of its tokens is flagged.
        """
        found: dict[Hashable, tuple[list[int], list[int]]] = {}
        flags = (keep_T & self.present_T if unit in ("prompt", "episode") else keep_T).tolist()
        for t, key in enumerate(self.keys(unit)):
            if key is None:
                continue
            kept, whole = found.setdefault(key, ([], []))
            whole.append(t)
            if flags[t]:
                kept.append(t)
        return list(found.values())

    def split(self, value_T: Tensor) -> list[Tensor]:
        """Cut a [T] stream back into one tensor per row."""
        return list(value_T.split([len(row["tokens"]) for row in self.rows])) if self.rows else []


def turn_ids(row: Row) -> list[int]:
    """Turn of each token of a row, -1 for none: the ids given, or counted from the action flags.

    A turn is one unbroken run of action tokens, as sampled, and what follows until the next run.
    """
    given = row.get("turn")
    if given is not None:
        if len(given) != len(row["tokens"]):
            raise DataError(
                "turn ids are not aligned with the tokens",
                expected=len(row["tokens"]),
                got=len(given),
            )
        return [int(turn) for turn in given]
    turn, before, ids = -1, False, []
    for sampled in row["action"]:
        turn += bool(sampled) and not before
        before = bool(sampled)
        ids.append(turn)
    return ids
