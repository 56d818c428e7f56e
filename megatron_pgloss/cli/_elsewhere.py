"""The flags that give the same loss in other libraries, with known differences, for each preset.

They were read from the libraries' public code of July and August 2026 (verl, TRL, slime, NeMo-RL) and of prime-rl
559b447. ``actor.`` stands for ``actor_rollout_ref.actor.``, ``loss_fn.`` for NeMo-RL's loss configuration. A preset
that is not listed has no counterpart that we know of.
"""

from __future__ import annotations

LIBRARIES = ("verl", "TRL", "slime", "NeMo-RL", "prime-rl")

ALWAYS: dict[str, str] = {
    "verl": "log-ratios are clamped to +-20; the vanilla loss has the dual clip on (clip_ratio_c=3); counts are global "
    "only where the trainer passes them on, else of the micro-batch",
    "TRL": "loss types grpo, sapo, bnpo, dr_grpo and luspo average inside a micro-batch, then over accumulation steps; "
    "dapo, cispo and vespo divide by the global count",
    "slime": "a rollout's sequences share one mean, over all rollouts of the batch; with --calculate-per-token-loss a "
    "fully masked sample counts as one token",
    "NeMo-RL": "1e-8 is added to the denominators; KL's log-ratio is clamped to 20, its value to 10",
    "prime-rl": "every component is divided by its own global number of tokens; tokens of zero advantage leave mask "
    "and count by default",
}
"""Differences of a library that hold for all presets."""

Same = tuple[str, str]
"""Flags, and how they differ from the preset beside `ALWAYS` ('' where nothing else is known). Fields in braces are
filled with the spec's own numbers (`megatron_pgloss.cli._flags`)."""

_CLIP = "actor.clip_ratio_low={low} actor.clip_ratio_high={high} {dual}"
_VERL = f"{_CLIP} {{agg}} {{kl}} {{entropy}}"
_TRL = "{agg}, epsilon={low}, epsilon_high={high}, {kl}"
_SLIME = "--advantage-estimator grpo --eps-clip {low} --eps-clip-high {high} {dual} {agg} {kl} {entropy}"
_NEMO = "loss_fn.ratio_clip_min={low} loss_fn.ratio_clip_max={high} {dual} {agg} {kl}"
_PRIME = ("[trainer.loss] type='custom' import_path=FUNCTION", "its own losses have no ratio clip")
_IGNORES = "ignores loss_agg_mode"
_COV = "chosen inside a micro-batch"

ELSEWHERE: dict[str, dict[str, Same]] = {
    "reinforce": {
        "verl": ("algorithm.rollout_correction.bypass_mode=true loss_type=reinforce; {agg} {kl} {entropy}",
                 "no old policy at all"),
        "TRL": ("{agg}, num_iterations=1, steps_per_generation=gradient_accumulation_steps, {kl}", ""),
        "NeMo-RL": ("loss_fn.disable_ppo_ratio=true {agg} {kl}", ""),
    },
    "ppo": {"verl": (_VERL, ""), "TRL": (_TRL, ""), "slime": (_SLIME, ""), "NeMo-RL": (_NEMO, ""), "prime-rl": _PRIME},
    "lite_ppo": {
        "verl": (_VERL, "batch deviation of the advantages is not among its estimators"),
        "TRL": (f"{_TRL}, scale_rewards='batch'", ""),
        "slime": (f"{_SLIME} --normalize-advantages", "whitens tokens, not rewards"),
    },
    "grpo": {
        "verl": (_VERL, "KL's value is clamped to +-10; fully masked rows are counted where the global count is given"),
        "TRL": (_TRL, "counts every completion, also one without tokens"),
        "slime": (_SLIME, "KL clamped to +-10"),
        "NeMo-RL": (_NEMO, ""),
        "prime-rl": _PRIME,
    },
    "dr_grpo": {
        "verl": (f"{_VERL}; algorithm.norm_adv_by_std_in_grpo=false",
                 "without loss_scale_factor the divisor is the padded width; up to 0.7.0 not divided by the sequences"),
        "TRL": (f"{_TRL}, scale_rewards='none'", ""),
        "slime": ("--disable-grpo-std-normalization --custom-pg-loss-reducer-function-path REDUCER", "by a function"),
        "prime-rl": _PRIME,
    },
    "dapo": {
        "verl": (_VERL, ""),
        "TRL": (_TRL, "overlong='drop' is mask_truncated_completions=True"),
        "slime": (_SLIME, ""),
        "NeMo-RL": (_NEMO, ""),
        "prime-rl": _PRIME,
    },
    "echo": {
        "prime-rl": ("algorithm type='echo' with roles.tool.alpha=0.1",
                     "its policy loss is not clipped; variant='prime_rl' has its averaging and coefficient"),
    },
    "gspo": {
        "verl": (f"actor.policy_loss.loss_mode=gspo {_CLIP} {{kl}} {{entropy}}",
                 f"{_IGNORES} for the sequence mean; always the token form"),
        "TRL": (f"importance_sampling_level='sequence', {_TRL}", ""),
        "slime": ("--advantage-estimator gspo --eps-clip {low} --eps-clip-high {high} {agg} {kl} {entropy}", ""),
        "NeMo-RL": (f"loss_fn.sequence_level_importance_ratios=true {_NEMO}", ""),
    },
    "gspo_token": {
        "verl": (f"actor.policy_loss.loss_mode=gspo {_CLIP} {{kl}} {{entropy}}", f"{_IGNORES}"),
        "TRL": ("experimental gspo_token trainer", ""),
    },
    "luspo": {"TRL": ("loss_type='luspo', importance_sampling_level='sequence', epsilon={low}, epsilon_high={high}, "
                      "{kl}", "")},
    "gmpo": {
        "verl": (f"actor.policy_loss.loss_mode=geo_mean {_CLIP} {{kl}} {{entropy}}",
                 "the mean over sequences is that of each micro-batch"),
        "TRL": ("experimental gmpo trainer", ""),
    },
    "cispo": {
        "verl": ("actor.policy_loss.loss_mode=cispo actor.clip_ratio_high={high} {agg} {kl} {entropy}",
                 "bounds are 1 +- eps, lower too"),
        "TRL": ("loss_type='cispo', epsilon_high={above}, {kl}",
                "epsilon_high is the bound itself, not a distance from 1"),
        "slime": ("--advantage-estimator cispo --eps-clip-high {high} {agg} {kl} {entropy}", "bounds are 1 +- eps"),
        "NeMo-RL": ("loss_fn.use_cispo=true loss_fn.ratio_clip_max={high} {agg} {kl}", ""),
    },
    "aipo": {
        "verl": ("algorithm.rollout_correction.bypass_mode=true loss_type=reinforce rollout_is=token "
                 "rollout_is_threshold={cap}; {agg} {kl} {entropy}", ""),
        "NeMo-RL": ("loss_fn.disable_ppo_ratio=true loss_fn.use_importance_sampling_correction=true "
                    "loss_fn.truncated_importance_sampling_ratio={cap} {agg} {kl}", "the weight is old/mu, not pi/mu"),
    },
    "vespo": {"TRL": ("loss_type='vespo', {kl}", "")},
    "sapo": {
        "verl": ("actor.policy_loss.loss_mode=sapo {kl} {entropy}", _IGNORES),
        "TRL": ("loss_type='sapo', {kl}", ""),
    },
    "gpg": {"verl": ("actor.policy_loss.loss_mode=gpg {agg} {kl} {entropy}", "zero advantages stay in the count")},
    "dro": {"verl": ("actor.policy_loss.loss_mode=dro {agg} {kl} {entropy}", "")},
    "opsm": {
        "TRL": (f"off_policy_mask_threshold={{threshold}}, {_TRL}", ""),
        "slime": (f"{_SLIME} --use-opsm --opsm-delta {{threshold}}", ""),
    },
    "dppo_tv": {"verl": ("actor.policy_loss.loss_mode=dppo_tv {agg} {kl} {entropy}",
                         "A = 0 is tested against the lower bound")},
    "dppo_kl": {"verl": ("actor.policy_loss.loss_mode=dppo_kl {agg} {kl} {entropy}", "A = 0 is tested as if negative")},
    "prime_dppo": {"prime-rl": ("[trainer.loss] type='default' (until August 2026)", "")},
    "prime_ipo": {"prime-rl": ("[trainer.loss] type='ipo'", "its defaults changed with time: eps 0.3, kl_tau 0 later")},
    "icepop": {
        "verl": (f"algorithm.rollout_correction.rollout_is=token rollout_is_threshold='{{floor}}_{{ceiling}}'; {_VERL}",
                 ""),
        "TRL": (f"vllm_importance_sampling_mode='token_mask', {_TRL}", "no lower bound unless given"),
        "slime": (f"{_SLIME} --use-tis --custom-tis-function-path ICEPOP", ""),
        "NeMo-RL": ("loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=icepop "
                    "loss_fn.truncated_importance_sampling_ratio_min={floor} "
                    f"loss_fn.truncated_importance_sampling_ratio={{ceiling}} {_NEMO}", ""),
        "prime-rl": ("[trainer.loss] type='icepop' ratio_low=0.2 ratio_high=5.0", "on pi/mu, without a clip"),
    },
    "high_entropy": {"TRL": (f"top_entropy_quantile=0.2, {_TRL}", "")},
    "clip_cov": {"verl": ("actor.policy_loss.loss_mode=clip_cov {agg} {kl} {entropy}",
                          f"{_COV}, by an unseeded draw")},
    "kl_cov": {"verl": ("actor.policy_loss.loss_mode=kl_cov {agg} {kl} {entropy}", _COV)},
    "distill": {
        "prime-rl": ("algorithm type='opd'", ""),
        "slime": ("--use-opd", "as a part of the advantage, from old log-probs"),
    },
    "opd": {
        "verl": ("distillation with use_policy_gradient=true", "as a part of the advantage"),
        "NeMo-RL": ("advantage estimator opd, loss_fn.disable_ppo_ratio=true", "from old log-probs, as an advantage"),
    },
    "critic": {
        "verl": ("critic.cliprange_value={clip}", "the mean is that of critic.loss_agg_mode"),
        "slime": ("--value-clip {clip}", ""),
        "TRL": ("experimental ppo trainer, cliprange_value={clip}", ""),
        "NeMo-RL": ("its value loss", "averaged over micro-batches"),
    },
}  # fmt: skip
"""Preset to library to flags. A preset that is another one of the table with other numbers stands after that one."""

MODES: dict[str, tuple[str, str]] = {
    "verl:token-mean": ("mean(token)", ""),
    "verl:seq-mean-token-mean": ("mean(sequence) > mean(token)", ""),
    "verl:seq-mean-token-sum": ("mean(sequence) > sum(token)", ""),
    "verl:seq-mean-token-sum-norm": ("mean(sequence) > sum(token)/{}", "from 0.7.1, with loss_scale_factor"),
    "verl-0.7.0:seq-mean-token-sum-norm": ("sum(sequence) > sum(token)/{}", "up to 0.7.0, on one rank"),
    "trl:grpo": ("mean(sequence) > mean(token)", "in TRL inside a micro-batch, then over accumulation steps"),
    "trl:sapo": ("mean(sequence) > mean(token)", "in TRL inside a micro-batch, then over accumulation steps"),
    "trl:bnpo": ("mean(token)", "in TRL inside a micro-batch"),
    "trl:dapo": ("mean(token)", ""),
    "trl:cispo": ("mean(token)", ""),
    "trl:vespo": ("mean(token)", ""),
    "trl:dr_grpo": ("mean(sequence) > sum(token)/{}", "in TRL by max_completion_length, inside a micro-batch"),
    "trl:luspo": ("mean(sequence) > sum(token)", "in TRL inside a micro-batch"),
    "slime:default": ("mean(episode) > mean(token)", "the sequences of a rollout share one mean"),
    "slime:per-token": ("mean(token)", "a fully masked sample counts as one token there"),
    "nemo_rl:token-level": ("mean(token)", ""),
    "nemo_rl:sequence-level": ("mean(sequence) > mean(token)", ""),
    "prime_rl:default": ("mean(token)", ""),
}
"""``library:mode`` to the normaliser that gives the same weights (``{}`` is the constant after ``@``), and a remark."""

PATHS: dict[str, str] = {
    "mean(token)": "DAPO's code",
    "mean(sequence) > mean(token)": "the original GRPO",
    "mean(sequence) > sum(token)": "",
    "mean(sequence) > sum(token)/4096": "Dr. GRPO",
    "sum(sequence) > sum(token)/4096": "",
    "mean(episode) > mean(token)": "",
    "mean(prompt) > mean(token)": "the DAPO paper: a token mean in each group",
    "mean(prompt) > mean(episode) > mean(token)": "every task counts the same, then every rollout of it",
    "mean(episode) > mean(turn) > mean(token)": "any nesting works",
    "sum(token)": "token sum",
}
"""The usual normalisers, each with a remark. The docs' table adds their names in other libraries from `MODES`."""
