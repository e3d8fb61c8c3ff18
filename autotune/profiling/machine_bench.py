"""Measures one device, matmuls of many shapes and streaming memory: `python -m autotune.profiling.machine_bench 0 1 D`.

Reads `D/question.json` (`device`, `seconds`), writes `D/answer.json`; started by `autotune.profiling.calibrate`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autotune.profiling.device import Device, make_device

__all__ = ["device_problem", "main", "matmul_samples", "memory_bytes_per_s"]

# (rows, inner, columns): squares from launch-bound to large, and the tall and flat shapes of transformer layers.
SHAPES = (
    *((n, n, n) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    *((n, 4 * n, n) for n in (256, 1024, 4096)),
    *((n, n, 4 * n) for n in (256, 1024, 4096)),
    *((4 * n, n, n) for n in (256, 1024, 4096)),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEAST_REPEATS, MOST_REPEATS = 5, 200
STREAM_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}


def main() -> None:
    """Measure and write the answer."""
    folder = Path(sys.argv[3])
    question = json.loads((folder / "question.json").read_text(encoding="utf-8"))
    problem = device_problem(question["device"])
    _write(folder, _measure(question) if problem is None else {"problem": problem})


def device_problem(name: str) -> str | None:
    """Why the device of that name can't be measured here, and what can; None if it is there."""
    if name == "cpu":
        return None
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else ", built for CPUs alone,"
        return (
            f"there is no {name} in this machine: torch {torch.__version__}{built} finds no GPU; "
            "--device cpu measures its CPU"
        )
    found = torch.cuda.get_device_name(0)
    if name == "cuda" or name.split("-")[0] in found.lower().replace(" ", "").split("nvidia")[-1]:
        return None
    return f"there is no {name} in this machine: its GPU is {found}; --device cuda measures whatever GPU there is"


def _measure(question: dict[str, Any]) -> dict[str, Any]:
    device = make_device(question["device"], 0)
    return {
        "name": device.describe(),
        "devices": torch.cuda.device_count(),
        "matmuls": {name: matmul_samples(device, dtype, question["seconds"]) for name, dtype in DTYPES.items()},
        "memory_bytes_per_s": memory_bytes_per_s(device),
        "memory_bytes": _memory_bytes(device),
    }


def _write(folder: Path, answer: dict[str, Any]) -> None:
    temporary = folder / f"answer.{os.getpid()}"
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(temporary, folder / "answer.json")


def matmul_samples(device: Device, dtype: torch.dtype, seconds: float) -> list[dict[str, float]]:
    """`rows`, `inner`, `columns` and median `seconds` of each shape that takes less than `seconds` a time."""
    samples: list[dict[str, float]] = []
    for rows, inner, columns in sorted(SHAPES, key=lambda shape: shape[0] * shape[1] * shape[2]):
        slowest = max((s["seconds"] / (s["rows"] * s["inner"] * s["columns"]) for s in samples[-2:]), default=0.0)
        if slowest * rows * inner * columns > seconds:
            break
        a = torch.randn(rows, inner, device=device.torch_device).to(dtype)
        b = torch.randn(inner, columns, device=device.torch_device).to(dtype)
        out = torch.empty(rows, columns, device=device.torch_device, dtype=dtype)
        taken = _repeat(device, lambda a=a, b=b, out=out: torch.mm(a, b, out=out), seconds)  # type: ignore[misc]
        samples.append({"rows": rows, "inner": inner, "columns": columns, "seconds": taken})
    return samples


def memory_bytes_per_s(device: Device) -> float:
    """Bytes read and written a second by a copy that no cache holds."""
    size = STREAM_BYTES["cpu" if device.torch_device.type == "cpu" else "cuda"]
    source = torch.ones(size // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * size / _repeat(device, lambda: target.copy_(source), 1.0)


def _repeat(device: Device, work: Callable[[], object], seconds: float) -> float:
    """Median time of `work` over at least `LEAST_REPEATS` and about `seconds`, two warm-ups left out."""
    for _ in range(2):
        work()
    device.synchronize()
    clock = device.pass_clock()
    began = time.perf_counter()
    for count in range(MOST_REPEATS):
        clock.start()
        work()
        clock.stop()
        if count + 1 >= LEAST_REPEATS and time.perf_counter() - began > seconds:
            break
    own = [one.cpu_s if device.torch_device.type == "cpu" else one.wall_s for one in clock.read()]
    return statistics.median(own)


def _memory_bytes(device: Device) -> int | None:
    """Of a GPU; a CPU process has no limit of its own."""
    if device.torch_device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device.torch_device).total_memory


if __name__ == "__main__":
    main()
