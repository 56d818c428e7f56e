"""Is there a C++ compiler that Inductor can use? Answered by compiling a program with the headers that its kernels
include.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_PROGRAM = """
#include <Python.h>
#include <cmath>
#include <omp.h>
extern "C" int threads() { return omp_get_max_threads(); }
"""


@functools.cache
def cpp_compiler_problem() -> str | None:
    """The reason why torch.compile cannot build CPU kernels here, or None. Runs the compiler once per process."""
    if sys.platform == "win32":
        return "not tried on Windows"
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        return f"no C++ compiler ({' or '.join(names)}) on the PATH"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM)
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-std=c++17", "-shared", "-fPIC", "-fopenmp", f"-I{include}", str(source)]
        try:
            ran = subprocess.run(
                [*command, "-o", str(source.with_suffix(".so"))], capture_output=True, text=True, timeout=120
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} does not run: {error}"
    if ran.returncode:
        first = next((line for line in ran.stderr.splitlines() if "error" in line), ran.stderr.strip()[:200])
        return f"{compiler} cannot build an OpenMP extension of this Python: {first.strip()}"
    return None
