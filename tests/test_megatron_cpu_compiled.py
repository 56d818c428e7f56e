"""What makes Megatron-Core run on CPU leaves torch.compile its work: the compiled log-probs run in the same process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_pgloss as pg
from megatron_pgloss.logprobs.rows.backends import backend_problem
from support.worlds import world_fixture

PROBLEM = backend_problem("compiled")


def compiled(rank: int, world: int) -> list[tuple[torch.Tensor, ...]]:
    """Log-prob, entropy and gradient, by each backend, after `enable_cpu`."""
    from megatron_pgloss.megatron.cpu import enable_cpu

    enable_cpu()
    z = torch.randn(5, 301, generator=torch.Generator().manual_seed(2))
    found = []
    for backend in ("compiled", "eager"):
        logits = z.clone().requires_grad_()
        out = pg.token_logprobs(logits, torch.arange(5), entropy=True, backend=backend)
        (out.logprob + out.entropy).sum().backward()
        found.append((out.logprob.detach(), out.entropy.detach(), logits.grad))
    return found


if PROBLEM is None:
    found = world_fixture(compiled, 1)


@pytest.mark.multiproc
@pytest.mark.skipif(PROBLEM is not None, reason=f"the compiled backend cannot run here: {PROBLEM}")
def test_compiled_log_probs_run_where_megatron_was_made_to_run_on_cpu(found: Any) -> None:
    for one, other in zip(*found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
