"""RMSNorm and LayerNorm that mark their parameters for sequence parallelism, which torch's own wrapper refuses."""

from __future__ import annotations

from typing import Any

import torch

from megatron_pgloss.errors import UnsupportedError


class Norm(torch.nn.Module):
    """``config.normalization`` over the last dimension; half precision is computed in float32.

    RMSNorm: ``x / sqrt(mean(x^2) + eps) * weight``. LayerNorm: ``(x - mean) / sqrt(var + eps) * weight + bias``.
    Under sequence parallelism each tensor-parallel rank sees other tokens, so its parameter gradients are partial;
    ``param.sequence_parallel`` makes ``finalize_model_grads`` sum them over the ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise UnsupportedError(
                "this norm is not offered on CPU", expected="RMSNorm or LayerNorm", got=config.normalization
            )
        if config.layernorm_zero_centered_gamma:
            raise UnsupportedError("layernorm_zero_centered_gamma is not offered on CPU", expected=False, got=True)
        self.eps = eps
        self.rms = config.normalization == "RMSNorm"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        params = [self.weight]
        if self.rms:
            self.register_parameter("bias", None)
        else:
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            params.append(self.bias)
        for param in params:
            param.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., hidden] -> the same shape and dtype."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if not self.rms:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        out = wide * self.weight.to(wide.dtype)
        if self.bias is not None:
            out = out + self.bias.to(wide.dtype)
        return out.to(x.dtype)
