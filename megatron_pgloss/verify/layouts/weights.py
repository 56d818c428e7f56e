"""Weights as a function of a parameter's global name and a seed, so that every layout starts from the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron_pgloss.verify.layouts.reshard import Placement, placements

_PADDING = 0.5
"""Value of padded vocabulary rows: so far from 0 that a loss which does not exclude these columns is visibly wrong."""


def deterministic_weights(
    chunks: torch.nn.Module | Sequence[torch.nn.Module], *, seed: int = 0, std: float | None = None
) -> None:
    """Set every parameter to its part of a full tensor made from (global name, seed) alone, in place.

    Matrices are normal with standard deviation ``1 / sqrt(fan_in)``, an untied embedding with deviation 1; norm weights
    are ``1 + 0.1 n`` and biases ``0.1 n`` with n standard normal. The logits of a small model then have a deviation of
    about one. Numbers are drawn in float64 and rounded to the parameter's dtype. There is no communication.

    Args:
        chunks: this rank's model or chunks, wrapped or not.
        seed: another seed gives another model (a reference model, say).
        std: standard deviation of all matrices, embedding included; None: the deviations above.
    """
    drawn: dict[str, torch.Tensor] = {}  # a tied weight comes twice where one rank holds both stages
    for place in placements(chunks):
        if place.name not in drawn:
            drawn[place.name] = full_tensor(place, seed=seed, std=std)
        with torch.no_grad():
            if sum(length for *_, length in place.pieces) < place.param.shape[place.dim]:
                place.param.data.fill_(_PADDING)
        place.write(drawn[place.name])


def full_tensor(place: Placement, *, seed: int = 0, std: float | None = None) -> torch.Tensor:
    """Draw the full float64 tensor of one parameter, on CPU."""
    digest = hashlib.blake2b(f"{seed}/{place.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    noise = torch.randn(place.full_shape, dtype=torch.float64, generator=generator)
    if len(place.full_shape) == 1:
        is_norm_weight = "norm" in place.name and place.name.endswith("weight")
        return 1.0 + 0.1 * noise if is_norm_weight else 0.1 * noise
    if std is not None:
        return std * noise
    if place.name.startswith("embedding.") and not place.tied:
        return noise
    return noise / place.full_shape[-1] ** 0.5
