"""The oracle's kept sets: logits with -inf wherever the sampler could not draw, by sorting each token's row.

A row's ``sampler`` holds lists ``top_k``, ``top_p``, ``min_p`` (entry i is about token i); ``wide["kept"]`` holds
recorded ids, -1 for none. Only sampled tokens have a set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.verify.oracle.step import Row, choice, setting


def on_kept_sets(logits: Tensor, row: Row, kept: Mapping[str, Any]) -> Tensor:
    """[L, V] logits, position i - 1 predicting token i, with -inf outside the set of token i.

    A sampled token that is not in its set joins it (``outside="add"``, the only rule the oracle knows).
    """
    choice(kept["outside"], ["add"], "rule for tokens outside their sets")
    source = choice(kept["source"], ["recorded", "recomputed"], "source of kept sets")
    length = len(row["tokens"])
    tau = torch.as_tensor(setting(row, "temperature", 1.0), dtype=torch.float64).expand(length).tolist()
    rows = []
    for i in range(length):
        z_V = logits[i]
        if i + 1 < length and row["action"][i + 1]:
            found = _recorded(z_V, row, i + 1) if source == "recorded" else _sorted(
                (z_V.detach() / tau[i + 1]).tolist(), row, i + 1, kept["top_p_of"]
            )  # fmt: skip
            keep = {*found, row["tokens"][i + 1]}
            z_V = torch.where(torch.tensor([v in keep for v in range(len(z_V))]), z_V, -math.inf)
        rows.append(z_V)
    return torch.stack(rows)


def _recorded(z_V: Tensor, row: Row, i: int) -> list[int]:
    ids = [v for v in row["wide"]["kept"][i] if v >= 0]
    return ids if ids else list(range(len(z_V)))


def _sorted(u: list[float], row: Row, i: int, top_p_of: str) -> list[int]:
    """The ids that top-k, top-p and min-p leave, ties kept, from the likeliest down."""
    k, p, m = (row["sampler"][name][i] for name in ("top_k", "top_p", "min_p"))
    order = sorted(range(len(u)), key=lambda v: -u[v])
    likely = {v for v in order if m <= 0 or u[v] >= u[order[0]] + math.log(m)}
    left = [v for v in order if k <= 0 or u[v] >= u[order[min(k, len(u)) - 1]]]
    if p < 1:
        choice(top_p_of, ["top_k", "top_k_min_p", "all"], "base of top-p")
        base = {"top_k": left, "top_k_min_p": [v for v in left if v in likely], "all": order}[top_p_of]
        weight = {v: math.exp(u[v] - u[order[0]]) for v in base}
        total = math.fsum(weight.values())
        left = [v for v in left if math.fsum(w for x, w in weight.items() if u[x] > u[v]) / total < p]
    return [v for v in left if v in likely]
