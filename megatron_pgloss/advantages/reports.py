"""The reports that the functions of advantages return; they are the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pgloss.rollouts import Id

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentGroup:
    """A group whose advantages are all 0."""

    prompt: Id
    episodes: int
    voters: int
    reason: str

    def __str__(self) -> str:
        return f"prompt {self.prompt!r}: {self.reason} ({self.voters} of {self.episodes} episodes vote)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Counts of groups, episodes and voters over all ranks."""

    groups: int
    episodes: int
    voters: int
    silent: tuple[SilentGroup, ...]
    """Groups whose advantages are all 0, in the order of their prompts' first rows."""

    def __str__(self) -> str:
        lines = [
            f"{self.groups} groups, {self.episodes} episodes, {self.voters} vote; "
            f"{len(self.silent)} groups are silent (advantage 0)"
        ]
        lines += [f"  {group}" for group in self.silent[:_SHOWN]]
        if len(self.silent) > _SHOWN:
            lines.append(f"  and {len(self.silent) - _SHOWN} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class GAEReport:
    """Counts of episodes by what followed their last action, over all ranks."""

    episodes: int
    bootstrapped: int
    """Truncated episodes that were continued with the value of their last state."""
    left: int
    """Episodes with an infrastructure fault: their advantages and returns are 0."""
    empty: int
    """Episodes without an action token."""

    def __str__(self) -> str:
        return (
            f"{self.episodes} episodes: {self.bootstrapped} truncated ones go on with V(last), "
            f"{self.left} left by a fault, {self.empty} without an action"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of what was whitened, tokens or sequences, before whitening, over all ranks."""

    count: int
    mean: float
    std: float
    """Standard deviation with ``n - 1``; 0 if there are fewer than two tokens or all are equal, and then nothing was
    divided."""

    def __str__(self) -> str:
        return f"{self.count} numbers, mean {self.mean:g}, standard deviation {self.std:g}"
