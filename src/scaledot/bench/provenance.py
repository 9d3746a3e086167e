"""Where numbers come from: machine, versions, commit, date."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import scaledot

PACKAGE = Path(scaledot.__file__).parent


@dataclass(frozen=True)
class Origin:
    date: str
    commit: str
    machine: str
    cores: int
    load: float  # how many processes wanted a core in the minute before: above 1, others were there
    threads: int
    python: str
    torch: str
    scaledot: str
    gpu: str = ""  # this and what follows: only where a GPU is measured
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    triton: str = ""
    flash_attn_4: str = ""


def collect(*, on_gpu: bool = False, named: str | None = None) -> Origin:
    """named: the commit, where the source that runs has no history."""
    return Origin(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=named or commit(PACKAGE),
        machine=_processor(),
        cores=_cores(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        scaledot=scaledot.__version__,
        **(_of_gpu() if on_gpu else {}),
    )


def commit(package: Path) -> str:
    """The commit of the source that runs, «-dirty» where it was edited since, else «unknown»."""
    # An installed package may lie inside somebody else's repository: it must track this file.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    name = _git(package, "rev-parse", "--short=12", "HEAD")
    if name is None:
        return "unknown"
    edited = _git(package, "status", "--porcelain", "--", ".")
    return f"{name}-dirty" if edited else name


def _of_gpu() -> dict[str, str]:
    cudnn = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": torch.version.cuda or "none",
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "none",
        "triton": _version("triton"),
        "flash_attn_4": _version("flash-attn-4"),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
