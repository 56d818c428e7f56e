"""Flags of other libraries for a spec: the templates of `_elsewhere` filled with the spec's own numbers.

Flags are shown only where they give the spec: the preset of the template is built again with the numbers that the
template holds, and must be equal to the spec. A change for which a library has no flag is named, never left out.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

from megatron_pgloss import presets
from megatron_pgloss.cli._elsewhere import ALWAYS, ELSEWHERE, LIBRARIES
from megatron_pgloss.errors import SpecError
from megatron_pgloss.presets.known import keywords
from megatron_pgloss.spec import LossSpec, PolicyGradient

COVERS: dict[str, tuple[str, ...]] = {
    "low": ("low",), "high": ("high",), "dual": ("dual",), "kl": ("kl", "kl_estimator"), "entropy": ("entropy",),
    "agg": ("normalizer",), "floor": ("floor",), "ceiling": ("ceiling",), "cap": ("cap",), "above": ("high",),
    "threshold": ("threshold",), "clip": ("clip",),
}  # fmt: skip
"""A field of a template to the keywords of the preset that it stands for."""


class NoFlag(Exception):
    """The library has no flag for a number."""


def values(spec: LossSpec) -> dict[str, Any]:
    """The keywords of presets that can be read off a spec."""
    found: dict[str, Any] = {"kl": 0.0, "entropy": 0.0}
    for part in spec.components:
        if isinstance(part, PolicyGradient):
            found |= {
                name: getattr(part.surrogate, name) for name in ("low", "high", "dual") if hasattr(part.surrogate, name)
            }
            found["cap"] = found.get("high")
            found["normalizer"] = part.normalizer
        elif part.kind == "kl" and part.name == "kl":
            found |= {"kl": part.coef, "kl_estimator": getattr(part, "estimator", None)}
        elif part.kind == "entropy":
            found["entropy"] = part.coef
        elif part.kind == "value":
            found |= {"clip": getattr(part, "clip", None), "normalizer": part.normalizer}
    for rule in spec.corrections:
        if rule.kind == "icepop":
            found |= {"floor": getattr(rule, "low", None), "ceiling": getattr(rule, "high", None)}
    for gate in spec.gates:
        if hasattr(gate, "threshold"):
            found["threshold"] = gate.threshold
    return found


def preset_of(spec: LossSpec) -> str | None:
    """The first preset that gives this spec with numbers of its own, or None."""
    found = values(spec)
    return next((name for name in ELSEWHERE if _built(name, found, tuple(found)) == spec), None)


def lines(spec: LossSpec, name: str) -> list[str]:
    """For each library the flags that give ``spec``, a spec of the preset ``name``, with known differences."""
    known, out = ELSEWHERE.get(name, {}), []
    found = values(spec)
    for library in LIBRARIES:
        if library not in known:
            out.append(f"{library}: no counterpart that we know of")
            continue
        template, differs = known[library]
        try:
            out.append(f"{library}: {flags(spec, name, library, template, found)}")
        except NoFlag as missing:
            out.append(f"{library}: {missing}")
            continue
        out += [f"  differs: {differs}"] if differs else []
    return out + [f"{library}, always: {text}" for library, text in ALWAYS.items() if library in known]


def flags(spec: LossSpec, name: str, library: str, template: str, found: dict[str, Any] | None = None) -> str:
    """The template filled with the numbers of ``spec``.

    Raises:
        NoFlag: the library has no flag for something that the spec changes.
    """
    found = values(spec) if found is None else found
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field]
    covered = tuple(keyword for field in fields for keyword in COVERS[field])
    if _built(name, found, covered) != spec:
        changed = [key for key in ("dual", "kl", "entropy", "normalizer") if key not in covered]
        for key in changed:
            if _built(name, found, (*covered, key)) == spec:
                raise NoFlag(f"no flag that we know of for {key}={found[key]!r} beside this loss")
        raise NoFlag("no flags that we know of for what is changed here")
    filled = {field: _SHOWN[field](library, found) for field in fields}
    return re.sub(r" +(?=[ ,;]|$)", "", template.format(**filled)).removesuffix(",").strip(" ;,")


def _built(name: str, found: dict[str, Any], keys: tuple[str, ...]) -> LossSpec | None:
    """The preset with these of its numbers; None where it cannot be built with them."""
    row = presets.PRESETS[name]
    given = {key: found[key] for key in keys if found.get(key) is not None and key in keywords(name)}
    try:
        return row.build(**{**row.example, **given})
    except SpecError:
        return None


def _number(key: str) -> Callable[[str, dict[str, Any]], str]:
    def show(library: str, found: dict[str, Any]) -> str:
        if not isinstance(found.get(key), int | float):
            raise NoFlag(f"no flag that we know of for {key}={found.get(key)!r}")
        return f"{found[key]:.12g}"

    return show


_KL_TYPES = {
    "verl": {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"},
    "slime": {"k1": "k1", "k2": "k2", "k3": "low_var_kl"},
    "TRL": {"k3": ""},
    "NeMo-RL": {"k3": ""},
}


def _kl(library: str, found: dict[str, Any]) -> str:
    coef, estimator = found["kl"], found.get("kl_estimator", "k3")
    if not coef:
        return {"TRL": "beta=0"}.get(library, "")
    if estimator not in _KL_TYPES.get(library, {}):
        raise NoFlag(f"no flag that we know of for a KL term of estimator {estimator}")
    word = _KL_TYPES[library][estimator]
    return {
        "verl": f"actor.use_kl_loss=true actor.kl_loss_coef={coef:.12g} actor.kl_loss_type={word}",
        "slime": f"--use-kl-loss --kl-loss-coef {coef:.12g} --kl-loss-type {word}",
        "TRL": f"beta={coef:.12g}",
        "NeMo-RL": f"loss_fn.reference_policy_kl_penalty={coef:.12g}",
    }[library]


def _entropy(library: str, found: dict[str, Any]) -> str:
    known = {"verl": "actor.entropy_coeff=", "slime": "--entropy-coef "}
    if not found["entropy"]:
        return ""
    if library not in known:
        raise NoFlag("no flag that we know of for an entropy bonus in the loss")
    return f"{known[library]}{found['entropy']:.12g}"


def _dual(library: str, found: dict[str, Any]) -> str:
    known = {"verl": "actor.clip_ratio_c=", "slime": "--eps-clip-c ", "NeMo-RL": "loss_fn.ratio_clip_c="}
    if found.get("dual") is None:
        return ""
    if library not in known:
        raise NoFlag("no flag that we know of for a dual clip")
    return f"{known[library]}{found['dual']:.12g}"


AGG: dict[str, dict[str, str]] = {
    "verl": {
        "mean(token)": "actor.loss_agg_mode=token-mean",
        "mean(sequence) > mean(token)": "actor.loss_agg_mode=seq-mean-token-mean",
        "mean(sequence) > sum(token)": "actor.loss_agg_mode=seq-mean-token-sum",
        "mean(sequence) > sum(token)/C": "actor.loss_agg_mode=seq-mean-token-sum-norm actor.loss_scale_factor=C",
    },
    "TRL": {
        "mean(token)": "loss_type='dapo'",
        "mean(sequence) > mean(token)": "loss_type='grpo'",
        "mean(sequence) > sum(token)/C": "loss_type='dr_grpo', max_completion_length=C",
    },
    "slime": {
        "mean(token)": "--calculate-per-token-loss",
        "mean(sequence) > mean(token)": "",
        "mean(episode) > mean(token)": "",
    },
    "NeMo-RL": {
        "mean(token)": "loss_fn.token_level_loss=true",
        "mean(sequence) > mean(token)": "loss_fn.token_level_loss=false",
    },
}
"""Normaliser to its flag; C stands for a constant."""


def _agg(library: str, found: dict[str, Any]) -> str:
    path = found["normalizer"]
    constant = re.search(r"/([\d.e+-]+)$", path)
    text = AGG.get(library, {}).get(path if constant is None else f"{path[: constant.start()]}/C")
    if text is None:
        raise NoFlag(f"no flag that we know of for {path}")
    return text if constant is None else text.replace("=C", f"={constant[1]}")


def _above(library: str, found: dict[str, Any]) -> str:
    """A bound on the ratio itself, where the preset has the distance from 1."""
    return f"{1 + found['high']:.12g}"


_SHOWN: dict[str, Callable[[str, dict[str, Any]], str]] = {
    **{name: _number(name) for name in ("low", "high", "floor", "ceiling", "cap", "threshold", "clip")},
    "dual": _dual, "kl": _kl, "entropy": _entropy, "agg": _agg, "above": _above,
}  # fmt: skip
