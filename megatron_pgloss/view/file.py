"""Writing a file to a path that others may know: a file or link that lies there is replaced, never written through."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: str | Path, content: bytes) -> Path:
    """Write ``content`` as a new file at ``path`` and return it; its folder is made where it is missing.

    The file appears whole or not at all. A link at ``path`` is replaced, and the file that it points to stays as it is.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}")
    # O_EXCL: neither a file nor a link of that name is there.
    handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
    return target
