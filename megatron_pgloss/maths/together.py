"""All statistics of a micro-batch in one collective: asked for one by one, taken over the ranks together.

A term is a plain function that asks for a statistic and goes on with it, so its first run cannot have the answer. It is
run twice: in the first run a statistic is a placeholder, and what it stands for is noted; then all that was noted is
taken over the ranks at once; in the second run the answers are there. What is computed from a placeholder is one
itself, so a statistic of a statistic waits for the next round: there are as many collectives as such a chain is long,
however many statistics there are. Every rank asks for the same ones in the same order: no term may decide by values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pgloss.maths.segments import Deferred, _SumOverRanks

T = TypeVar("T")
Op = Literal["sum", "max", "min"]
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__")
_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
_TAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


class NotDeferrable(Exception):
    """A term looks into a placeholder, or writes it into another tensor."""


class Placeholder(Tensor):
    """A statistic that is not known yet: this rank's part, and everything computed from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As for any tensor; the result is a placeholder."""
        name = getattr(func, "__name__", "")
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if name in _READS or (writes and not isinstance(args[0], Placeholder)):
            raise NotDeferrable(name)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """One gather, then each segment's own operation over the ranks; the gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, ops: Sequence[str], sizes: list[int]) -> Tensor:
        ctx.group = group
        out = part.new_empty(dist.get_world_size(group) * part.numel())
        dist.all_gather_into_tensor(out, part.contiguous(), group=group)
        pieces = out.reshape(-1, part.numel()).split(sizes, dim=1)
        return torch.cat([_TAKE[op](rows) for op, rows in zip(ops, pieces, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _SumOverRanks.backward(ctx, *grads)[0], None, None, None


class Together(Deferred):
    """Stands where `UnitSums` takes a process group, for one micro-batch; `rounds` drives it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._next = 0
        self._asked: dict[int, tuple[Tensor, Op]] = {}
        self._answers: dict[int, Tensor] = {}

    def ask(self, part: Tensor, op: Op) -> Tensor:
        """This rank's ``part`` taken over the ranks, or a placeholder of its shape."""
        place, self._next = self._next, self._next + 1
        if place in self._answers:
            return self._answers[place]
        if isinstance(part, Placeholder):
            return part
        self._asked[place] = (part, op)
        return part.detach().as_subclass(Placeholder)

    def settle(self) -> bool:
        """At the end of a round: True if it had every answer; else takes over the ranks what it asked for."""
        self._next = 0
        if not self._asked:
            return True
        parts, ops = [part for part, _ in self._asked.values()], [op for _, op in self._asked.values()]
        sizes = [part.numel() for part in parts]
        # In the widest dtype: a sum is none the worse for that.
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else parts[0].dtype
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        whole = (
            _SumOverRanks.apply(flat, self.group)
            if set(ops) == {"sum"}
            else _Gathered.apply(flat, self.group, ops, sizes)
        )
        pieces = whole.split(sizes)
        for place, part, op, piece in zip(self._asked, parts, ops, pieces, strict=True):
            answer = piece.to(part.dtype).reshape(part.shape)
            self._answers[place] = answer if op == "sum" else answer.detach()
        self._asked.clear()
        return False


def rounds(together: Together, run: Callable[[], T]) -> T:
    """What ``run`` returns once all its statistics are there; it is run once more than its longest chain of them.

    Raises:
        NotDeferrable: ``run`` cannot go on without a value.
    """
    while True:
        made = run()
        if together.settle():
            return made
