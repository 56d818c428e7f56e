"""FP8 scales: from the largest magnitude of a tensor, a row or a block to the factor that its elements are cast with.

Sources, Transformer Engine d0067d0d (2.20), below `common/`: `recipe/recipe_common.cuh`, compute_scale_from_amax;
`util/ptx_arch_spec.cuh`, float_to_e8m0; `util/ptx.cuh`, exp2f_rcp; `recipe/delayed_scaling.cu`.

Shapes: any; all arithmetic is float32, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite number of each format."""
FLOAT_MAX = torch.finfo(torch.float32).max

_MANTISSA, _FIELD = 23, 0xFF


def scale_of(amax: Tensor, fp8: torch.dtype, *, pow2: bool, for_inf: float = FLOAT_MAX, epsilon: float = 0.0) -> Tensor:
    """``fp8_max / amax``, the factor before the cast; float32 of amax's shape.

    Args:
        amax: float32, largest magnitude; below ``epsilon`` it is raised to that.
        fp8: the format.
        pow2: round down to a power of two, by clearing the bits of the mantissa.
        for_inf: in place of a quotient that no float32 holds.

    Returns:
        1 where amax is 0, infinite or NaN. (TE's own reference in Python gives 0 at an infinite one; its kernel 1.)
    """
    raised = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.div(torch.full_like(raised, FP8_MAX[fp8]), raised)  # `448.0 / t` is a reciprocal and a product
    scale = torch.where(scale.isinf(), for_inf, scale)
    if pow2:
        scale = (scale.contiguous().view(torch.int32) & -(1 << _MANTISSA)).view(torch.float32)
    return torch.where((raised == 0) | ~raised.isfinite(), 1.0, scale)


def e8m0_of(amax: Tensor, fp8: torch.dtype) -> Tensor:
    """MX's scale of a block: the biased exponent of ``amax / fp8_max`` rounded **up**, uint8.

    0 gives 0, infinity 254, NaN 255; the quotient is a product with the float32 nearest to 1 / fp8_max. torch's own
    cast to float8_e8m0fnu rounds to the nearest, and so can make a block overflow.
    """
    value = amax.float() * torch.tensor(1.0 / FP8_MAX[fp8], dtype=torch.float32, device=amax.device)
    bits = value.contiguous().view(torch.int32)
    exponent, mantissa = (bits >> _MANTISSA) & _FIELD, bits & ((1 << _MANTISSA) - 1)
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 1 << (_MANTISSA - 1)))
    found = torch.where(value.isinf(), 254, exponent + up.int())
    return torch.where(value.isnan(), 255, found).to(torch.uint8)


def power_of(biased: Tensor) -> Tensor:
    """``2^(biased - 127)`` of an e8m0 exponent, float32; NaN at 255."""
    return _power(biased.to(torch.int32), biased)


def reciprocal_power_of(biased: Tensor) -> Tensor:
    """``2^(127 - biased)``, float32; NaN at 255. Both ends are numbers: 2^127 and 2^-127."""
    return _power(254 - biased.to(torch.int32), biased)


def _power(exponent: Tensor, biased: Tensor) -> Tensor:
    """The float32 of a biased exponent: its field of bits, and 2^-127, which is below the normal numbers."""
    bits = torch.where(exponent == 0, 1 << (_MANTISSA - 1), exponent << _MANTISSA).to(torch.int32)
    return torch.where(biased == 255, torch.nan, bits.view(torch.float32))


def delayed_scale(
    history: Tensor, before: Tensor, fp8: torch.dtype, *, margin: int = 0, most_recent: bool = False
) -> tuple[Tensor, Tensor]:
    """The scale of the next call, and the history that it starts with, after a call with delayed scaling.

    Args:
        history: float32 [L]; entry 0 is the amax of the call that has just been, the others those before.
        before: float32 0-d, the scale of that call, kept where the history says nothing (0, infinite or NaN).
        margin: the scale leaves this many powers of two free.
        most_recent: read entry 0 alone, as Megatron does by default, not the largest of all.

    A call's own amax is in no scale of that call, so what is larger than the history saturates.
    """
    amax = history[0] if most_recent else torch.amax(history)
    scale = torch.div(torch.full_like(amax, FP8_MAX[fp8] * 2.0**-margin), amax)
    scale = torch.where(scale.isinf(), FLOAT_MAX, scale)
    scale = torch.where(amax.isfinite() & (amax > 0), scale, before)
    rolled = history.roll(-1)
    rolled[0] = 0
    return scale, rolled
