"""Log-prob and entropy on kept sets: sets against sorting in float64, values and gradients against plain torch.

Shapes: `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss.logprobs.kept.radix import Rows, floats, keys
from megatron_pgloss.logprobs.kept.threshold import limits
from megatron_pgloss.logprobs.vocab.order import RowOrder
from megatron_pgloss.logprobs.vocab.shard import VocabShard
from megatron_pgloss.maths.kept import Kept
from support.worlds import world_fixture

T, V = 48, 64
INF = float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def draw(dtype: torch.dtype = torch.float64, seed: int = 0, tokens: int = T, columns: int = V) -> tuple[Tensor, Tensor]:
    """Logits with ties (bf16 has many by itself), zeros of both signs and columns of -inf; targets."""
    dice = torch.Generator().manual_seed(seed)
    z = (torch.randn(tokens, columns, generator=dice, dtype=torch.float64) * 3).to(dtype)
    z[1::4] = (z[1::4] * 2).round() / 2  # ties
    z[2::4, ::3] = -INF
    z[3, :5], z[3, 5:9] = 0.0, -0.0
    return z, torch.randint(0, columns, (tokens,), generator=dice)


RULES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_k of more than there are": {"top_k": 10_000},
    "top_k per token": {"top_k": torch.arange(T) % 7 - 1},
    "top_p": {"top_p": 0.8},
    "top_p per token": {"top_p": torch.linspace(0.01, 1.0, T, dtype=torch.float64)},
    "min_p": {"min_p": 0.07},
    "min_p per token": {"min_p": torch.linspace(0, 1, T, dtype=torch.float64)},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "all, of what min_p left": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "top_p_of": "top_k_min_p"},
    "all, of everything": {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "top_p_of": "all"},
    "off": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


def sorted_set(
    z: Tensor, tau: Tensor, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0, top_p_of: str = "top_k"
) -> Tensor:
    """bool [T, V]: the definition, by sorting each row in float64 and one token at a time."""
    tokens, columns = z.shape
    every = [torch.as_tensor(value).expand(tokens).tolist() for value in (top_k, top_p, min_p)]
    out = torch.zeros(tokens, columns, dtype=torch.bool)
    for t, (k, p, m) in enumerate(zip(*every, strict=True)):
        u = z[t].double() / tau[t]
        value, order = u.sort(descending=True)
        finite = value > -INF
        keep = finite.clone()
        if k > 0:
            keep &= value >= value[min(k, columns) - 1]
        least = z[t].double().max() + tau[t] * torch.tensor(m, dtype=torch.float64).log() if m > 0 else -INF
        likely = z[t].double()[order] >= least
        if p < 1:
            base = {"top_k": keep, "top_k_min_p": keep & likely, "all": finite}[top_p_of]
            mass = torch.where(base, (value - value[0]).exp(), 0)
            mass = mass / mass.sum()
            above = torch.stack([mass[value > one].sum() for one in value])
            keep &= above < p
        out[t, order] = keep & likely
    return out


def heat(kind: Any) -> tuple[Any, Tensor]:
    tau = torch.ones(T, dtype=torch.float64) if kind is None else torch.as_tensor(kind, dtype=torch.float64).expand(T)
    return kind, tau


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_recomputed_sets_are_those_of_the_sorted_definition(dtype: torch.dtype, name: str) -> None:
    """Bit for bit, also with ties, columns of -inf and padding; whatever the chunk."""
    z, targets = draw(dtype)
    rule = RULES[name]
    for kind in (None, torch.linspace(0.3, 2.0, T, dtype=torch.float64)):
        given, tau = heat(kind)
        want = sorted_set(z[:, :50], tau, **rule)
        order = RowOrder.of(z)
        for step in (1, 7, 1000):
            rows = Rows(z, order, VocabShard(columns=V, vocab=50), step, None if given is None else 1 / tau)
            parts = {
                key: None if rule.get(key) is None else torch.as_tensor(rule[key]).expand(T)
                for key in ("top_k", "top_p", "min_p")
            }
            limit = limits(rows, **parts, top_p_of=rule.get("top_p_of", "top_k"))
            got = (z[:, :50] >= limit[:, None]) & (z[:, :50] != -INF)
            assert torch.equal(got, want), (got != want).nonzero()[:3]
        lp = pg.token_logprobs(z, targets, temperature=given, kept=Kept(**rule), vocab_size=50)
        assert lp.kept is not None and torch.allclose(lp.kept.double() * 50, want.sum(1).double(), atol=1e-4)


def plain(z: Tensor, targets: Tensor, keep: Tensor, tau: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """(log-prob, entropy, gradient of sum(g logp + h H)) by masked softmax and autograd in float64."""
    leaf = z.detach().double().requires_grad_()
    logp = torch.where(keep, leaf / tau[:, None], -1e300).log_softmax(-1)
    entropy = -torch.where(keep, logp.exp() * logp, 0).sum(-1)
    picked = logp.gather(1, targets[:, None])[:, 0]
    inside = keep.gather(1, targets[:, None])[:, 0]
    (torch.where(inside, g * picked, 0) + h * entropy).sum().backward()
    assert leaf.grad is not None
    return torch.where(inside, picked.detach(), -INF), entropy.detach(), leaf.grad


def recorded(keep: Tensor) -> Tensor:
    """The set as ids [T, k], -1 for none, in no order."""
    width = int(keep.sum(1).max()) + 1
    ids = torch.full((keep.size(0), width), -1)
    for t, row in enumerate(keep):
        found = row.nonzero()[:, 0].flip(0)
        ids[t, 1 : 1 + len(found)] = found
    return ids


def ours(z: Tensor, targets: Tensor, kept: Kept, inside: Tensor, g: Tensor, h: Tensor, **more: Any) -> tuple[Any, ...]:
    leaf = z.detach().clone().requires_grad_()
    lp = pg.token_logprobs(leaf, targets, kept=kept, entropy=True, **more)
    (torch.where(inside, torch.where(inside, lp.logprob, 0) * g, 0) + h * lp.entropy).sum().backward()
    return lp.logprob.detach(), lp.entropy.detach(), leaf.grad  # type: ignore[union-attr]


def near(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        same = one.double() == other  # infinities
        gap = torch.where(same, 0, (one.double() - other).abs())
        assert float(gap.max()) <= tolerance * float(torch.where(other.isfinite(), other.abs(), 0).max())


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("name", [*RULES, "recorded"])
@pytest.mark.parametrize("chunk", [1, 5 * V, 10**6])
def test_values_and_gradients_to_ten_digits(name: str, reuse: bool, chunk: int) -> None:
    z, targets = draw()
    _, tau = heat(torch.linspace(0.5, 2, T, dtype=torch.float64))
    rule = RULES.get(name, RULES["all"])
    keep = sorted_set(z, tau, **rule)
    kept = Kept(ids=recorded(keep)) if name == "recorded" else Kept(**rule)
    g, h = torch.linspace(-1, 1, T, dtype=torch.float64), torch.linspace(2, -1, T, dtype=torch.float64)
    g[5::7] = h[5::7] = 0.0
    inside = keep.gather(1, targets[:, None])[:, 0]
    got = ours(z, targets, kept, inside, g, h, temperature=tau, reuse_logits=reuse, chunk_elements=chunk)
    near(got, plain(z, targets, keep, tau, g, h), 1e-12)
    assert not got[2][~keep & (torch.arange(V) != targets[:, None])].any(), "a gradient outside the set"
    assert not got[2][5::7].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    z, targets = draw(dtype)
    _, tau = heat(None)
    keep = sorted_set(z, tau, top_p=0.9)
    g, h = torch.linspace(-1, 1, T, dtype=torch.float64), torch.linspace(2, -1, T, dtype=torch.float64)
    inside = keep.gather(1, targets[:, None])[:, 0]
    got = ours(z, targets, Kept(top_p=0.9), inside, g.float(), h.float())
    want = plain(z, targets, keep, tau, g, h)
    near(got[:2], want[:2], 1e-6)
    near(got[2:], want[2:], {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-6}[dtype])


@pytest.mark.parametrize("form", ["recorded", "recomputed"])
def test_a_target_outside_joins_or_has_no_probability(form: str) -> None:
    z, targets = draw()
    _, tau = heat(None)
    keep = sorted_set(z, tau, top_k=5)
    parts: dict[str, Any] = {"ids": recorded(keep)} if form == "recorded" else {"top_k": 5}
    inside = keep.gather(1, targets[:, None])[:, 0]
    possible = z.gather(1, targets[:, None])[:, 0] > -INF
    assert 0 < int(inside.sum()) < T
    lp = pg.token_logprobs(z, targets, kept=Kept(**parts))
    assert torch.equal(lp.logprob == -INF, ~inside)
    g, h = torch.ones(T, dtype=torch.float64), torch.ones(T, dtype=torch.float64)
    wider = keep.scatter(1, targets[:, None], True) & (z > -INF)
    got = ours(z, targets, Kept(**parts, add_target=True), possible, g, h)
    near(got, plain(z, targets, wider, tau, g, h), 1e-12)


def test_ids_twice_and_none_at_all() -> None:
    """An id counts once; a token without ids has the whole vocabulary."""
    z, targets = draw()
    ids = torch.full((T, 4), -1)
    ids[0] = torch.tensor([3, 3, int(targets[0]), 3])
    lp, whole = pg.token_logprobs(z, targets, kept=Kept(ids=ids), entropy=True), pg.token_logprobs(z, targets)
    assert lp.kept is not None and abs(float(lp.kept[0]) * V - len({3, int(targets[0])})) < 1e-12
    assert torch.allclose(lp.logprob[1:], whole.logprob[1:], rtol=1e-12, atol=1e-12)
    none = pg.token_logprobs(z, targets, kept=Kept(ids=torch.zeros(T, 0, dtype=torch.int64)))
    assert torch.allclose(none.logprob, whole.logprob, rtol=1e-12)


def test_rows_lie_in_any_order_in_memory() -> None:
    """Sequence-first logits, as Megatron's are, transposed."""
    z, targets = draw()
    z = z.reshape(6, 8, V)
    top_k = torch.arange(T).reshape(6, 8) % 5
    want = pg.token_logprobs(z, targets.reshape(6, 8), kept=Kept(top_k=top_k), entropy=True)
    got = pg.token_logprobs(
        z.transpose(0, 1).contiguous().transpose(0, 1), targets.reshape(6, 8), kept=Kept(top_k=top_k), entropy=True
    )
    assert torch.equal(got.logprob, want.logprob) and torch.equal(got.entropy, want.entropy)  # type: ignore[arg-type]
    ids = torch.randint(0, V, (6, 8, 3), generator=torch.Generator().manual_seed(0))
    one = pg.token_logprobs(z, targets.reshape(6, 8), kept=Kept(ids=ids, add_target=True))
    other = pg.token_logprobs(
        z.transpose(0, 1).contiguous().transpose(0, 1), targets.reshape(6, 8), kept=Kept(ids=ids, add_target=True)
    )
    assert torch.equal(one.logprob, other.logprob)


def test_nan_shows() -> None:
    z, targets = draw()
    z[4, 7] = float("nan")
    for kept in (Kept(top_k=3), Kept(top_p=0.5), Kept(min_p=0.1), Kept(top_k=3, top_p=0.9)):
        assert pg.token_logprobs(z, targets, kept=kept).logprob.isnan().nonzero().flatten().tolist() == [4]


def test_a_row_without_a_gradient_gets_zeros_whatever_it_holds() -> None:
    z, targets = draw()
    z[4, 7] = float("nan")
    leaf = z.clone().requires_grad_()
    lp = pg.token_logprobs(leaf, targets, kept=Kept(top_k=V))
    torch.where(lp.logprob.isfinite(), lp.logprob, 0).sum().backward()
    assert leaf.grad is not None and not leaf.grad[4].any() and leaf.grad[5].any()


def test_a_share_of_one_keeps_what_has_no_probability_left() -> None:
    """Tokens 100 nats below the likeliest: off means the whole vocabulary, not all that can be told from 0."""
    z = torch.linspace(0.0, -100.0, V, dtype=torch.float64)[None]
    lp = pg.token_logprobs(z, torch.tensor([V - 1]), kept=Kept(top_p=1.0))
    assert lp.kept is not None and float(lp.kept) == 1.0 and bool(lp.logprob.isfinite())


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_order_floats_and_come_back(dtype: torch.dtype) -> None:
    z = torch.tensor([-INF, -3.5, -1.0, -6e-8, -0.0, 0.0, 6e-8, 1.0, 3.5, INF]).to(dtype)
    key = keys(z)
    assert key.diff().ge(0).all() and key[4] == key[5] and torch.equal(floats(key, dtype), z)
    assert int(key[-1]) < 2 ** (8 * dtype.itemsize - 1)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"kept": Kept(ids=torch.zeros(T, 2, dtype=torch.int64), top_k=3)}, "both as recorded ids and as rules"),
        ({"kept": Kept(ids=torch.zeros(2, dtype=torch.int64))}, "recorded ids do not fit"),
        ({"kept": Kept(top_k=0.5)}, "top_k does not fit"),
        ({"kept": Kept(top_p=1)}, "top_p does not fit"),
        ({"kept": Kept(min_p=torch.zeros(3))}, "min_p does not fit"),
        ({"kept": Kept(top_k=3), "ref_logits": torch.zeros(T, V, dtype=torch.float64)}, "the exact KL on kept sets"),
        ({"kept": Kept(top_k=3), "backend": "compiled"}, "do not run on backend"),
    ],
)
def test_refused(more: dict[str, Any], what: str) -> None:
    z, targets = draw()
    with pytest.raises(pg.PGLossError, match=what):
        pg.token_logprobs(z, targets, **more)


def test_a_second_backward_through_reused_logits_is_refused() -> None:
    z, targets = draw()
    leaf = z.clone().requires_grad_()
    lp = pg.token_logprobs(leaf, targets, kept=Kept(top_k=V), entropy=True, reuse_logits=True)
    loss = lp.entropy.sum()  # type: ignore[union-attr]
    loss.backward(retain_graph=True)
    with pytest.raises(pg.UnsupportedError, match="second backward"):
        loss.backward()


# ---- vocabulary parallel -------------------------------------------------------------------------------------------


def _parallel(rank: int, world: int) -> dict[int, dict[str, Any]]:
    """Every rule on the rank's shard, in pairs and in the whole world."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    return {2: _shards(rank % 2, 2, pairs[rank // 2]), world: _shards(rank, world, dist.group.WORLD)}


def _shards(rank: int, size: int, group: Any) -> dict[str, Any]:
    """Outputs and gradients with the collectives of each forward; backward has none."""
    calls: list[str] = []

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return plain[name](*args, **kwargs)

        return call

    plain = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor")}
    for name in plain:
        setattr(dist, name, counted(name))
    found: dict[str, Any] = {}
    for key, (dtype, vocab, kept, tau, targets) in _calls().items():
        z, _ = draw(dtype)
        leaf = z[:, rank * V // size : (rank + 1) * V // size].clone().requires_grad_()
        calls.clear()
        lp = pg.token_logprobs(leaf, targets, temperature=tau, kept=kept, entropy=True, group=group, vocab_size=vocab)
        forward = list(calls)
        (torch.where(lp.logprob.isfinite(), lp.logprob, 0) + lp.entropy).sum().backward()  # type: ignore[operator]
        assert calls == forward and leaf.grad is not None
        parts = (lp.logprob, lp.entropy, lp.kept, leaf.grad)
        found[key] = ([part.detach() for part in parts if part is not None], forward)
    for name, function in plain.items():
        setattr(dist, name, function)
    return found


def _calls() -> dict[str, tuple[torch.dtype, int, Kept, Tensor, Tensor]]:
    """Name to (dtype, vocabulary, sets, temperature, targets); one of 33 leaves a fourth shard to padding."""
    tau = torch.linspace(0.5, 2, T, dtype=torch.float64)
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        z, targets = draw(dtype)
        rules = {name: Kept(**rule) for name, rule in RULES.items()}
        rules["recorded"] = Kept(ids=recorded(sorted_set(z[:, :33], tau, top_k=6)))
        rules["recorded, joined"] = Kept(ids=recorded(sorted_set(z[:, :33], tau, top_k=6)), add_target=True)
        for name, kept in rules.items():
            for vocab in (50, 33):
                found[f"{name}, {dtype}, {vocab}"] = dtype, vocab, kept, tau, targets % 33
    return found


SEARCHES = {
    "top_k": (1, 0), "top_k of more than there are": (1, 0), "top_k per token": (1, 0), "top_p": (1, 1),
    "top_p per token": (1, 1), "min_p": (0, 1), "min_p per token": (0, 1), "all": (2, 1),
    "all, of what min_p left": (2, 1), "all, of everything": (2, 1), "off": (2, 1),
}  # fmt: skip
"""Searches, each of as many all-reduces as a logit has bytes, and whether the maximum is needed."""


shards = world_fixture(_parallel, 4)


@pytest.mark.multiproc
@pytest.mark.parametrize("size", [2, 4])
def test_shards_find_the_same_sets_and_numbers(size: int, shards: list[dict[int, dict[str, Any]]]) -> None:
    """Set sizes to the bit; values and gradients to rounding; collectives as many as the docstrings say."""
    whole: dict[str, Any] = {}
    for key, (dtype, vocab, kept, tau, targets) in _calls().items():
        z, _ = draw(dtype)
        leaf = z.clone().requires_grad_()
        lp = pg.token_logprobs(leaf, targets, temperature=tau, kept=kept, entropy=True, vocab_size=vocab)
        (torch.where(lp.logprob.isfinite(), lp.logprob, 0) + lp.entropy).sum().backward()  # type: ignore[operator]
        whole[key] = [lp.logprob.detach(), lp.entropy.detach(), lp.kept, leaf.grad]  # type: ignore[union-attr]
    ranks = [found[size] for found in shards[:size]]
    for key, want in whole.items():
        name, dtype = key.split(", torch.")[0], _calls()[key][0]
        parts = [found[key][0] for found in ranks]
        for other in parts[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other[:3], parts[0][:3], strict=True)), key
        got = [*parts[0][:3], torch.cat([part[3] for part in parts], 1)]
        assert torch.equal(got[2], want[2]), key
        near(tuple(got), tuple(x.double() for x in want), 1e-12 if dtype == torch.float64 else 4e-3)
        near(tuple(got[:2]), tuple(x.double() for x in want[:2]), 1e-12 if dtype == torch.float64 else 1e-6)
        searches, peak = SEARCHES.get(name, (0, 0))
        passes = searches * dtype.itemsize + peak
        calls = ranks[0][key][1]
        assert calls == ["all_reduce"] * passes + ["all_gather_into_tensor"], (key, calls)
