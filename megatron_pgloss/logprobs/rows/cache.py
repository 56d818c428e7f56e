"""Whether Inductor's cache can be trusted: what lies in it is loaded as code.

By default it lies in a folder of a name that anybody can guess, below a folder that everybody can write to.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


def cache_problem() -> str | None:
    """Why compiled code must not be read from Inductor's cache here, or None. Makes the folder, with mode 0700, where
    it is missing.
    """
    if sys.platform == "win32":
        return None
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return folder_problem(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()))


def folder_problem(folder: Path) -> str | None:
    """Why others can write to ``folder``, or None. Makes it, with mode 0700, where it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        above = folder.parent.stat()
    except OSError as error:
        return f"Inductor's cache {folder} cannot be used: {error.strerror}; set TORCHINDUCTOR_CACHE_DIR"
    others = stat.S_IWGRP | stat.S_IWOTH
    problem = None
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link" if stat.S_ISLNK(found.st_mode) else "is no folder"
    elif found.st_uid != os.getuid():
        problem = f"belongs to user {found.st_uid}"
    elif found.st_mode & others:
        problem = f"can be written to by others (mode {stat.S_IMODE(found.st_mode):04o})"
    elif above.st_mode & others and not above.st_mode & stat.S_ISVTX:
        problem = f"lies in {folder.parent}, where others can replace it"
    elif above.st_uid not in (0, os.getuid()):
        problem = f"lies in {folder.parent}, which belongs to user {above.st_uid}"
    return problem and f"Inductor's cache {folder} {problem}; set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
