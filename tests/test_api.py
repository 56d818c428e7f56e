"""The public names, and the design's snippets as they are written, in a process without a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_pgloss as pg

PUBLIC = (
    "Author CISPO Clip CovarianceGate CrossEntropy CustomRatio DRO DataError Distill DropTruncated "
    "DropZeroAdvantage Entropy EntropyGate FIPO GMPO Gate IcePop KL KLGate KeepPositiveAdvantage KeptSet LayoutError "
    "LossOutput LossSpec MicroBatch NLL NonFiniteError PGLossError Plan PolicyGradient REAL Ratio RatioGate "
    "RatioMask Reinforce Reject RoleTable SAPO Sampler SecondMomentGate SequenceGate Span SpecError Split "
    "Staleness Statistic Surrogate TOPR TVGate Term Termination TokenBatch TokenLogprobs TopKDistill Trace TruncatedIS "
    "Unclipped UnsupportedError UserMask VESPO Value Veto __version__ advantages finish minibatches mismatch plan "
    "policy_loss presets statistics_pass token_logprobs voters weighted_sum"
)
VOCAB, B, L = 11, 8, 7


def test_public_api_is_frozen() -> None:
    names = PUBLIC.split()
    differ = sorted(set(pg.__all__) ^ set(names))
    assert not differ, f"public names and PUBLIC differ in {', '.join(differ)}"
    assert len(pg.__all__) == len(names)
    assert all(hasattr(pg, name) for name in pg.__all__)


@pytest.fixture
def data() -> dict[str, Any]:
    """What the snippets write in capitals."""
    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (B, L), generator=dice)
    lengths = torch.tensor([7, 5, 6, 3, 7, 4, 2, 6])
    column = torch.arange(L)[None]
    old = -torch.rand(B, L, generator=dice) - 0.5
    old[column.expand(B, L) >= lengths[:, None]] = float("nan")
    return {
        "tokens": tokens,
        "lengths": lengths,
        "action_mask": (column >= 1) & (column < lengths[:, None]) & (tokens % 3 != 0) | (column == 1),
        "advantages": torch.randn(B, generator=dice),
        "old_logprobs": old,
        "rollout_logprobs": old - 0.01,
        "ref_logprobs": old + 0.02,
        "prompt_ids": [0, 0, 0, 0, 1, 1, 1, 1],
        "episode_ids": ["a", "b", "c", "d"] * 2,
        "sample_ids": [f"sample-{k}" for k in range(B)],
    }


class Model(torch.nn.Module):
    """A causal model small enough for a test."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.mix = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.mix(self.embed(ids))[0])  # type: ignore[no-any-return]


def gradients(model: Model) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_snippet_a_any_torch_trainer(data: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert not dist.is_initialized()
    torch.manual_seed(0)
    model, found = Model(), []
    for rows in (4, 1, 8):
        spec = pg.presets.dapo()
        batch = pg.TokenBatch.from_padded(**data)
        plan = pg.plan([batch], spec, split=pg.Split(sequences=rows))
        print(plan.report())
        model.zero_grad()
        for micro in plan.microbatches():
            logits = model(micro.input_ids, attention_mask=micro.attention_mask)
            lp = pg.token_logprobs(logits, micro.targets, temperature=micro.temperature, entropy=spec.needs_entropy)
            out = pg.policy_loss(lp, micro)
            (out.loss * plan.gradient_scale).backward()
            assert out.loss.shape == () and out.metrics["rl/loss"].kind == "sum"
        found.append(gradients(model))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)
    assert "step of 8 sequences, 40 tokens" in capsys.readouterr().out  # padding is no token


def test_snippet_a_takes_everything_that_it_names(data: dict[str, Any]) -> None:
    more = {
        "turn_ids": torch.ones(B, L, dtype=torch.int64),
        "observation_mask": ~data["action_mask"],
        "weights": {"rl": torch.ones(B, L), "ce": torch.ones(B, L)},
        "temperature": torch.full((B,), 0.7),
        "terminations": ["success"] * B,
        "masks": {"mine": torch.ones(B, L, dtype=torch.bool)},
    }
    spec = pg.presets.echo(masks=[pg.UserMask(name="mine")])
    plan = pg.plan([pg.TokenBatch.from_padded(**data, **more)], spec, split=pg.Split(sequences=4))
    assert plan.num_microbatches == 2 and plan.has_signal


def test_snippet_a2_logprobs_of_your_own(data: dict[str, Any]) -> None:
    batch = pg.TokenBatch.from_padded(**data)
    spec = pg.presets.reinforce(normalizer="mean(sequence) > mean(token)")
    micro = next(iter(pg.plan([batch], spec, split=pg.Split(sequences=4)).microbatches()))
    assert micro.targets.shape == micro.weight("rl").shape == micro.members("rl").shape == (4, L)
    assert torch.equal(micro.targets[0], torch.cat([data["tokens"][0, 1:], torch.zeros(1, dtype=torch.int64)]))
    logp = torch.full((4, L), float("nan")).masked_fill(micro.members("rl"), -1.0).requires_grad_()
    out = pg.policy_loss(pg.TokenLogprobs(logprob=logp, entropy=None), micro)
    value = pg.weighted_sum(torch.ones(4, L), micro, "rl")
    torch.testing.assert_close(value, torch.tensor(0.5))  # half of the sequences, whatever their lengths
    out.loss.backward()
    advantage = data["advantages"][:4, None]
    torch.testing.assert_close(logp.grad, -advantage * micro.weight("rl"))


def test_snippet_a3_a_spec_in_full(data: dict[str, Any], tmp_path: Path) -> None:
    spec = pg.LossSpec(
        old="given",
        components=[
            pg.PolicyGradient(
                surrogate=pg.Clip(low=0.2, high=0.28, dual=None), ratio="token", coef=1.0, normalizer="mean(token)"
            ),
            pg.KL(estimator="k3", gradient="plain", to="ref", coef=1e-3, normalizer="mean(token)"),
            pg.Entropy(coef=1e-3, normalizer="mean(token)"),
            pg.CrossEntropy(coef=1.0, normalizer="mean(token)", count="members"),
        ],
        corrections=[pg.TruncatedIS(of="old", level="token", high=2.0)],
        masks=[pg.DropTruncated(), pg.DropZeroAdvantage()],
        roles=pg.RoleTable(ce={"tool": 0.1}),
        empty_sequences="refuse",
    )
    (tmp_path / "loss.toml").write_text(spec.to_toml())
    assert pg.LossSpec.from_toml(tmp_path / "loss.toml") == spec == pg.LossSpec.from_dict(spec.to_dict())
    assert "rl = [mean(token)]" in str(spec) and spec.needs_entropy
    batch = pg.TokenBatch.from_padded(**data, terminations=["success"] * B)
    plan = pg.plan([batch], spec, split=pg.Split(sequences=4))
    lp = torch.zeros(4, L, requires_grad=True)
    for micro in plan.microbatches():
        pg.policy_loss(pg.TokenLogprobs(logprob=lp - 1.0, entropy=lp + 1.0), micro).loss.backward()
    assert lp.grad is not None and lp.grad.isfinite().all()


def test_snippet_c_a_term_of_your_own(data: dict[str, Any]) -> None:
    mine = pg.presets.grpo().add(
        pg.Term("log_ratio_sq", lambda x: x.log_ratio.square(), on="action", coef=1e-3, normalizer="mean(token)")
    )
    batch = pg.TokenBatch.from_padded(**data)
    (micro,) = pg.plan([batch], mine, split=pg.Split(sequences=8)).microbatches()
    old = torch.cat([data["old_logprobs"][:, 1:], torch.zeros(B, 1)], dim=1)
    out = pg.policy_loss(pg.TokenLogprobs(logprob=old + 0.1, entropy=None), micro)
    torch.testing.assert_close(out.metrics["log_ratio_sq/loss"].value.float(), torch.tensor(0.01))


def test_snippet_d_agent_traces() -> None:
    spec = pg.presets.echo("prime_rl", roles=pg.RoleTable(ce={"tool": 0.1}), old="rollout")
    trace = pg.Trace(
        prompt_id="task-7", episode_id="3", advantage=0.8, termination=pg.Termination.SUCCESS,
        sampler=pg.Sampler(temperature=0.8, logprobs="processed"),
        spans=[
            pg.Span(role="system", author="harness", tokens=[1, 2]),
            pg.Span(role="assistant", author="policy", tokens=[3, 4], logprobs=[-0.5, -0.25]),
            pg.Span(role="tool", author="environment", tokens=[5, 6, 7]),
        ],
    )  # fmt: skip
    batch = pg.TokenBatch.from_traces([trace], roles=spec.roles)
    (micro,) = pg.plan([batch], spec, split=pg.Split(max_tokens=8192)).microbatches()
    torch.testing.assert_close(micro.weight("ce"), torch.tensor([[0.0, 0.0, 0.0, 0.1 / 3, 0.1 / 3, 0.1 / 3, 0.0]]))
    assert micro.cu_seqlens is not None and micro.cu_seqlens.tolist() == [0, 7]
    assert micro.members("rl").tolist() == [[False, True, True, False, False, False, False]]


def test_tokens_are_kept_on_request(data: dict[str, Any]) -> None:
    """Per-token loss, ratio, weight and gate, in the micro-batch's shape; they add up to the loss."""
    batch = pg.TokenBatch.from_padded(**data)
    (micro,) = pg.plan([batch], pg.presets.grpo(), split=pg.Split(sequences=8)).microbatches()
    lp = pg.TokenLogprobs(logprob=torch.full((B, L), -1.0), entropy=None)
    out = pg.policy_loss(lp, micro, keep_tokens=True)
    assert not pg.policy_loss(lp, micro).tokens and set(out.tokens) == {"rl", "kl"}
    rl, kl = ((out.tokens[name].loss * out.tokens[name].weight).sum() for name in ("rl", "kl"))
    torch.testing.assert_close(out.loss, rl + 0.04 * kl)
    assert out.tokens["kl"].ratio is None
    for report in out.tokens.values():
        assert report.loss.shape == report.weight.shape == report.gate.shape == (B, L)
        assert report.gate.dtype == torch.int8 and torch.equal(report.gate >= 0, micro.members("rl"))
        assert not report.loss[report.gate < 0].any() and not report.loss.requires_grad
