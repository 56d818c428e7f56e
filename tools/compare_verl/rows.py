"""The lines of the comparison with verl 0.9.1, and why two sides may differ. See tools/compare_verl.sh."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import megatron_pgloss as pg
from compare_verl.pairs import (
    SEQUENCE,
    TOKEN,
    Answer,
    B,
    Data,
    Row,
    aggregated,
    kl_only,
    ours,
    plain,
    policy,
    rl,
    theirs,
)
from megatron_pgloss import spec as ps

CLIP = pg.Clip(low=0.2, high=0.28)
BOUNDS = dict(clip_ratio_low=0.2, clip_ratio_high=0.28)


def mode(name: str, here: str, same: str = "both", note: str = "", **info: Any) -> Row:
    """An aggregation mode, on -A log pi."""
    shown = f"agg_loss `{name}`" + "".join(f", {key}={value}" for key, value in info.items())
    return Row(shown, f"`{here}`", same, lambda d: (aggregated(d, name, **info), ours(d, plain(here))), note)


def loss(
    name: str, here: str, spec: pg.LossSpec, same: str = "both", note: str = "", agg: str = "token-mean",
    data: dict[str, Any] | None = None, **config: Any,
) -> Row:  # fmt: skip
    """A registered policy loss."""
    given = {k: v for k, v in config.items() if k not in ("policy_loss", "info")}
    given |= config.get("policy_loss", {})
    settings = ", ".join(f"{key}={value:g}" for key, value in given.items())
    return Row(
        f"`{name}` {settings}".strip(), here, same, lambda d: (policy(name, d, agg, **config), ours(d, spec)), note,
        data or {},
    )  # fmt: skip


def ranks(d: Data) -> tuple[Answer, Answer]:
    """verl's token mean on two data-parallel ranks, whose gradients are then averaged."""
    info = dict(dp_size=2, batch_num_tokens=int(d.mask.sum()))
    halves = [Data(**{k: v.clone() for k, v in vars(d).items()}) for _ in range(2)]
    halves[0].mask[B // 2 :] = False
    halves[1].mask[: B // 2] = False
    (v0, g0), (v1, g1) = (aggregated(half, "token-mean", **info) for half in halves)
    return ((v0 + v1) / 2, (g0 + g1) / 2), ours(d, plain(TOKEN))


def estimator(kind: str, form: dict[str, str], same: str = "both", note: str = "", **data: Any) -> Row:
    """verl's kl_penalty under the token mean."""

    def pair(d: Data) -> tuple[Answer, Answer]:
        from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

        mask = d.mask.double()
        return theirs(d, lambda x: agg_loss(kl_penalty(x, d.ref, kind), mask, "token-mean")), ours(d, kl_only(**form))

    here = ", ".join(f'{key}="{value}"' for key, value in form.items())
    return Row(f"kl_penalty `{kind}`", f"`KL({here})`", same, pair, note, data)


def correction(how: str, here: str, rule: Any, same: str = "both", note: str = "", count_rejected: bool = False,
               **options: Any) -> Row:  # fmt: skip
    """verl's rollout correction between old and rollout, on `vanilla`."""

    def pair(d: Data) -> tuple[Answer, Answer]:
        from verl.trainer.ppo.rollout_corr_helper import (
            compute_rollout_correction_weights,
            compute_rollout_rejection_mask,
        )

        mask, weights, ratio = d.mask.double(), None, d.old - d.rollout
        if "rollout_rs" in options:
            mask = compute_rollout_rejection_mask(ratio, mask, **options)[0]
        else:
            weights = compute_rollout_correction_weights(ratio, mask, **options)[0]
        seen = Data(**(vars(d) | {"mask": mask.bool()}))
        spec = rl(pg.Clip(low=0.2, high=0.28, dual=3.0), corrections=[rule], count_rejected=count_rejected)
        return policy("vanilla", seen, weights=weights, **BOUNDS), ours(d, spec)

    return Row(f"correction {how}", here, same, pair, note)


def value_loss(d: Data) -> tuple[Answer, Answer]:
    """verl's compute_value_loss."""
    from verl.trainer.ppo.core_algos import compute_value_loss

    def critic(v: Tensor) -> Tensor:
        return compute_value_loss(v, d.returns, d.values, d.mask.double(), cliprange_value=0.2)[0]  # type: ignore[no-any-return]

    return theirs(d, critic, d.value), ours(d, pg.LossSpec(components=[ps.Value(clip=0.2)]))


MODES = [
    mode("token-mean", TOKEN),
    Row("agg_loss `token-mean`, dp_size=2, batch_num_tokens", f"`{TOKEN}`", "both", ranks),
    mode("token-sum", "sum(token)"),
    mode("seq-mean-token-sum", "mean(sequence) > sum(token)"),
    mode("seq-mean-token-mean", SEQUENCE, "no", "verl adds 1e-8 to the length of every sequence"),
    mode("seq-mean-token-sum-norm", "mean(sequence) > sum(token)/4096", loss_scale_factor=4096),
    mode("seq-mean-token-sum-norm", "seq-mean-token-sum-norm/12",
         note="verl's default divisor is the padded width (here 12), which changes with padding; this package wants it "
         "written"),
    mode("seq-mean-token-sum", "mean(sequence) > sum(token)", "no",
         "given the batch size, verl counts a row that is masked whole; here `units='all'` does, for rows that a mask "
         "emptied, and a row without any action is excluded by name", global_batch_size=B),
]  # fmt: skip

LOSSES = [
    loss("vanilla", "`Clip(0.2, 0.28, dual=3)`", rl(pg.Clip(low=0.2, high=0.28, dual=3.0)), **BOUNDS),
    loss("vanilla", "`Clip(0.2, 0.28)`", rl(CLIP), "no",
         "verl's dual clip is on by default, here it is off unless asked for", data={"spread": 1.5}, **BOUNDS),
    loss("gspo", '`Clip`, ratio `sequence_token`, mean(token)', rl(CLIP, ratio="sequence_token"), **BOUNDS),
    loss("gspo", '`Clip`, ratio `sequence`, mean(token)', rl(CLIP, ratio="sequence"), "no",
         "through the mean (GSPO's paper) a token gets an equal part of its row's gradient, in verl (GSPO-token) its "
         "own; they differ once the advantage varies within a row", data={"spread": 0.1, "varied": True}, **BOUNDS),
    loss("gspo", "`gspo` preset", pg.presets.gspo(low=0.2, high=0.28), "no",
         "verl's 1e-8 in seq-mean-token-mean, nothing else", "seq-mean-token-mean", **BOUNDS),
    loss("sapo", "`sapo` preset", pg.presets.sapo(), "no",
         "verl's 1e-8 in seq-mean-token-mean, which `sapo` takes whatever mode was asked for"),
    loss("gpg", "`Reinforce`", plain(TOKEN)),
    loss("cispo", '`CISPO(0.2, 0.28, bound="relative")`', rl(ps.CISPO(low=0.2, high=0.28)), **BOUNDS),
    loss("dro", "`DRO(0.1)`", rl(ps.DRO(beta=0.1)), "gradient",
         "verl writes -A log pi, here it is -A (log pi - log old): a constant apart", policy_loss={"dro_beta": 0.1}),
    loss("geo_mean", "`GMPO(0.4, 0.4)`", pg.presets.gmpo(), "no",
         "verl adds 1e-8 to each length and takes a plain mean over the rows of the micro-batch, also of one that is "
         "masked whole", clip_ratio_low=0.4, clip_ratio_high=0.4),
    loss("geo_mean", "`GMPO(0.4, 0.4)`, no row masked whole", pg.presets.gmpo(), "no", "verl's 1e-8 in each length",
         data={"empty_row": False}, clip_ratio_low=0.4, clip_ratio_high=0.4),
    loss("dppo_tv", '`CISPO(high=20, bound="absolute")` and `TVGate(0.2, 0.28, base="old", zero="low")`',
         rl(ps.CISPO(high=20.0, bound="absolute"), gates=[ps.TVGate(low=0.2, high=0.28, base="old", zero="low")]),
         clip_ratio_c=20.0, **BOUNDS),
    loss("dppo_tv", "`dppo_tv` preset", pg.presets.dppo_tv(old="given", low=0.2, high=0.28).replace(
         gates=[ps.TVGate(low=0.2, high=0.28, base="old")]), "gradient",
         "-r A here, -sg(r) A log pi in verl: another value, the same gradient", clip_ratio_c=20.0, **BOUNDS),
    loss("dppo_kl", '`CISPO(high=20, bound="absolute")` and `KLGate(0.05, base="old")`',
         rl(ps.CISPO(high=20.0, bound="absolute"), gates=[ps.KLGate(threshold=0.05, base="old")]),
         note="verl adds 1e-8 to 1 - p: a token on the very edge could fall on the other side", clip_ratio_c=20.0,
         clip_ratio_low=0.05, clip_ratio_high=0.05),
    loss("kl_cov", "`kl_cov` preset", pg.presets.kl_cov(share=0.1, penalty=1.0),
         note="over the whole step here, per micro-batch in verl",
         policy_loss={"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}),
    loss("clip_cov", "`clip_cov` preset, all of the band", pg.presets.clip_cov(share=1.0, floor=0.5, ceiling=5.0),
         data={"spread": 0.02}, policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 5.0}),
    loss("clip_cov", "`clip_cov` preset", pg.presets.clip_cov(share=0.05, floor=0.0, ceiling=5.0), "no",
         "drawn by sample id and position here, the same on every layout; by the process's random state in verl, which "
         "also leaves out tokens that the clip holds", data={"spread": 0.02},
         policy_loss={"clip_cov_ratio": 0.05, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0}),
]  # fmt: skip

KLS = [
    estimator("k1", {"estimator": "k1"}),
    estimator("k2", {"estimator": "k2"}),
    estimator("k3", {"estimator": "k3"}),
    estimator("abs", {"estimator": "abs"}),
    estimator("k1+", {"estimator": "k1", "gradient": "k2"}),
    estimator("k3+", {"estimator": "k3", "gradient": "k2"}),
    estimator("k3", {"estimator": "k3"}, "no", "verl holds the estimate itself in [-10, 10], without a gradient beyond",
              spread=4.0),
]  # fmt: skip

TIS, REJECT = pg.TruncatedIS, ps.Reject
CORRECTIONS = [
    correction('IS "token", 1.2', "`TruncatedIS(high=1.2)`", TIS(high=1.2), rollout_is="token",
               rollout_is_threshold=1.2),
    correction('IS "sequence", 1.5', '`TruncatedIS(level="sequence", high=1.5)`', TIS(level="sequence", high=1.5),
               rollout_is="sequence", rollout_is_threshold=1.5),
    correction('IS "token", "0.8_1.2"', '`IcePop(0.8, 1.2)`, `count_rejected=True`', ps.IcePop(low=0.8, high=1.2),
               count_rejected=True, rollout_is="token", rollout_is_threshold="0.8_1.2"),
    correction('IS "token", 1.2, batch_normalize', "`TruncatedIS(high=1.2, normalize=True)`",
               TIS(high=1.2, normalize=True), "no", "verl divides by a mean with 1e-8 in its count",
               rollout_is="token", rollout_is_threshold=1.2, rollout_is_batch_normalize=True),
    correction('RS "token_k2", 0.05', '`Reject(estimator="k2", unit="token", high=0.05)`',
               REJECT(estimator="k2", unit="token", high=0.05), rollout_rs="token_k2", rollout_rs_threshold="0.05"),
    correction('RS "seq_sum_k3", 0.6', '`Reject(estimator="k3", statistic="sum", high=0.6)`',
               REJECT(estimator="k3", statistic="sum", high=0.6), rollout_rs="seq_sum_k3", rollout_rs_threshold="0.6"),
    correction('RS "seq_mean_k3", 0.1', '`Reject(estimator="k3", statistic="mean", high=0.1)`',
               REJECT(estimator="k3", statistic="mean", high=0.1), rollout_rs="seq_mean_k3",
               rollout_rs_threshold="0.1"),
    correction('RS "seq_max_k2", 0.3', '`Reject(estimator="k2", statistic="max", high=0.3)`',
               REJECT(estimator="k2", statistic="max", high=0.3), rollout_rs="seq_max_k2", rollout_rs_threshold="0.3"),
    correction('RS "seq_mean_k1", "0.9_1.1"', '`RatioMask(low=1/1.1, high=1/0.9)`',
               ps.RatioMask(low=1 / 1.1, high=1 / 0.9), note="verl bounds -log(old/mu), this package log(old/mu)",
               rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1"),
    correction('RS "token_k2", 0.05', '`Reject(estimator="k2", unit="token", high=0.05)`, `count_rejected=True`',
               REJECT(estimator="k2", unit="token", high=0.05), "no",
               "in verl a rejected token leaves the denominators; here that is a choice, and not the default",
               count_rejected=True, rollout_rs="token_k2", rollout_rs_threshold="0.05"),
]  # fmt: skip

ROWS = [*MODES, *LOSSES, *KLS, *CORRECTIONS, Row("compute_value_loss 0.2", "`Value(clip=0.2)`", "both", value_loss)]
