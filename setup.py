"""All metadata of the distribution.

Tool settings live in pyproject.toml, pinned versions in constraints-py*.txt.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'"(\d[^"]*)"', (HERE / "megatron_pgloss" / "_version.py").read_text())
README = HERE / "README.md"


def for_the_index(text: str, address: str) -> str:
    """README as a package index shows it: no folder of ours lies beside it there.

    Links and pictures of this repository lead to ``address``; without one links are plain text and pictures are left
    out.
    """
    own = r"(?!https?:|#)([^)\s]+)"
    base = address.rstrip("/")
    text = re.sub(rf"!\[([^\]]*)\]\({own}\)", rf"![\1]({base}/\2?raw=true)" if base else "", text)
    return re.sub(rf"(?<!!)\[([^\]]*)\]\({own}\)", rf"[\1]({base}/\2)" if base else r"\1", text)


# NVIDIA apex, Transformer Engine and Triton are found at run time and never required. NVIDIA apex
# is absent on purpose: the package index's project of that name is another one.
METADATA = dict(
    name="megatron_pgloss",
    version=VERSION.group(1),
    description="A policy-gradient loss for Megatron-Core: the same gradient on every layout",
    # PGLOSS_URL: where the files of this version can be read, for example .../blob/v0.1.0.
    long_description=for_the_index(README.read_text(encoding="utf-8"), os.environ.get("PGLOSS_URL", ""))
    if README.exists()
    else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_pgloss", "megatron_pgloss.*"]),
    package_data={"": ["py.typed", "*.css", "*.html", "*.j2", "*.js"]},
    zip_safe=False,
    install_requires=["torch>=2.6", "megatron-core>=0.16.1", "pydantic>=2", "packaging"],
    extras_require={
        "cli": ["rich", "matplotlib", "jinja2"],
        "te": ["transformer-engine[pytorch]"],
        "test": [
            "hypothesis",
            "import-linter",
            "mypy",
            "psutil",
            "pytest>=8",
            "pytest-timeout",
            "ruff",
            "setuptools",
            "sybil",
            "tensorboard",
        ],
    },
    entry_points={"console_scripts": ["pgloss = megatron_pgloss.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

if __name__ != "asked":  # by a test, of how the README is changed
    setup(**METADATA)
