"""The distribution under which the policy's tokens are scored, where the sampler could not draw every token."""

from __future__ import annotations

from typing import Literal

from megatron_pgloss.spec.base import Part


class KeptSet(Part):
    """Score the policy's tokens on the set K that the sampler drew from: log-prob, entropy and KL renormalised on it.

    The set of a token is the part of the vocabulary that top-k, top-p, min-p or a grammar left. Tokens that the policy
    did not sample, such as observations, are scored on the whole vocabulary.
    """

    source: Literal["recorded", "recomputed"]
    """``recorded``: the batch's ``kept_sets``, the sampler's own; a token without any was drawn from the whole
    vocabulary. ``recomputed``: from the scored model's logits, by the batch's temperature, ``top_k``, ``top_p`` and
    ``min_p``; all ties at a threshold are kept."""
    outside: Literal["refuse", "drop", "add"] = "refuse"
    """What becomes of a sampled token that is not in its set. ``refuse``: an error names it. ``drop``: it leaves the
    components over actions. ``add``: it joins its set."""
    top_p_of: Literal["top_k", "top_k_min_p", "all"] = "top_k"
    """For recomputed sets: the tokens whose probability top-p's share is of, which is all that the order of the three
    filters can change. ``top_k``: those that top-k left (transformers; SGLang where min-p is on). ``top_k_min_p``:
    those that top-k and min-p left (vLLM). ``all``: the whole vocabulary (SGLang's joint filter where min-p is off)."""

    @property
    def reason(self) -> str:
        """Its name in reports."""
        return "outside the kept set"

    def formula(self) -> str:
        """What it does, in one line."""
        how = "recorded by the sampler" if self.source == "recorded" else "recomputed from the logits"
        what = {"refuse": "is refused", "drop": "is dropped", "add": "joins it"}[self.outside]
        share = "" if self.top_p_of == "top_k" or self.source == "recorded" else f" (top-p of {self.top_p_of})"
        return f"log-probs on the sampler's set, {how}{share}; a sampled token outside of it {what}"
