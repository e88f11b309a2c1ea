"""What a user installs: sdist and wheel build, the wheel imports, and it ships what it should."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

import ratio_kl

ROOT = Path(__file__).parent.parent
PACKAGED = ("LICENSE", "README.md", "pyproject.toml", "setup.py", "src")


class Distribution(NamedTuple):
    sdist: Path
    wheel: Path
    installed: Path


def python(*arguments: str, **options: object) -> str:
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """The sdist, the wheel built from that sdist, and the wheel unpacked by pip.

    Built from a copy, so that the working tree stays clean, and with the tools that are installed,
    so that no network is needed.
    """
    pytest.importorskip("build")
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    out, target = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("target")
    python("-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    return Distribution(sdist, wheel, target)


def in_the_wheel(distribution: Distribution, script: str, cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(distribution.installed)}
    return python("-c", script, env=environment, cwd=cwd)


def test_public_names():
    assert sorted(ratio_kl.__all__) == [
        "FusedLinearRatioKLLoss",
        "LogProbs",
        "LossOutput",
        "Metrics",
        "RatioKLConfig",
        "high_entropy_mask",
        "linear_logprob",
        "linear_ratio_kl",
        "ratio_kl",
    ]
    assert all(hasattr(ratio_kl, name) for name in ratio_kl.__all__)


def test_wheel_holds_every_source_file_and_nothing_else(distribution):
    with zipfile.ZipFile(distribution.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    expected = {str(path.relative_to(source)) for path in (source / "ratio_kl").rglob("*.py")}
    assert names == expected | {"ratio_kl/py.typed"}


def test_licence_is_shipped(distribution):
    with zipfile.ZipFile(distribution.wheel) as wheel:
        (licence,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    with tarfile.open(distribution.sdist) as sdist:
        assert any(name.endswith("/LICENSE") for name in sdist.getnames())


def test_wheel_imports_with_the_version_of_its_metadata(distribution, tmp_path):
    script = "import ratio_kl; print(ratio_kl.__file__, ratio_kl.__version__)"
    path, version = in_the_wheel(distribution, script, tmp_path).split()
    assert Path(path).parent == distribution.installed / "ratio_kl"
    (installed,) = importlib.metadata.distributions(path=[str(distribution.installed)])
    assert installed.metadata["Name"] == "ratio-kl"
    assert version == installed.version == ratio_kl.__version__


def test_wheel_computes_a_loss(distribution, tmp_path):
    """No file is missing that the import alone does not touch."""
    script = """
import torch, ratio_kl
hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4)
ids = torch.ones(2, 3, dtype=torch.int64)
loss_fn = ratio_kl.FusedLinearRatioKLLoss()
loss_fn(hidden, weight, ids, ids, torch.ones(2)).loss.backward()
print(hidden.grad.isfinite().all().item())
"""
    assert in_the_wheel(distribution, script, tmp_path).strip() == "True"


def test_runtime_needs_torch_and_triton_only_and_installs_off_linux(distribution):
    (installed,) = importlib.metadata.distributions(path=[str(distribution.installed)])
    metadata: Message = installed.metadata
    always = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert [r.replace(" ", "").replace("'", '"') for r in always] == [
        "torch>=2.8",
        'triton>=3.4;platform_system=="Linux"',
    ]
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras == {
        "test",
        "benchmark",
        "liger",
        "verl",
        "trl",
        "transformers",
        "demo",
        "dev",
    }
