"""Rows written as strings of letters, and short functions that ask the oracle, for the oracle's own tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_pgloss.verify.oracle import oracle_loss

NAN = float("nan")
REINFORCE = {"kind": "policy_gradient", "surrogate": {"kind": "reinforce"}}
CLIP = {"kind": "policy_gradient", "surrogate": {"kind": "clip", "low": 0.2, "high": 0.28}}
CE = {"kind": "cross_entropy"}


def row(action: str, **more: Any) -> dict[str, Any]:
    """A row from a string with one letter per token: "A" action, "o" observation, any other letter context."""
    flags = {
        "tokens": [0] * len(action),
        "action": [c == "A" for c in action],
        "observation": [c == "o" for c in action],
        "advantages": 1.0,
    }
    return flags | more


def leaves(rows: list[dict[str, Any]], value: float = -1.0) -> list[Tensor]:
    """One log-prob leaf per row."""
    return [torch.full((len(r["tokens"]),), value, dtype=torch.float64, requires_grad=True) for r in rows]


def leaf(*values: float) -> list[Tensor]:
    """The log-probs of a single row."""
    return [torch.tensor(values, dtype=torch.float64, requires_grad=True)]


def run(rows: list[dict[str, Any]], *components: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """The oracle's answer, with ``grads``: of the loss by each row's log-probs."""
    logp = spec.pop("logp", None) or leaves(rows)
    entropies, coef, version = spec.pop("entropies", None), spec.pop("coef", None), spec.pop("version", None)
    result = oracle_loss(logp, entropies, rows, spec | {"components": list(components)}, coef, version=version)
    result["loss"].backward()
    return result | {"grads": [torch.zeros_like(x) if x.grad is None else x.grad for x in logp]}


def weights(rows: list[dict[str, Any]], normalizer: str, **component: Any) -> list[list[float]]:
    """The weights under one normaliser, per row over the tokens that have one."""
    part = REINFORCE | component | {"normalizer": normalizer, "name": "x"}
    found = oracle_loss(leaves(rows), None, rows, {"components": [part]})["weights"]["x"]
    return [[w for w in each.tolist() if w] for each in found]


def flat(nested: list[list[float]]) -> list[float]:
    """One list of the numbers of all rows."""
    return [number for each in nested for number in each]


def near(got: Any, expected: Any) -> None:
    """Equal to float64 rounding."""
    got = got.detach() if isinstance(got, Tensor) else torch.tensor(got, dtype=torch.float64)
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-15)
