"""Vocab-parallel log-probs over real gloo groups: 1, 2 and 4 shards against one dense computation.

One world of four ranks runs every case over groups of one, two and four of them; the tests look at
what the ranks brought back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pgloss import LayoutError, token_logprobs
from support.logprob_cases import Case, assert_one_rounding, cases, dense
from support.worlds import world_fixture

SIZES = [1, 2, 4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "_all"))
    or name in ("send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier")
]
calls: list[tuple[str, list[int]]] = []


def count_collectives() -> None:
    """Wrap every collective of torch.distributed: each call notes its name and input shape."""

    def wrap(name: str, inner: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, list(args[1].shape) if len(args) > 1 else []))
            return inner(*args, **kwargs)

        return counted

    for name in COLLECTIVES:
        if callable(getattr(dist, name)):
            setattr(dist, name, wrap(name, getattr(dist, name)))


def run_case(case: Case, group: dist.ProcessGroup, **more: Any) -> dict[str, Any]:
    columns = case.logits.size(1) // dist.get_world_size(group)
    first = dist.get_rank(group) * columns
    shard = case.logits[:, first : first + columns].clone().requires_grad_()
    calls.clear()
    out = token_logprobs(
        shard,
        case.targets,
        temperature=case.temperature,
        entropy=case.entropy,
        vocab_size=case.vocab,
        group=group,
        **more,
    )
    forward = list(calls)
    parts = [] if case.g is None else [(out.logprob * case.g.to(out.logprob.dtype)).sum()]
    parts += [] if case.h is None else [(out.entropy * case.h.to(out.logprob.dtype)).sum()]
    sum(parts).backward()
    entropy = out.entropy if out.entropy is None else out.entropy.detach()
    return {
        "logprob": out.logprob.detach(),
        "entropy": entropy,
        "grad": shard.grad,
        "forward": forward,
        "backward": calls[len(forward) :],
        "bits": [x.numpy().tobytes() for x in (out.logprob.detach(), entropy) if x is not None],
    }


CHOSEN, VOCAB, K = 6, 12, 5
"""Rows, columns that count (of 16: the last shard of four is padding), ids per row."""


def chosen_case(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(8)
    ids = torch.rand(CHOSEN, VOCAB, generator=draw).argsort(1)[:, :K]
    ids[0, 2:] = -1
    targets = ids[:, 1].clone()  # the target is one of the ids
    logits, c, g = (torch.randn(CHOSEN, n, generator=draw, dtype=torch.float64) for n in (16, K, 1))
    c[3] -= c[3].mean()  # adds up to 0: no gradient of the log-sum-exp, one of the entries all the same
    g[3] = c[4] = g[4] = 0
    logits = (3 * logits + torch.linspace(-2, 2, 16)).to(dtype)
    return {"logits": logits, "ids": ids, "targets": targets, "c": c, "g": g[:, 0]}


def run_chosen(group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Any]:
    x = chosen_case(dtype)
    columns = 16 // dist.get_world_size(group)
    first = dist.get_rank(group) * columns
    shard = x["logits"][:, first : first + columns].clone().requires_grad_()
    calls.clear()
    out = token_logprobs(
        shard, x["targets"], temperature=0.7, chosen_ids=x["ids"], vocab_size=VOCAB, group=group, reuse_logits=True
    )
    forward = list(calls)
    assert out.chosen is not None
    kind = out.logprob.dtype
    total = torch.where(x["ids"] >= 0, out.chosen * x["c"].to(kind), 0).sum() + (out.logprob * x["g"].to(kind)).sum()
    total.backward()
    chosen = out.chosen.detach()
    return {
        "logprob": out.logprob.detach(), "chosen": chosen, "grad": shard.grad, "forward": forward,
        "backward": calls[len(forward) :], "bits": [chosen.numpy().tobytes()],
    }  # fmt: skip


def refusals(group: dist.ProcessGroup, size: int) -> list[str]:
    """Messages of calls that every rank has to refuse, before any collective."""
    case = cases()["both"]
    messages = []
    for vocab_size in (16, 16 * size + 1):
        try:
            token_logprobs(case.logits, case.targets, group=group, vocab_size=vocab_size)
        except LayoutError as error:
            messages.append(str(error))
    return messages


def over_group(group: dist.ProcessGroup, size: int) -> dict[Any, Any]:
    ways = zip(DTYPES, (2**20, 10, 2**20), (False, False, True), strict=True)
    results: dict[Any, Any] = {
        (name, dtype): run_case(case, group, chunk_elements=chunk, reuse_logits=reuse)
        for dtype, chunk, reuse in ways
        for name, case in cases(dtype).items()
    }
    broken = cases()["both"]
    broken.targets = torch.where(broken.targets == 5, -100, broken.targets)
    broken.targets[9] = 16
    broken.logits[2, 3] = float("nan")
    broken.logits[4] = float("-inf")
    results["broken"] = run_case(broken, group)
    idle = cases()["both"]
    idle.g[::2], idle.h[::2], idle.logits[::2, 5] = 0, 0, float("nan")
    results["idle"] = run_case(idle, group)
    none = cases()["both"]
    none = Case(none.logits[:0], none.targets[:0], none.g[:0], none.h[:0])
    results["none"] = run_case(none, group)
    results |= {f"chosen {dtype}": run_chosen(group, dtype) for dtype in DTYPES}
    results["refusals"] = refusals(group, size)
    return results


def child(rank: int, world: int) -> dict[int, Any]:
    groups = {size: [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)] for size in SIZES}
    count_collectives()
    out: dict[int, Any] = {n: over_group(groups[n][rank // n], n) for n in SIZES}
    try:
        foreign = groups[1][(rank + 1) % world]
        token_logprobs(cases()["both"].logits, cases()["both"].targets, group=foreign)
    except LayoutError as error:
        out[0] = str(error)
    return out


brought = world_fixture(child, 4)


@pytest.fixture(params=SIZES, ids=lambda n: f"tp{n}")
def world(request: pytest.FixtureRequest, brought: list[dict[int, Any]]) -> list[dict[Any, Any]]:
    """What the ranks of the last group of each size hold, in the order of their shards."""
    return [r[request.param] for r in brought[-request.param :]]


pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_equal_the_dense_ones(world: list[dict], dtype: torch.dtype) -> None:
    for name, case in cases(dtype).items():
        ranks = [r[name, dtype] for r in world]
        tau = 1.0 if case.temperature is None else case.temperature
        lp, entropy, grad = dense(case.logits, case.targets, case.g, case.h, tau, case.vocab)
        exact = dtype == torch.float64
        close = dict(rtol=1e-13, atol=1e-12) if exact else dict(rtol=3e-7, atol=3e-7)
        label = dict(msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(ranks[0]["logprob"].double(), lp, **close, **label)
        if case.entropy:
            torch.testing.assert_close(ranks[0]["entropy"].double(), entropy, **close, **label)
        got = torch.cat([r["grad"] for r in ranks], 1)
        assert got.dtype == dtype
        if exact:
            torch.testing.assert_close(got, grad, rtol=1e-12, atol=1e-12, **label)
        else:
            assert_one_rounding(got, grad, noise=4e-6)
        assert not got[case.logits == float("-inf")].any()


def test_all_ranks_hold_the_same_bits(world: list[dict]) -> None:
    for key in world[0]:
        if key != "refusals":
            assert all(r[key]["bits"] == world[0][key]["bits"] for r in world), key


def test_one_gather_forward_and_no_collective_backward(world: list[dict]) -> None:
    tokens = {name: len(case.targets) for name, case in cases().items()}
    for ranks in world:
        for (name, _), result in ((k, v) for k, v in ranks.items() if isinstance(k, tuple)):
            columns = 3 if cases()[name].entropy else 2
            one = [("all_gather_into_tensor", [tokens[name], columns])]
            assert result["forward"] == (one if len(world) > 1 else [])
            assert result["backward"] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chosen_ids_join_the_one_gather_and_have_their_gradient(world: list[dict], dtype: torch.dtype) -> None:
    x, ranks = chosen_case(dtype), [r[f"chosen {dtype}"] for r in world]
    z = x["logits"].double().requires_grad_()
    logp = (z[:, :VOCAB] / 0.7).log_softmax(1)
    at = logp.gather(1, x["ids"].clamp(min=0))
    some = x["ids"] >= 0
    total = torch.where(some, at * x["c"], 0).sum() + (logp.gather(1, x["targets"][:, None])[:, 0] * x["g"]).sum()
    (gradient,) = torch.autograd.grad(total, z)
    exact = dtype == torch.float64
    want = torch.where(some, at, -torch.inf).detach()
    close = dict(rtol=1e-13, atol=1e-12) if exact else dict(rtol=3e-7, atol=3e-7)
    got = torch.cat([r["grad"] for r in ranks], 1)
    torch.testing.assert_close(ranks[0]["chosen"].double(), want, **close)
    if exact:
        torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-12)
    else:
        assert_one_rounding(got, gradient, noise=4e-6)
    assert bool(got[3].any()) and not got[4].any()
    one = [("all_gather_into_tensor", [CHOSEN, 2 + K])] if len(world) > 1 else []
    assert all(r["forward"] == one and r["backward"] == [] for r in ranks)


def test_worked_example_of_four_logits(world: list[dict]) -> None:
    # OTHER-01 and OTHER-03: each rank holds its part of these gradients.
    lp = [r["worked example, logprob", torch.float64] for r in world]
    entropy = [r["worked example, entropy", torch.float64] for r in world]
    for result in lp:
        assert result["logprob"].item() == pytest.approx(-0.4401897, abs=1e-7)
        assert result["entropy"].item() == pytest.approx(0.9475370, abs=1e-7)
    got = torch.cat([r["grad"] for r in lp], 1)[0].tolist()
    assert got == pytest.approx([-0.0320586, -0.0871443, -0.2368828, 0.3560857], abs=1e-7)
    got = torch.cat([r["grad"] for r in entropy], 1)[0].tolist()
    assert got == pytest.approx([0.0799, 0.1301, 0.1167, -0.3267], abs=1e-4)


def test_labels_off_the_vocabulary_and_broken_rows_are_nan_on_every_rank(
    world: list[dict],
) -> None:
    for result in (r["broken"] for r in world):
        lost = result["logprob"].isnan().nonzero()[:, 0].tolist()
        assert lost == [2, 4, 5, 9]
        assert result["entropy"].isnan().nonzero()[:, 0].tolist() == [2, 4]
        assert result["grad"][lost].isnan().all()
        assert result["grad"][[0, 1, 3, 6, 7, 8]].isfinite().all()


def test_rows_without_upstream_gradient_are_zero_on_every_rank(world: list[dict]) -> None:
    case = cases()["both"]
    grad = dense(case.logits, case.targets, case.g, case.h)[2]
    got = torch.cat([r["idle"]["grad"] for r in world], 1)
    assert torch.equal(got[::2], torch.zeros(8, 16))
    torch.testing.assert_close(got[1::2], grad[1::2], rtol=1e-12, atol=1e-12)


def test_no_tokens_give_empty_results(world: list[dict]) -> None:
    for result in (r["none"] for r in world):
        assert result["logprob"].shape == (0,) and result["entropy"].shape == (0,)
        assert result["grad"].shape == (0, 16 // len(world))


def test_gathered_logits_and_short_vocabularies_are_refused(world: list[dict]) -> None:
    for messages in (r["refusals"] for r in world):
        assert "do not cover the vocabulary" in messages.pop()
        if len(world) == 1:
            assert messages == []  # one shard is the whole vocabulary
        else:
            (gathered,) = messages
            assert "gathered logits" in gathered and "Fix:" in gathered


def test_group_of_other_ranks_is_refused(brought: list[dict[int, Any]]) -> None:
    assert all("not in the group" in r[0] for r in brought)
