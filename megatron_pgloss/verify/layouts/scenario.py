"""`Scenario`: sizes of the parallel dimensions, how the model is wrapped, and how the rows lie on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_pgloss.planning import Split
from megatron_pgloss.verify.data.rows import VOCAB

EXPERTS = 4
"""Experts of a mixture-of-experts model of the harness; two are chosen for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The model and rows that a layout is compared on. The oracle answers once for each `Data`."""

    kind: str = "gpt"
    tied: bool = False
    temperature: bool = False
    vocab: int = VOCAB
    experts: int = 0
    layers: int = 2
    tail: bool = False


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One layout, the model on it, and how the data lies on its ranks.

    The data-parallel size is ``world / (tp * pp * cp)``.
    """

    world: int | None = None
    """Number of processes; None: all that there are."""
    tp: int = 1
    sp: bool = False
    """Sequence parallelism."""
    pp: int = 1
    vpp: int | None = None
    """Virtual stages per pipeline stage."""
    cp: int = 1
    ep: int = 1
    split: Split = field(default_factory=lambda: Split(sequences=3))
    per_token: bool = False
    """``calculate_per_token_loss``."""
    distributed_optimizer: bool = False
    overlap: bool = False
    """``overlap_grad_reduce``, in several buckets."""
    average: bool = False
    """``average_in_collective``."""
    recompute: str | None = None
    variable_lengths: bool = False
    """``variable_seq_lengths``."""
    head: str = "given"
    """``head`` of `PolicyLossStep`: ``given`` takes log-probs from the model's logits, all others use the fused head.
    """
    own: str = ""
    """``moe`` or ``mtp``: compare a loss that Megatron itself adds instead of the policy loss
    (`megatron_pgloss.verify.run.visit_own`)."""
    loss_scale: float = 1.0
    """Loss scale as fp16 training has it, set by ``config.grad_scale_func``."""
    collection: bool = False
    """The step and the schedule get their process groups as a ``pg_collection``."""
    kind: str = "gpt"
    """Kind of model, ``gpt`` or ``hybrid`` (`megatron_pgloss.verify.layouts.models`)."""
    tied: bool = False
    """The output layer shares the embedding's weight."""
    experts: int = 0
    """Number of experts; 0: a dense model."""
    layers: int | None = None
    """Number of layers; None: one for each stage, but at least two."""
    vocab: int = VOCAB
    """The tokenizer's vocabulary; the model's is this rounded up to a multiple of ``tp``."""
    temperature: bool = False
    """Every token has a sampling temperature of its own."""
    tail: bool = False
    """Rows whose actions are their last tokens, so that some context-parallel ranks hold no member."""
    shuffle: int = 0
    """Seed of a random order of each rank's rows, which changes the packing; 0: the order in which rows are made."""
    empty_rank: bool = False
    """The last data-parallel rank has no rows."""
    alone: bool = False
    """The first data-parallel rank has all rows."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the model's config (`megatron_pgloss.verify.layouts.models.ModelConfig`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `PolicyLossStep`."""

    @property
    def packed(self) -> bool:
        """Whether rows are packed (thd) instead of padded (bshd)."""
        return self.split.packed

    @property
    def model_ranks(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int | None:
        """Data-parallel size, without context parallelism; None where ``world`` is None."""
        return None if self.world is None else self.world // self.model_ranks

    @property
    def depth(self) -> int:
        """The model's number of layers."""
        return self.layers or max(2, self.pp * (self.vpp or 1))

    @property
    def data(self) -> Data:
        """The model and rows that this layout is compared on."""
        return Data(
            kind=self.kind, tied=self.tied, temperature=self.temperature, vocab=self.vocab, experts=self.experts,
            layers=self.depth, tail=self.tail,
        )  # fmt: skip

    @property
    def ranks_key(self) -> tuple[Any, ...]:
        """(tp, sp, pp, vpp, cp, format, ep, dp, distributed optimizer): two layouts of ranks differ if one of these
        does.
        """
        form = "thd" if self.packed else "bshd"
        optimizer = self.distributed_optimizer
        return self.tp, self.sp, self.pp, self.vpp or 1, self.cp, form, self.ep, self.dp, optimizer

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The model axes (tp, pp, cp, ep) whose size is above 1."""
        return tuple(axis for axis in ("tp", "pp", "cp", "ep") if getattr(self, axis) > 1)

    @property
    def config(self) -> dict[str, Any]:
        """Fields of the model's `ModelConfig`."""
        fields: dict[str, Any] = dict(
            vocab_size=self.vocab, seq_length=64, layers=self.depth, per_token_loss=self.per_token
        )
        fields |= {"sequence_parallel": True} if self.sp else {}
        fields |= {"distributed_optimizer": True} if self.distributed_optimizer else {}
        fields |= dict(overlap_grad_reduce=True, bucket_size=2000) if self.overlap else {}
        fields |= {"average_in_collective": True} if self.average else {}
        fields |= {"variable_seq_lengths": True} if self.variable_lengths else {}
        fields |= {"recompute": self.recompute} if self.recompute else {}
        fields |= {"tied": True} if self.tied else {}
        fields |= dict(experts=self.experts, topk=2) if self.experts else {}
        fields |= dict(moe_aux_coeff=0.1, moe_z_coeff=0.01) if self.own == "moe" else {}
        # Two prediction layers: the input of the second depends on the first.
        fields |= {"extra": dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.3)} if self.own == "mtp" else {}
        return fields | dict(self.model)

    @property
    def step_options(self) -> dict[str, Any]:
        """Options of `PolicyLossStep`."""
        options: dict[str, Any] = {"vocab_size": self.vocab} if self.vocab != VOCAB else {}
        # What is compared is what Megatron does with rows of several lengths: it routes their padding.
        options |= {"allow_routed_padding": True} if self.own == "moe" else {}
        return options | ({"head": self.head} if self.head != "given" else {}) | dict(self.options)

    @property
    def name(self) -> str:
        """The name in tables: every axis above 1, and every other setting that is not the default."""
        axes = ["tp", "pp", "vpp", "cp", "ep"]
        words = [f"{axis}{getattr(self, axis)}" for axis in axes if (getattr(self, axis) or 1) > 1]
        words += ["sp"] if self.sp else []
        words += [f"dp{self.dp}"] if self.dp is not None else []
        split = self.split
        if split.packed:
            words.append(f"packed {split.max_tokens}")
        else:
            words.append(f"{split.sequences} rows" if split.sequences else f"{split.microbatches} micro-batches")
        words += [self.kind] if self.kind != "gpt" else []
        words += [f"{self.experts} experts"] if self.experts else []
        words += [{"moe": "auxiliary and z-loss", "mtp": "multi-token prediction"}[self.own]] if self.own else []
        words += [f"fused head {self.head}"] if self.head != "given" else []
        words += [f"recompute {self.recompute}"] if self.recompute else []
        words += [f"vocabulary {self.vocab}"] if self.vocab != VOCAB else []
        words += [f"loss scale {self.loss_scale:g}"] if self.loss_scale != 1 else []
        flags = {
            "per_token": "per-token", "distributed_optimizer": "distributed optimizer", "overlap": "overlap",
            "average": "average in collective", "variable_lengths": "variable lengths", "collection": "pg_collection",
            "tied": "tied", "temperature": "temperature", "tail": "ranks without members", "shuffle": "shuffled",
            "empty_rank": "a rank empty", "alone": "all rows on one rank",
        }  # fmt: skip
        words += [text for name, text in flags.items() if getattr(self, name)]
        words += [f"{key} {value}" for key, value in sorted(self.model.items())]
        return ", ".join(words)
