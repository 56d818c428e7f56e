"""Value heads: [H -> 1] in place of the output layer or beside it.

Shapes: `b` rows and `s` positions of this rank's shard of a micro-batch, `H` hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_pgloss.spec.words import closed


@closed
class ValueHead(torch.nn.Linear):
    """One number per position, ``V = h . w + b`` of its hidden state: a model's output layer, or a second one.

    The weight is small and every tensor-parallel rank holds it whole. Under sequence parallelism each rank computes its
    own positions, and they are gathered: the loss is the same on every tensor-parallel rank, so what comes back is cut,
    not summed, and the weight's gradient is summed by Megatron's ``finalize_model_grads``.

    Args:
        config: the model's TransformerConfig.
        bias: add b.
        tp_group: tensor-parallel group; None: parallel_state's.

    Put it in before the model is wrapped: ``if model.post_process: model.output_layer = ValueHead(model.config)``, on a
    model built with ``share_embeddings_and_output_weights=False``.
    """

    def __init__(self, config: Any, *, bias: bool = False, tp_group: Any = None) -> None:
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        super().__init__(config.hidden_size, 1, bias=bias, dtype=config.params_dtype, device=device)
        self.sequence_parallel = bool(config.sequence_parallel)
        self._group = tp_group
        # Outside Megatron's tensor-parallel random state: every tensor-parallel rank draws the same.
        config.init_method(self.weight)
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """Values of hidden states ``[s, b, H]`` (``s/tp`` of them under sequence parallelism).

        Args:
            args, kwargs: Megatron's further arguments for an output layer; they are not read.

        Returns:
            ``([s, b, 1], None)``, float32 (float64), equal on all tensor-parallel ranks.
        """
        value = super().forward(hidden)
        value = value if value.dtype == torch.float64 else value.float()
        if self.sequence_parallel:
            value = gather_from_sequence_parallel_region(value, tensor_parallel_output_grad=False, group=self._group)
        return value, None
