"""Named recipes as specs. Unnamed parts are off; every part is a keyword.

``normalizer=`` sets the policy-gradient term and the terms over the same tokens, never cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_pgloss.errors import SpecError
from megatron_pgloss.presets.clipped import (
    clip_cov,
    dapo,
    dr_grpo,
    echo,
    fipo,
    gmpo,
    grpo,
    gspo,
    gspo_token,
    high_entropy,
    icepop,
    kl_cov,
    lite_ppo,
    luspo,
    opsm,
    ppo,
)
from megatron_pgloss.presets.weighted import (
    aipo,
    cispo,
    critic,
    distill,
    dppo_kl,
    dppo_tv,
    dro,
    gpg,
    kimi,
    m2po,
    nll,
    opd,
    prime_dppo,
    prime_ipo,
    real,
    reinforce,
    sapo,
    topr,
    vespo,
)
from megatron_pgloss.spec import LossSpec
from megatron_pgloss.spec.words import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A row of the preset table."""

    build: Callable[..., LossSpec]
    source: str
    equation: str
    """Its place in the source."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Keywords with which docs and tests build the preset: values for those that have no default."""


def _row(build: Callable[..., LossSpec], source: str, equation: str, **example: Any) -> Preset:
    return Preset(build=build, source=source, equation=equation, example=example)


PRESETS: dict[str, Preset] = {
    "reinforce": _row(reinforce, "Williams 1992", "eq. 4"),
    "ppo": _row(ppo, "arXiv 1707.06347", "eq. 7"),
    "grpo": _row(grpo, "arXiv 2402.03300", "eq. 3 and 4"),
    "dr_grpo": _row(dr_grpo, "arXiv 2503.20783", "section 3.2", budget=4096),
    "dapo": _row(dapo, "arXiv 2503.14476", "eq. 8 to 10"),
    "echo": _row(echo, "arXiv 2605.24517", "the observation term"),
    "gspo": _row(gspo, "arXiv 2507.18071", "eq. 5 to 7"),
    "gspo_token": _row(gspo_token, "arXiv 2507.18071", "eq. 13 and 14"),
    "luspo": _row(luspo, "arXiv 2602.05261", "the objective"),
    "gmpo": _row(gmpo, "arXiv 2507.20673", "the objective"),
    "cispo": _row(cispo, "arXiv 2506.13585", "eq. 4 and 5"),
    "aipo": _row(aipo, "arXiv 2505.24034", "the importance weight"),
    "topr": _row(topr, "arXiv 2503.14286", "the tapered weights"),
    "vespo": _row(vespo, "arXiv 2602.10693", "the gamma kernel"),
    "sapo": _row(sapo, "arXiv 2511.20347", "the soft gate"),
    "gpg": _row(gpg, "arXiv 2504.02546", "the objective"),
    "dro": _row(dro, "arXiv 2405.19107", "the squared residual"),
    "kimi": _row(kimi, "arXiv 2501.12599", "the policy update"),
    "fipo": _row(fipo, "arXiv 2603.19835", "the influence weight"),
    "real": _row(real, "arXiv 2602.05630", "the loss with anchor logits"),
    "opsm": _row(opsm, "arXiv 2512.02556", "off-policy sequence masking", threshold=0.1),
    "dppo_tv": _row(dppo_tv, "arXiv 2602.04879", "binary total variation"),
    "dppo_kl": _row(dppo_kl, "arXiv 2602.04879", "binary KL"),
    "prime_dppo": _row(prime_dppo, "prime-rl 559b447", "the default rl loss"),
    "prime_ipo": _row(prime_ipo, "prime-rl 559b447", "the ipo rl loss"),
    "icepop": _row(icepop, "arXiv 2510.18855", "the masked objective"),
    "high_entropy": _row(high_entropy, "arXiv 2506.01939", "the top 20 percent"),
    "clip_cov": _row(clip_cov, "arXiv 2505.22617", "Clip-Cov"),
    "kl_cov": _row(kl_cov, "arXiv 2505.22617", "KL-Cov"),
    "m2po": _row(m2po, "arXiv 2510.01161", "the second moment"),
    "distill": _row(distill, "prime-rl 559b447", "ref_kl"),
    "opd": _row(opd, "Thinking Machines 2025", "on-policy distillation"),
    "nll": _row(nll, "arXiv 2504.05118", "the likelihood term"),
    "lite_ppo": _row(lite_ppo, "arXiv 2508.08221", "the loss"),
    "critic": _row(critic, "arXiv 1707.06347", "the value term"),
}


_ADVANTAGES = ("gae", "gdpo", "opo", "reinforce_plus_plus", "rloo", "turn_gae")
"""Names of recipes that make advantages, and go with any loss."""


def _instead(name: str) -> str | None:
    if name in _ADVANTAGES:
        return f"{name} is a way to make advantages: pg.advantages.{name}, beside presets.reinforce or presets.ppo"
    return nearest(name, list(PRESETS))


def get(name: str, **parts: Any) -> LossSpec:
    """The preset called ``name`` with its parts as keywords.

    Raises:
        SpecError: there is no such preset; the error gives the nearest name.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise SpecError(f"no preset {name!r}", expected=", ".join(PRESETS), fix=_instead(str(name)))
    return PRESETS[name].build(**parts)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"no preset {name!r}; {_instead(name) or 'presets.PRESETS lists them'}")


__all__ = [
    "PRESETS",
    "Preset",
    "aipo",
    "cispo",
    "clip_cov",
    "critic",
    "dapo",
    "distill",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dro",
    "echo",
    "fipo",
    "get",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "gspo_token",
    "high_entropy",
    "icepop",
    "kimi",
    "kl_cov",
    "lite_ppo",
    "luspo",
    "m2po",
    "nll",
    "opd",
    "opsm",
    "ppo",
    "prime_dppo",
    "prime_ipo",
    "real",
    "reinforce",
    "sapo",
    "topr",
    "vespo",
]
