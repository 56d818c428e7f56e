"""How large a model's vocabulary is, padding included, by the word of its own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule


def of_model(bare: Sequence[Any]) -> int | None:
    """The ``vocab_size`` of an unwrapped chunk, else that of the language model inside it; None where nobody says.

    It sizes the softmax, so stages must say the same: a language model does on all of them.
    """
    return getattr(bare[0], "vocab_size", None) or _largest(bare, LanguageModule)


def of_embeddings(bare: Sequence[Any]) -> int | None:
    """Rows of the largest embedding of tokens on this rank. It bounds token ids alone, so that one rank that has such a
    table is enough.
    """
    return _largest(bare, LanguageModelEmbedding)


def _largest(bare: Sequence[Any], kind: type) -> int | None:
    modules = [module for chunk in bare for module in chunk.modules() if isinstance(module, kind)]
    said = [size for module in modules if isinstance(size := getattr(module, "vocab_size", None), int)]
    return max(said, default=None)
