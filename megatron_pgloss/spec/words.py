"""Words of other libraries, and what is meant by them here: a wrong word in a spec gets the right one as its fix.

Similarity of letters does not find these. Only words that are unknown where they stand are looked up, so a word may
mean one thing as a keyword and another as a kind.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from megatron_pgloss.errors import DataError

ELSEWHERE: dict[str, tuple[str, ...]] = {
    # Coefficients.
    "beta": ("kl",), "kl_coef": ("kl",), "klcoef": ("kl",), "kl_loss_coef": ("kl",), "kl_penalty": ("kl",),
    "init_kl_coef": ("kl",), "reference_policy_kl_penalty": ("kl",), "use_kl_loss": ("kl",),
    "entropy_coeff": ("entropy",), "entropy_coef": ("entropy",), "ent_coef": ("entropy",), "lambda": ("coef",),
    "weight": ("coef",), "loss_weight": ("coef",),
    # Clips.
    "clip_ratio_low": ("low",), "eps_clip_low": ("low",), "ratio_clip_min": ("low",), "clip_low": ("low",),
    "epsilon": ("low", "high"), "eps": ("low", "high"), "eps_clip": ("low", "high"), "clip_ratio": ("low", "high"),
    "cliprange": ("low", "high", "clip"), "clip_range": ("low", "high", "clip"), "cliprange_value": ("clip",),
    "value_clip": ("clip",), "clip_ratio_high": ("high",), "epsilon_high": ("high",), "epsilon_low": ("low",),
    "eps_clip_high": ("high",), "ratio_clip_max": ("high",), "clip_high": ("high",), "clip_ratio_c": ("dual",),
    "eps_clip_c": ("dual",), "dual_clip": ("dual",), "ratio_clip_c": ("dual",),
    # Averages.
    "loss_agg_mode": ("normalizer",), "loss_type": ("normalizer", "surrogate"), "reduction": ("normalizer",),
    "aggregation": ("normalizer",), "token_level_loss": ("normalizer",), "loss_scale_factor": ("budget", "normalizer"),
    "max_completion_length": ("budget", "normalizer"), "max_tokens": ("budget",),
    # KL estimators (verl, OpenRLHF, Schulman's note).
    "low_var_kl": ("k3",), "low_variance_kl": ("k3",), "mse": ("k2",), "kl": ("k1",), "full": ("exact",),
    "kl_loss_type": ("kl_estimator", "estimator"), "kl_penalty_type": ("kl_estimator", "estimator"),
    "kl_type": ("kl_estimator", "estimator"),
    # Corrections, gates, masks.
    "tis": ("truncated_is", "corrections"), "truncated_importance_sampling": ("truncated_is", "corrections"),
    "rollout_is": ("truncated_is", "corrections"), "importance_sampling": ("truncated_is",),
    "tis_imp_ratio_cap": ("high", "corrections"), "rollout_is_threshold": ("high", "corrections"),
    "token_mask": ("icepop",), "sequence_mask": ("ratio_mask",), "mis": ("reject", "ratio_mask", "corrections"),
    "rejection_sampling": ("reject", "corrections"), "rollout_rs": ("reject", "corrections"),
    "off_policy_mask": ("sequence", "gates"), "off_policy_mask_threshold": ("threshold", "gates"),
    "mask_truncated_completions": ("drop_truncated", "overlong", "masks"),
    "overlong_filtering": ("drop_truncated", "overlong", "masks"), "rejected": ("count_rejected",),
    # Ratios, surrogates.
    "importance_sampling_level": ("ratio", "unit"), "seq": ("sequence",), "geo_mean": ("gmpo",), "vanilla": ("clip",),
    "ppo_clip": ("clip",), "pg": ("reinforce",), "policy_loss": ("policy_gradient", "surrogate"),
    "sft": ("cross_entropy", "nll"), "ce": ("cross_entropy",), "kl_div": ("kl",),
    # Advantages and ends of rollouts.
    "length": ("truncated",), "max_length": ("truncated",), "stop": ("success",), "timeout": ("fault", "truncated"),
    "error": ("fault",), "aborted": ("fault",), "abort": ("fault",), "completed": ("success",), "done": ("success",),
    "advantages": ("advantage",), "advantage": ("advantages",), "response_mask": ("action_mask",),
    "loss_mask": ("action_mask",), "completion_mask": ("action_mask",), "input_ids": ("tokens",),
    "ref_log_prob": ("ref_logprobs",), "old_log_probs": ("old_logprobs",), "old_log_prob": ("old_logprobs",),
    "rollout_log_probs": ("rollout_logprobs",), "uid": ("prompt_ids",), "group_ids": ("prompt_ids",),
    "micro_batch_size": ("sequences",), "max_token_len": ("max_tokens",),
}  # fmt: skip
"""A word to the words that may be meant, best first; the hint names the first one that is known in that place."""


def nearest(word: str, known: Sequence[str]) -> str | None:
    """A hint ``did you mean ...?``: another library's word for it, or a similar one; None where nothing is close."""
    meant = [name for name in ELSEWHERE.get(word.lower().replace("-", "_"), ()) if name in known]
    if len(meant) > 1 and meant[:2] == ["low", "high"]:
        return "did you mean 'low' and 'high'?"
    close = meant or difflib.get_close_matches(word[:64], known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else None


Target = TypeVar("Target", bound=Callable[..., Any])


def closed(target: Target) -> Target:
    """A class or function that refuses keywords that it does not have, and the lack of those that it needs, by
    `DataError` with the nearest word. Python's own TypeError names none, and is no error of this package.
    """
    if isinstance(target, type):
        make: Any = target
        make.__init__ = _refusing(make.__init__, target.__name__, skip=1)
        return target
    return cast(Target, _refusing(target, target.__name__, skip=0))


def _refusing(make: Callable[..., Any], owner: str, skip: int) -> Callable[..., Any]:
    items = list(inspect.signature(make).parameters.values())[skip:]
    named = [one for one in items if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [one.name for one in named]
    hands_on = any(one.kind is one.VAR_KEYWORD for one in items)  # to a function that refuses them itself
    needed = [(one.name, one.kind is one.KEYWORD_ONLY) for one in named if one.default is one.empty]

    @functools.wraps(make)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given if not hands_on else ():
            if name not in known:
                fix = nearest(name, known) or f"remove {name!r}"
                raise DataError(f"{owner} has no argument {name!r}", expected=", ".join(known), fix=fix)
        for place, (name, by_name) in enumerate(needed):
            if name not in given and (by_name or place >= len(args) - skip):
                raise DataError(f"{owner} has no {name}", expected=f"{owner}({name}=...)")
        return make(*args, **given)

    return checked
