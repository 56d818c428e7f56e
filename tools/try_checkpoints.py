"""Which of Megatron's ways to save the distributed optimizer save and load here: docs/checkpoints.md is made of it.

    torchrun --nproc-per-node 2 tools/try_checkpoints.py FOLDER [TYPE ...]

A float32 model takes two Adam steps with gradients that follow from the parameter's name; it is saved, loaded into a
new model with other weights, on the same layout and on another one, and both take a third step. "same": every parameter
is then bit-identical, gathered to the whole model.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

TYPES = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space", "dp_zero_gather_scatter")
LAYOUTS: dict[str, dict[str, int]] = {"dp 2": {}, "tp 2": {"tp": 2}}
PAIRS = (("dp 2", "dp 2"), ("tp 2", "tp 2"), ("dp 2", "tp 2"))


def made(layout: dict[str, int], seed: int) -> tuple[list[Any], Any]:
    """A model on this layout, and Megatron's distributed Adam."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_pgloss.verify.layouts.models import build_gpt, init_parallel
    from megatron_pgloss.verify.layouts.weights import deterministic_weights

    init_parallel(**layout)
    chunks = build_gpt(distributed_optimizer=True, vocab_size=32, seq_length=16, dtype=torch.float32)
    deterministic_weights(chunks)
    if seed:
        for chunk in chunks:
            for param in chunk.parameters():
                param.data.mul_(0.5)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True)
    return chunks, get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def update(chunks: list[Any], optimizer: Any, number: int) -> None:
    """A step whose gradient of each parameter is the same on every rank and layout: a constant of its name."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for name, param in chunk.named_parameters():
            # The average over data-parallel ranks has been taken.
            param.main_grad.fill_(0.1 + (sum(name.encode()) * 7 + number * 13) % 17 / 17)
    optimizer.step()


def weights(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """The whole model's."""
    from megatron_pgloss.verify.layouts.reshard import full_parameters

    return {name: value.clone() for name, value in full_parameters(chunks).items()}


def state(chunks: list[Any], optimizer: Any, kind: str, *, loading: bool, prepared: bool = True) -> dict[str, Any]:
    """Model and optimizer as tensors that know their place."""
    from megatron.core.utils import unwrap_model

    meta = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
    found: dict[str, Any] = {f"model{i}": unwrap_model(chunk).sharded_state_dict() for i, chunk in enumerate(chunks)}
    if loading and prepared:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part._init_optimizer_states_with_dummy_values()
    found["optimizer"] = optimizer.sharded_state_dict(dict(found), is_loading=loading, metadata=meta)
    return found


def save(chunks: list[Any], optimizer: Any, kind: str, place: str, updates: int) -> None:
    """Write model and optimizer after so many updates. A collective."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(place).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state(chunks, optimizer, kind, loading=False) | {"updates": updates}, place)


def load(chunks: list[Any], optimizer: Any, kind: str, place: str, *, mended: bool = True) -> int:
    """Set model and optimizer from what `save` wrote, and return the number of updates. A collective.

    Args:
        mended: give each parameter Adam's count of updates by hand: loading leaves one tensor for all of them, which
            then counts a step for each parameter.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    found = dist_checkpointing.load(state(chunks, optimizer, kind, loading=True), place)
    for i, chunk in enumerate(chunks):
        unwrap_model(chunk).load_state_dict(found[f"model{i}"])
    with torch.no_grad():  # float32 parameters are their own main parameters, and are written to in place
        optimizer.load_state_dict(found["optimizer"])
        if mended:
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                for moments in part.optimizer.state.values():
                    moments["step"] = torch.tensor(float(found["updates"]))
    return int(found["updates"])


def attempt(kind: str, saved: str, loaded: str, folder: Path, *, mended: bool) -> str:
    """What came of one type, saved on one layout and loaded on another; ``mended`` as of `load`."""
    from megatron_pgloss.verify.layouts.parallel import destroy_parallel

    step = "save"
    try:
        chunks, optimizer = made(LAYOUTS[saved], 0)
        for number in (1, 2):
            update(chunks, optimizer, number)
        place = folder / f"{kind}-{saved}-{loaded}".replace(" ", "")
        save(chunks, optimizer, kind, str(place), 2)
        update(chunks, optimizer, 3)
        expected = weights(chunks)
        destroy_parallel()
        step = "load"
        chunks, optimizer = made(LAYOUTS[loaded], 1)
        load(chunks, optimizer, kind, str(place), mended=mended)
        update(chunks, optimizer, 3)
        got = weights(chunks)
        worst = max(float((got[name] - value).abs().max()) for name, value in expected.items())
        return "same" if worst == 0 else f"differs by {worst:.1e}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"{step} fails: {type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
    finally:
        destroy_parallel()


def main() -> None:
    warnings.simplefilter("ignore")
    from megatron_pgloss.megatron.cpu import enable_cpu

    dist.init_process_group("gloo")
    enable_cpu()
    folder = Path(sys.argv[1])
    found = {}
    for kind in sys.argv[2:] or TYPES:
        for saved, loaded in PAIRS:
            mine = attempt(kind, saved, loaded, folder, mended=True)
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            found[f"{kind}: {saved} -> {loaded}"] = everyone
            if dist.get_rank() == 0:
                print(f"{kind}: {saved} -> {loaded}: {everyone}", flush=True)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found, indent=1))
        for place in folder.iterdir():
            if place.is_dir():
                shutil.rmtree(place)
    dist.destroy_process_group()


# Saving starts processes that import this file again: without this line they would save, too, and hang.
if __name__ == "__main__":
    main()
