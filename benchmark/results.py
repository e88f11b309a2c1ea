"""What a run leaves behind: rows and the machine they were measured on, as JSON."""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import ratio_kl

from .rivals import CONTENDERS
from .rivals.ours import chunk_bytes
from .shapes import Shape, parse

OK = "ok"
MIB = 2**20


@dataclass
class Row:
    """One contender on one problem; a figure that does not apply is None."""

    case: str
    data: str
    """"random", or the name of the file of inputs."""
    shape: str
    dtype: str
    contender: str
    status: str = OK
    """Why there are no figures, otherwise."""
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    mm: float | None = None
    """ms over that of torch.mm(hidden, weight.T) in the same rounds."""
    rounds: int | None = None
    peak_bytes: int | None = None
    """Above what was held before the call, gradients among it."""
    gradient_bytes: int | None = None
    active: float = 1.0
    """Share of active tokens."""
    host_us: float | None = None
    logp_error: float | None = None
    """Largest absolute error over the active tokens; of the ratio for ratio_kl on logits."""
    hidden_error: float | None = None
    weight_error: float | None = None
    """Relative Frobenius errors of the gradients."""

    @property
    def extra_bytes(self) -> int | None:
        """Peak beyond the gradients, which every loss must return."""
        if self.peak_bytes is None:
            return None
        return self.peak_bytes - (self.gradient_bytes or 0)

    @property
    def extra_mib(self) -> float | None:
        return None if self.extra_bytes is None else self.extra_bytes / MIB

    @property
    def size(self) -> Shape:
        return parse(self.shape)

    @property
    def ok(self) -> bool:
        return self.status == OK


@dataclass
class Run:
    """Rows of one command on one machine."""

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def save(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=1)
        path.write_text(text + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> "Run":
        fields = json.loads(path.read_text("utf-8"))
        return cls(fields["environment"], [Row(**row) for row in fields["rows"]])


def merged(runs: Iterable[Run]) -> Run:
    """Several runs of one machine as one; of the same measurement the last counts."""
    first, *others = list(runs)
    rows = {_key(row): row for run in (first, *others) for row in run.rows}
    commands = list(dict.fromkeys(run.environment["command"] for run in (first, *others)))
    return Run({**first.environment, "command": "; ".join(commands)}, list(rows.values()))


def _key(row: Row) -> tuple[str, ...]:
    return (row.case, row.data, row.shape, row.dtype, row.contender)


def environment(device: torch.device, command: str) -> dict[str, str]:
    """Hardware, versions and the command, as printed with every output."""
    triton = _version("triton")
    software = f"torch {torch.__version__}, triton {triton}, Python {platform.python_version()}"
    hardware = f"{_processor()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        software += f", CUDA {torch.version.cuda}"
    rivals = {c.package: c.version for c in CONTENDERS.values() if c.package}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "hardware": hardware,
        "software": software,
        "packages": ", ".join(
            f"{package} {version}"
            for package, version in {"ratio_kl": ratio_kl.__version__, **rivals}.items()
        ),
        "memory": "torch's CUDA allocator"
        if device.type == "cuda"
        else "torch's CPU allocator, by its profiler",
        "chunk_bytes": f"{chunk_bytes(device) / MIB:.0f} MiB",
        "command": command,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
