"""Two rollouts that show what a normaliser does, by the weights of a real plan instead of a second formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_pgloss.planning import Split, plan
from megatron_pgloss.rollouts import TokenBatch
from megatron_pgloss.rollouts.streams import BY_NAME
from megatron_pgloss.spec import LossSpec

LENGTHS = (100, 1000)
"""Policy tokens of the two rollouts; advantages +1 and -1."""
_OBSERVED = (20, 50)
TEXT = (
    "two rollouts of one prompt, 100 tokens with A = +1 and 1000 tokens with A = -1,\n"
    "each in two turns with 20 and 50 observation tokens between; pi = old = mu = ref.\n"
    "For a token: coefficient times weight, the largest where a rollout's tokens differ."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The weights that a component gives one rollout."""

    token: float
    """Coefficient times weight of one of its tokens; the largest where they differ."""
    total: float
    """Coefficient times weight, summed over all its tokens."""
    tokens: int


def batch_for(spec: LossSpec) -> TokenBatch:
    """The two rollouts, with every stream, mask and weight that ``spec`` reads."""
    action, observation = [], []
    for acted, seen in zip(LENGTHS, _OBSERVED, strict=True):
        first = acted * 3 // 5
        action += [False] + [True] * first + [False] * seen + [True] * (acted - first)
        observation += [False] * (1 + first) + [True] * seen + [False] * (acted - first)
    total = len(action)
    minus = torch.full((total,), -1.0)
    read = [BY_NAME[name].argument for name in spec.readers if name in BY_NAME and name != "advantages"]
    given: dict[str, Any] = dict.fromkeys(read, minus)
    own = {name: torch.zeros(total) for name in spec.readers if name not in BY_NAME}
    weighted = [part.name for part in spec.components if part.divide_by == "weights"]
    return TokenBatch.from_packed(
        tokens=torch.zeros(total, dtype=torch.int64),
        lengths=[1 + acted + seen for acted, seen in zip(LENGTHS, _OBSERVED, strict=True)],
        action_mask=torch.tensor(action),
        observation_mask=torch.tensor(observation),
        advantages=torch.tensor([1.0, -1.0]),
        prompt_ids=[0, 0],
        episode_ids=[0, 1],
        sample_ids=["short", "long"],
        terminations=["success", "success"],
        masks={name: torch.ones(total, dtype=torch.bool) for name in sorted(spec.masks_read)},
        weights={name: torch.ones(total) for name in weighted},
        **given,
        streams=own,
        versions=0 if spec.version_readers else None,
    )


def shares(spec: LossSpec) -> dict[str, tuple[Share, Share]]:
    """Component to its share in each rollout, coefficient included."""
    batch = batch_for(spec)
    made = plan([batch], spec, split=Split(microbatches=1), group="local", version=0 if spec.version_readers else None)
    found = {}
    for part in spec.components:
        weight_T = made.components[part.name].weight_T.double() * made.coef[part.name]
        member_T = made.components[part.name].member_T
        rows = []
        for row in range(len(batch)):
            here_T = member_T & (batch.seq_T == row)
            picked = weight_T[here_T]
            largest = float(picked.max()) if picked.numel() else 0.0
            rows.append(Share(token=largest, total=float(picked.sum()), tokens=picked.numel()))
        found[part.name] = (rows[0], rows[1])
    return found
