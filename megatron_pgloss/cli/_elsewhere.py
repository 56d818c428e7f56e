"""What gives the same loss in other libraries: flags and known differences per preset.

Read from their public code of July and August 2026 (verl, TRL, slime, NeMo-RL) and of prime-rl 559b447. ``actor.``
stands for ``actor_rollout_ref.actor.``, ``loss_fn.`` for NeMo-RL's loss configuration. What is not listed has no
counterpart that we know of.
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
"""Flags, and how they differ from the preset beside `ALWAYS` ('' where nothing else is known)."""

_V = "actor.loss_agg_mode=token-mean"
_VS = "actor.loss_agg_mode=seq-mean-token-mean"
_CLIP = "actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.2"
_SLIME = "--advantage-estimator grpo --eps-clip 0.2"
_NEMO = "loss_fn.ratio_clip_min=0.2 loss_fn.ratio_clip_max=0.2"
_PRIME = ("[trainer.loss] type='custom' import_path=FUNCTION", "its own losses have no ratio clip")
_IGNORES = "ignores loss_agg_mode"
_COV = "chosen inside a micro-batch"

ELSEWHERE: dict[str, dict[str, Same]] = {
    "reinforce": {
        "verl": (f"algorithm.rollout_correction.bypass_mode=true loss_type=reinforce; {_V}", "no old policy at all"),
        "TRL": ("loss_type='dapo', num_iterations=1, steps_per_generation=gradient_accumulation_steps", ""),
        "NeMo-RL": ("loss_fn.disable_ppo_ratio=true loss_fn.token_level_loss=true", ""),
    },
    "ppo": {
        "verl": (f"{_CLIP} {_V}", ""),
        "TRL": ("loss_type='dapo', epsilon=0.2, epsilon_high=0.2, beta=0", ""),
        "slime": (f"{_SLIME} --calculate-per-token-loss", "--eps-clip-c for a dual clip"),
        "NeMo-RL": (f"{_NEMO} loss_fn.token_level_loss=true", ""),
        "prime-rl": _PRIME,
    },
    "lite_ppo": {
        "verl": (f"{_CLIP} {_V}", "batch deviation of the advantages is not among its estimators"),
        "TRL": ("loss_type='dapo', epsilon=0.2, scale_rewards='batch', beta=0", ""),
        "slime": (f"{_SLIME} --calculate-per-token-loss --normalize-advantages", "whitens tokens, not rewards"),
    },
    "grpo": {
        "verl": (f"{_CLIP} {_VS} actor.use_kl_loss=true actor.kl_loss_coef=0.04 actor.kl_loss_type=low_var_kl",
                 "KL's value is clamped to +-10; fully masked rows are counted where the global count is given"),
        "TRL": ("loss_type='grpo', epsilon=0.2, beta=0.04", "counts every completion, also one without tokens"),
        "slime": (f"{_SLIME} --use-kl-loss --kl-loss-coef 0.04 --kl-loss-type low_var_kl", "KL clamped to +-10"),
        "NeMo-RL": (f"{_NEMO} loss_fn.token_level_loss=false loss_fn.reference_policy_kl_penalty=0.04", ""),
        "prime-rl": _PRIME,
    },
    "dr_grpo": {
        "verl": (f"{_CLIP} actor.loss_agg_mode=seq-mean-token-sum-norm actor.loss_scale_factor=BUDGET; "
                 "algorithm.norm_adv_by_std_in_grpo=false",
                 "without loss_scale_factor the divisor is the padded width; up to 0.7.0 not divided by the sequences"),
        "TRL": ("loss_type='dr_grpo', max_completion_length=BUDGET, scale_rewards='none', beta=0", ""),
        "slime": ("--disable-grpo-std-normalization --custom-pg-loss-reducer-function-path REDUCER", "by a function"),
        "prime-rl": _PRIME,
    },
    "dapo": {
        "verl": (f"actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.28 {_V}", ""),
        "TRL": ("loss_type='dapo', epsilon=0.2, epsilon_high=0.28, beta=0; overlong: mask_truncated_completions",
                ""),
        "slime": (f"{_SLIME} --eps-clip-high 0.28 --calculate-per-token-loss", ""),
        "NeMo-RL": ("loss_fn.ratio_clip_min=0.2 loss_fn.ratio_clip_max=0.28 loss_fn.token_level_loss=true", ""),
        "prime-rl": _PRIME,
    },
    "echo": {
        "prime-rl": ("algorithm type='echo' with roles.tool.alpha=0.1",
                     "its policy loss is not clipped; variant='prime_rl' has its averaging and coefficient"),
    },
    "gspo": {
        "verl": ("actor.policy_loss.loss_mode=gspo", f"{_IGNORES} for the sequence mean; always the token form"),
        "TRL": ("importance_sampling_level='sequence', loss_type='grpo', epsilon=3e-4, epsilon_high=4e-4, beta=0", ""),
        "slime": ("--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4", ""),
        "NeMo-RL": ("loss_fn.sequence_level_importance_ratios=true loss_fn.token_level_loss=false", ""),
    },
    "gspo_token": {
        "verl": ("actor.policy_loss.loss_mode=gspo", f"{_IGNORES}"),
        "TRL": ("experimental gspo_token trainer", ""),
    },
    "luspo": {"TRL": ("loss_type='luspo', importance_sampling_level='sequence'", "")},
    "gmpo": {
        "verl": ("actor.policy_loss.loss_mode=geo_mean", "the mean over sequences is that of each micro-batch"),
        "TRL": ("experimental gmpo trainer", ""),
    },
    "cispo": {
        "verl": (f"actor.policy_loss.loss_mode=cispo actor.clip_ratio_high=4 {_V}", "bounds are 1 +- eps, lower too"),
        "TRL": ("loss_type='cispo', epsilon_high=5", "epsilon_high is the bound itself, not a distance from 1"),
        "slime": ("--advantage-estimator cispo --eps-clip-high 4 --calculate-per-token-loss", "bounds are 1 +- eps"),
        "NeMo-RL": ("loss_fn.use_cispo=true loss_fn.ratio_clip_max=4 loss_fn.token_level_loss=true", ""),
    },
    "aipo": {
        "verl": (f"algorithm.rollout_correction.bypass_mode=true loss_type=reinforce rollout_is=token "
                 f"rollout_is_threshold=4; {_V}", ""),
        "NeMo-RL": ("loss_fn.disable_ppo_ratio=true loss_fn.use_importance_sampling_correction=true "
                    "loss_fn.truncated_importance_sampling_ratio=4", "the weight is old/mu, not pi/mu"),
    },
    "vespo": {"TRL": ("loss_type='vespo'", "")},
    "sapo": {
        "verl": ("actor.policy_loss.loss_mode=sapo", _IGNORES),
        "TRL": ("loss_type='sapo'", ""),
    },
    "gpg": {"verl": (f"actor.policy_loss.loss_mode=gpg {_V}", "zero advantages stay in the count")},
    "dro": {"verl": (f"actor.policy_loss.loss_mode=dro {_V}", "")},
    "opsm": {
        "TRL": ("off_policy_mask_threshold=0.1, loss_type='grpo'", ""),
        "slime": (f"{_SLIME} --use-opsm --opsm-delta 0.1", ""),
    },
    "dppo_tv": {"verl": (f"actor.policy_loss.loss_mode=dppo_tv {_V}", "A = 0 is tested against the lower bound")},
    "dppo_kl": {"verl": (f"actor.policy_loss.loss_mode=dppo_kl {_V}", "A = 0 is tested as if negative")},
    "prime_dppo": {"prime-rl": ("[trainer.loss] type='default' (until August 2026)", "")},
    "prime_ipo": {"prime-rl": ("[trainer.loss] type='ipo'", "its defaults changed with time: eps 0.3, kl_tau 0 later")},
    "icepop": {
        "verl": ("algorithm.rollout_correction.rollout_is=token rollout_is_threshold='0.5_5.0'", ""),
        "TRL": ("vllm_importance_sampling_mode='token_mask', loss_type='grpo'", "no lower bound unless given"),
        "slime": ("--use-tis --custom-tis-function-path ICEPOP", ""),
        "NeMo-RL": ("loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=icepop "
                    "loss_fn.truncated_importance_sampling_ratio_min=0.5 loss_fn.truncated_importance_sampling_ratio=5",
                    ""),
        "prime-rl": ("[trainer.loss] type='icepop' ratio_low=0.2 ratio_high=5.0", "on pi/mu, without a clip"),
    },
    "high_entropy": {"TRL": ("top_entropy_quantile=0.2, loss_type='dapo'", "")},
    "clip_cov": {"verl": (f"actor.policy_loss.loss_mode=clip_cov {_V}", f"{_COV}, by an unseeded draw")},
    "kl_cov": {"verl": (f"actor.policy_loss.loss_mode=kl_cov {_V}", _COV)},
    "distill": {
        "prime-rl": ("algorithm type='opd'", ""),
        "slime": ("--use-opd", "as a part of the advantage, from old log-probs"),
    },
    "opd": {
        "verl": ("distillation with use_policy_gradient=true", "as a part of the advantage"),
        "NeMo-RL": ("advantage estimator opd, loss_fn.disable_ppo_ratio=true", "from old log-probs, as an advantage"),
    },
    "critic": {
        "verl": ("critic.cliprange_value=0.2", "the mean is that of critic.loss_agg_mode"),
        "slime": ("--value-clip 0.2", ""),
        "TRL": ("experimental ppo trainer, cliprange_value=0.2", ""),
        "NeMo-RL": ("its value loss", "averaged over micro-batches"),
    },
}  # fmt: skip

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
"""``library:mode`` to the normaliser that gives the same weights ({}: the constant after ``@``), and a remark."""

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
"""The usual normalisers and what is said of them beside `MODES`; the docs' table."""
