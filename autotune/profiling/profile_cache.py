"""Profiles of stages on disk: one small file each, named by a fingerprint of everything that decides its numbers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.profiling.cores import usable_cores
from autotune.space.model import ModelSpec
from autotune.space.training import DType

__all__ = ["ProfileCache", "default_cache_folder", "fingerprint", "hardware"]


def default_cache_folder() -> Path:
    """`$AUTOTUNE_CACHE`, else `$XDG_CACHE_HOME/autotune`, else `~/.cache/autotune`."""
    if own := os.environ.get("AUTOTUNE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autotune"


def fingerprint(key: dict[str, Any], model: ModelSpec, dtype: DType, device: str) -> str:
    """32 hex digits: equal only for the same shapes on the same hardware under the same software.

    The model's name and its number of layers don't change a stage, so they don't count. The source of the code that
    is measured does.
    """
    shape = {name: value for name, value in asdict(model).items() if name not in ("name", "layers")}
    identity = {
        "key": key,
        "model": shape,
        "dtype": dtype,
        "device": device,
        "hardware": hardware(device),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "source": _source(),
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def hardware(device: str) -> str:
    """Name of the processor behind a cluster's device name, found without torch.

    CPUs: model and usable cores. GPUs: the driver's name of the first card; where no driver tells, the host's name.
    """
    if device == "cpu":
        return f"{_cpu_model()}, {usable_cores():g} cores"
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
            return f"{lines.get('Model', 'GPU').strip()}, driver {_driver()}"
    return f"GPU of {platform.node()}"


class ProfileCache:
    """A folder of profiles. Several processes may use it at once: files are replaced as a whole.

    Args:
        folder: None: `default_cache_folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_cache_folder() if folder is None else folder

    def load(self, name: str) -> dict[str, Any] | None:
        """What was stored under a fingerprint; None if nothing was, or it is damaged."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path(name).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else None
        return None

    def store(self, name: str, record: dict[str, Any]) -> None:
        """Keep a record. Raises UserError if the folder can't be written."""
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(record, sort_keys=True), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise UserError(f"cannot write the profile cache {self.folder}: {error.strerror or error}") from error

    def _path(self, name: str) -> Path:
        return self.folder / "profiles" / name[:2] / f"{name}.json"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc/driver/nvidia/version").read_text().split("Module", 1)[1].split()[0]
    return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


# The files whose code runs inside a profile.
_MEASURED = (
    "data",
    "device",
    "executor",
    "host_cost",
    "host_fit",
    "init",
    "loss",
    "mesh",
    "message_cost",
    "meters",
    "model",
    "optimizer",
    "parallel",
    "profile_records",
    "sequence_parallel",
    "solo_world",
    "stage_profile",
    "training",
    "weight_grad",
)


@cache
def _source() -> str:
    digest = hashlib.sha256()
    for name in _MEASURED:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]
