"""The oracle's answers, one for each data set and spec, computed when first needed, by one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_pgloss.spec import LossSpec
from megatron_pgloss.verify.data.batches import rounded, rows_of_step
from megatron_pgloss.verify.data.rows import VOCAB, Row
from megatron_pgloss.verify.layouts.models import init_parallel
from megatron_pgloss.verify.layouts.reshard import placements
from megatron_pgloss.verify.layouts.scenario import Data
from megatron_pgloss.verify.layouts.weights import deterministic_weights
from megatron_pgloss.verify.run.drive import BUILDERS, WEIGHT_SEED, leave

Answer = tuple[float, dict[str, torch.Tensor], dict[str, Any]]
"""Loss, gradients by global name, and the oracle's other numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The precision of the models under test, and the errors that it allows."""

    name: str
    dtype: torch.dtype
    """Dtype of parameters and activations."""
    tolerance: float
    """Largest error of the loss, a parameter or a metric. In half precision it is a multiple instead: of the error of
    the same model in one process."""

    @property
    def half(self) -> bool:
        """Whether errors are compared with those of the same model in one process."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def layers(self) -> str:
        """``layer_spec`` of the models under test: the same plain layers on all layouts, or in half precision a job's
        own.
        """
        return "auto" if self.half else "own"

    @property
    def streams(self) -> torch.dtype:
        """Dtype of log-probs, advantages and weights as they are handed over."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32


PRECISIONS = {
    one.name: one
    for one in (
        Precision(name="float64", dtype=torch.float64, tolerance=1e-10),
        Precision(name="float32", dtype=torch.float32, tolerance=1e-5),
        Precision(name="bf16", dtype=torch.bfloat16, tolerance=2.0),
    )
}
FLOAT64 = PRECISIONS["float64"]


def oracle_model(kind: str = "gpt", dtype: torch.dtype = torch.float64, **fields: Any) -> tuple[Any, Any]:
    """Build the whole model in this process, and a function from tokens to logits, both float64. A collective.

    Args:
        kind: a key of `megatron_pgloss.verify.run.drive.BUILDERS`.
        dtype: the dtype of the weights under test; the float64 model gets the values rounded to it.
        fields: fields of the model's config; the default number of layers is a `Scenario`'s without virtual stages.
    """
    init_parallel()
    chunks = BUILDERS[kind](**(dict(vocab_size=VOCAB, seq_length=64, layers=2, layer_spec="own") | fields))
    deterministic_weights(chunks, seed=WEIGHT_SEED)
    model: Any = chunks[0]
    if dtype is not torch.float64:
        for param in model.parameters():
            param.data.copy_(param.data.to(dtype))
    device = next(model.parameters()).device

    def model_fn(tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=device)[None]
        return model.module(tokens.to(device), positions, None).cpu()

    return chunks, model_fn


def oracle_answer(chunks: Any, model_fn: Any, rows: Sequence[Row], spec: LossSpec) -> Answer:
    """Ask the oracle for the loss, and the gradients of all parameters of the model in this process."""
    from megatron_pgloss.verify.oracle import oracle_step

    answer = oracle_step(model_fn, rows, plain(spec))
    params = [p for p in chunks[0].module.parameters() if p.requires_grad]
    grads = torch.autograd.grad(answer["loss"], params)
    by_param = dict(zip(params, grads, strict=True))
    named = {place.name: by_param[place.param].to("cpu", torch.float64) for place in placements(chunks)}
    return float(answer["loss"]), named, answer


def plain(spec: LossSpec) -> dict[str, Any]:
    """The spec as the oracle reads it: plain data, except for the functions of a user's own terms."""
    data = spec.to_dict()
    components: Sequence[Any] = spec.components
    for part, given in zip(data["components"], components, strict=True):
        if part["kind"] == "term":
            part["fn"] = given.fn
    return data


class Judge:
    """The oracle's answers for the specs of one run.

    Args:
        specs: name to spec, or to a function that builds it.
        precision: the precision of the layouts under test. The oracle itself is always float64, on their rounded
            weights and streams.
        ask: the function that asks the oracle, with the signature of `oracle_answer`.
    """

    def __init__(
        self,
        specs: Mapping[str, LossSpec | Callable[[], LossSpec]],
        precision: Precision = FLOAT64,
        ask: Callable[[Any, Any, Sequence[Row], LossSpec], Answer] = oracle_answer,
    ) -> None:
        self.precision = precision
        self._ask = ask
        self.specs = {name: made if isinstance(made, LossSpec) else made() for name, made in specs.items()}
        self._rows: dict[Data, list[Row]] = {}
        self._answers: dict[tuple[Data, str], Answer] = {}
        self.alone: dict[tuple[Data, str], tuple[float, float, float]] = {}
        """Errors of the half-precision model in one process: of loss, worst parameter and whole gradient."""

    def prepare(self, data: Data, names: Iterable[str] | None = None) -> None:
        """Have specs answered for one data set. A collective: the first rank asks the oracle and sends its answers to
        all.

        Args:
            data: the model and rows.
            names: names of the specs; None: all. Specs that are answered already are not asked again.
        """
        missing = [name for name in (names or self.specs) if (data, name) not in self._answers]
        if not missing:
            return
        fields: dict[str, Any] = dict(tied=data.tied, vocab_size=data.vocab, layers=data.layers)
        fields |= dict(experts=data.experts, topk=2) if data.experts else {}
        chunks, model_fn = oracle_model(data.kind, self.precision.dtype, **fields)
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            rows = rows_of_step(
                0,
                model_fn,
                tail=data.tail,
                **({} if data.tail else dict(vocab=data.vocab, temperature=data.temperature)),
            )
            rows = rounded(rows, self.precision.streams)
            answers = {
                name: _sendable(self._ask(chunks, model_fn, rows, self.specs[name]), self.specs[name])
                for name in missing
            }
            found = [(rows, answers)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(found, src=0)
        leave(chunks)
        self._rows[data], answers = found[0]
        self._answers |= {(data, name): answer for name, answer in answers.items()}

    def rows(self, data: Data) -> list[Row]:
        """The rows of the step."""
        return self._rows[data]

    def answer(self, data: Data, spec: str) -> Answer:
        """Loss, gradients, and the oracle's numbers."""
        return self._answers[data, spec]


def _sendable(answer: Answer, spec: LossSpec) -> Answer:
    """The answer without its graph, and without the tables that no comparison reads.

    Adds ``magnitude``, the sum of absolute weighted token losses: in half precision the error of the loss is relative
    to it.
    """
    loss, grads, numbers = answer
    kept = {name: numbers[name] for name in ("counts", "ratio_stats", "clip_fraction")}
    kept |= {"loss": loss, "components": {name: float(value) for name, value in numbers["components"].items()}}
    kept["magnitude"] = sum(
        abs(spec.component(name).coef) * float((weight * value).abs().sum())
        for name in numbers["components"]
        for weight, value in zip(numbers["weights"][name], numbers["token_losses"][name], strict=True)
    )
    return loss, grads, kept
