"""What libraries say about themselves, once for each rank and model, would bury the table."""

from __future__ import annotations

import logging
import warnings


def hush() -> None:
    """Silence their notices; called before they are imported, as some speak on import."""
    warnings.simplefilter("ignore")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
