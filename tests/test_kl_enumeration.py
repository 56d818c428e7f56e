"""Every form of the KL term against its stated gradient, by full enumeration: nothing is sampled.

A policy of five words speaks two of them. Its four parameters are shared by both steps, so that a gradient lost at one
step shows. All 25 sentences are rows of one step, each with its probability under the policy that speaks as its weight,
so the loss under ``sum(token)`` is an expectation. The target is what the design states: the KL of each token's
distribution at the prefix as it was sampled, the prefix's own probability held fixed.

`V` words, `P` parameters, `S` sentences.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import megatron_pgloss as pg
from support.steps import ONE

V, P = 5, 4
SENTENCES = [(x, y) for x in range(V) for y in range(V)]


def table(seed: int) -> Tensor:
    """[1 + V, V, P]: what each parameter adds to a logit, at the first step and after each first word."""
    return torch.randn(1 + V, V, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TABLE = table(0)
THETA = torch.tensor([0.7, -0.4, 0.2, 0.5], dtype=torch.float64)
# Other policies are other parameters: near ones for those that speak, a farther one for the reference.
OLD, MU, REF = THETA + 0.3 * torch.randn(3, P, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
REF = REF + 0.4


def logp(theta: Tensor) -> Tensor:
    """Log-probs [1 + V, V]: row 0 of the first word, row 1 + x of the second after x."""
    return (TABLE @ theta).log_softmax(-1)


def prefixes(theta: Tensor) -> Tensor:
    """Probability [1 + V] that a row of `logp` is reached: 1, then that of its first word."""
    return torch.cat([torch.ones(1, dtype=torch.float64), logp(theta)[0].exp()])


def jacobian(value: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.autograd.functional.jacobian(value, THETA)  # type: ignore[no-any-return]


def gradient_of_kl(base: Tensor, speaker: Tensor) -> Tensor:
    """[P]: of sum over prefixes of P(prefix) KL(pi || base), prefixes spoken by ``speaker`` and held fixed."""

    def kl(theta: Tensor) -> Tensor:
        new = logp(theta)
        return (prefixes(speaker)[:, None] * new.exp() * (new - logp(base))).sum()

    return jacobian(kl)


def term(estimator: str, gradient: str, base: Tensor, weight_base: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient [P] by the stated slopes: E over prefix and word of value and of slope * d log pi."""
    new = logp(THETA)
    d = new - logp(base)
    value = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) + d - 1, "abs": d.abs()}[estimator]
    slope = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - torch.exp(-d), "abs": d.sign()}[estimator]
    if gradient == "k2":
        slope = d
    if gradient == "weighted":
        r = torch.exp(new - logp(weight_base))
        value, slope = r * value, r * (value + slope)
    spoken = prefixes(speaker)[:, None] * logp(speaker).exp()
    return (spoken * value).sum(), torch.einsum("pv,pv,pvk->k", spoken, slope, jacobian(logp))


def answer(part: pg.KL, speaker: Tensor) -> tuple[Tensor, Tensor]:
    """What the package says: value, and gradient [P]."""
    tokens = torch.tensor([(0, x, y) for x, y in SENTENCES])

    def spoken(theta: Tensor) -> Tensor:
        """Log-probs [S, 3] of the sentences' words in token order; nothing is known of the first token."""
        rows = logp(theta)
        words = torch.stack([torch.stack([rows[0, x], rows[1 + x, y]]) for x, y in SENTENCES])
        return torch.cat([torch.full((len(SENTENCES), 1), float("nan"), dtype=torch.float64), words], 1)

    chance = spoken(speaker)[:, 1:].sum(1).exp()
    batch = pg.TokenBatch.from_padded(
        tokens=tokens,
        lengths=[3] * len(SENTENCES),
        action_mask=torch.tensor([[False, True, True]] * len(SENTENCES)),
        advantages=torch.ones(len(SENTENCES), dtype=torch.float64),
        old_logprobs=spoken(OLD),
        rollout_logprobs=spoken(MU),
        ref_logprobs=spoken(REF),
        weights={"kl": chance[:, None].expand(-1, 3)},
    )
    (micro,) = pg.plan([batch], pg.LossSpec(components=[part]), split=ONE).microbatches()
    theta = THETA.clone().requires_grad_()
    # Position 0 predicts the first word, position 1 the second after it, the last predicts nothing.
    rows = [0] * len(SENTENCES), [1 + x for x, _ in SENTENCES], [0] * len(SENTENCES)
    logits = (TABLE @ theta)[torch.tensor(rows).T]
    out = pg.policy_loss(pg.token_logprobs(logits, micro.targets), micro)
    (grad,) = torch.autograd.grad(out.loss, theta)
    return out.loss.detach(), grad


def near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def far(got: Tensor, expected: Tensor) -> None:
    """Not a matter of rounding."""
    assert float((got - expected).abs().max()) > 0.02 * float(expected.abs().max())


BASES = {"ref": REF, "old": OLD, "rollout": MU}
SPEAKERS = {"the policy": THETA, "old": OLD, "mu": MU}
FORMS = [(k, g) for k in ("k1", "k2", "k3", "abs") for g in ("plain", "k2", "weighted")]


@pytest.mark.parametrize("speaker", SPEAKERS)
@pytest.mark.parametrize("to", BASES)
@pytest.mark.parametrize("weight", ["old", "rollout"])
@pytest.mark.parametrize(("estimator", "gradient"), FORMS)
def test_value_and_gradient_are_those_of_the_stated_form(
    estimator: str, gradient: str, to: str, weight: str, speaker: str
) -> None:
    value, grad = answer(pg.KL(estimator=estimator, gradient=gradient, to=to, base=weight, normalizer="sum(token)"),
                         SPEAKERS[speaker])  # fmt: skip
    want_value, want = term(estimator, gradient, BASES[to], BASES[weight], SPEAKERS[speaker])
    near(value, want_value)
    near(grad, want)


@pytest.mark.parametrize("to", BASES)
@pytest.mark.parametrize("weight", ["old", "rollout"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_k1_and_k3_have_the_gradient_of_the_kl_at_each_prefix(estimator: str, to: str, weight: str) -> None:
    """Whoever of old and mu spoke, with the weight of the one who did; with the other's weight they do not."""
    part = pg.KL(estimator=estimator, gradient="weighted", to=to, base=weight, normalizer="sum(token)")
    near(answer(part, BASES[weight])[1], gradient_of_kl(BASES[to], BASES[weight]))
    other = {"old": MU, "rollout": OLD}[weight]
    far(answer(part, other)[1], gradient_of_kl(BASES[to], other))


@pytest.mark.parametrize("to", BASES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_gradient_of_k2_is_that_of_the_kl_on_policy_alone(estimator: str, to: str) -> None:
    """Plain k2, and straight-through under any value."""
    forms = [pg.KL(estimator=estimator, gradient="k2", to=to, normalizer="sum(token)")]
    if estimator == "k2":
        forms.append(forms[0].replace(gradient="plain"))
    for part in forms:
        near(answer(part, THETA)[1], gradient_of_kl(BASES[to], THETA))
        far(answer(part, OLD)[1], gradient_of_kl(BASES[to], OLD))


@pytest.mark.parametrize("speaker", SPEAKERS)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_plain_k1_and_k3_never_have_it(estimator: str, speaker: str) -> None:
    part = pg.KL(estimator=estimator, normalizer="sum(token)")
    far(answer(part, SPEAKERS[speaker])[1], gradient_of_kl(REF, SPEAKERS[speaker]))


def test_on_policy_plain_k1_pulls_nowhere_and_plain_k3_towards_the_other_direction() -> None:
    """E[d log pi] = 0; and E[(1 - ref/pi) d log pi] is the gradient of KL(ref || pi)."""
    assert float(answer(pg.KL(estimator="k1", normalizer="sum(token)"), THETA)[1].abs().max()) < 1e-14

    def other_way(theta: Tensor) -> Tensor:
        return (prefixes(THETA)[:, None] * logp(REF).exp() * (logp(REF) - logp(theta))).sum()

    near(answer(pg.KL(estimator="k3", normalizer="sum(token)"), THETA)[1], jacobian(other_way))


def test_expected_values_are_the_kl_where_they_should_be() -> None:
    """k1 and k3 on policy; weighted, whoever spoke."""
    for speaker, gradient in ((THETA, "plain"), (OLD, "weighted")):
        new, chance = logp(THETA), prefixes(speaker)[:, None]
        kl = (chance * new.exp() * (new - logp(REF))).sum()
        for estimator in ("k1", "k3"):
            near(answer(pg.KL(estimator=estimator, gradient=gradient, normalizer="sum(token)"), speaker)[0], kl)
