"""From a plan to token rows: all that the loss knows of every token of this rank's batch. `T` tokens, `S` rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError
from megatron_pgloss.planning import Plan
from megatron_pgloss.rollouts import Termination, TokenBatch
from megatron_pgloss.rules.masks import TAKEN, tokens_ended
from megatron_pgloss.spec.words import closed
from megatron_pgloss.view.cells import TokenCell, TokenRow


@closed
def rows_of_plan(
    plan: Plan,
    *,
    decode: Callable[[int], str] | None = None,
    facts: Mapping[str, Sequence[object]] | None = None,
) -> list[TokenRow]:
    """This rank's rows of a plan for `token_page`, `token_terminal` and `write_rows`.

    Args:
        plan: the plan of a step.
        decode: a function from a token's id to its text (``tokenizer.decode([id])``); by default the id is shown.
        facts: name to one entry per row, shown in the row's heading beside its termination: ``{"reward": rewards}``.

    Raises:
        DataError: the plan has no rows on this rank, or ``facts`` are for another number of rows.
    """
    batch = plan.batch
    if batch is None or plan.spec is None:
        raise DataError("the plan has no rows to show", expected="a plan of a loss, with rows on this rank")
    for name, entries in (facts or {}).items():
        if len(entries) != len(batch):
            raise DataError(f"facts[{name!r}] has the wrong length", expected=len(batch), got=len(entries))
    text = (lambda token: str(token)) if decode is None else decode
    described = _Described(plan, batch)
    found = []
    for row in range(len(batch)):
        start, end = int(batch.cu_S1[row]), int(batch.cu_S1[row + 1])
        # Position t is about the token after it, so no position describes a row's first token.
        cells = [TokenCell(text(int(batch.tokens_T[start])), "context", "unknown", {})] if end > start else []
        cells += [described.cell(at, text(int(batch.targets_T[at]))) for at in range(start, end - 1)]
        header = {} if batch.terminations is None else {"end": batch.terminations[row].value}
        header |= {name: str(entries[row]) for name, entries in (facts or {}).items()}
        ids = [None if given is None else str(given[row]) for given in (batch.prompt_ids, batch.episode_ids)]
        sample = batch.sample_name(row)
        found.append(TokenRow(sample, ids[0] or "no prompt ids", ids[1] or sample, header, tuple(cells)))
    return found


class _Described:
    """Streams of the plan as lists, so that a token costs no tensor operation."""

    def __init__(self, plan: Plan, batch: TokenBatch) -> None:
        self.batch, self.names = batch, list(plan.coef)
        self.member = {name: plan.components[name].member_T.tolist() for name in self.names}
        self.weight = {name: plan.components[name].weight_T.tolist() for name in self.names}
        self.action = batch.action_T.tolist()
        self.seen = batch.observation_T.tolist()
        self.labels = {name: codes_T.tolist() for name, codes_T in batch.labels.items()}
        streams = batch.streams
        self.advantage = streams["advantages"].tolist() if "advantages" in streams else None
        known = next((name for name in ("old", "rollout") if name in streams), None)
        self.logp = None if known is None else streams[known].tolist()
        self.why = _reasons(plan, batch)

    def cell(self, at: int, text: str) -> TokenCell:
        """The token predicted from position ``at``."""
        action = self.action[at]
        components = {name: (bool(self.member[name][at]), float(self.weight[name][at])) for name in self.names}
        role, author = self._who(at)
        return TokenCell(
            text, role, author, components,
            advantage=self.advantage[at] if action and self.advantage is not None else None,
            logprob=self.logp[at] if action and self.logp is not None else None,
            reason=self.why.get(at),
        )  # fmt: skip

    def _who(self, at: int) -> tuple[str, str]:
        if self.labels:
            words = self.batch.words
            return words[self.labels["role"][at]], words[self.labels["author"][at]]
        if self.action[at]:
            return "assistant", "policy"
        return ("environment", "environment") if self.seen[at] else ("context", "unknown")


def _reasons(plan: Plan, batch: TokenBatch) -> dict[int, str]:
    """Position to the reason why the token predicted there is trained by no component, although one runs over it."""
    assert plan.spec is not None
    member_T = torch.zeros_like(batch.action_T)
    for name in plan.coef:
        member_T = member_T | plan.components[name].member_T
    over = {"action": batch.action_T, "observation": batch.target_T}
    base_T = torch.zeros_like(member_T)
    for part in plan.spec.components:
        base_T = base_T | over[part.over]
    rules: list[tuple[str, Tensor]] = [("fault", tokens_ended(batch, Termination.FAULT))]
    rules += [(mask.reason, TAKEN[mask.kind](batch, mask)) for mask in plan.spec.masks]
    verdicts = plan.local.members.verdicts if plan.local.members is not None else []
    for rule, verdict in zip(plan.spec.corrections, verdicts, strict=False):
        if verdict is not None and verdict.passes is not None:
            rules.append((rule.reason, ~verdict.passes))
    left_T = base_T & ~member_T
    found: dict[int, str] = {}
    for reason, taken_T in rules:
        for at in (left_T & taken_T).nonzero().flatten().tolist():
            found.setdefault(at, reason)
    return found
