"""One of two ranks that measure the link between them: `python -m autotune.profiling.link_bench RANK 2 DIR`.

Messages of many sizes go back and forth; half a round trip is one message. Started by `autotune.profiling.calibrate`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autotune.profiling.device import Device, make_device

__all__ = ["main"]

SIZES = (1024, 16 * 1024, 256 * 1024, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20)
REPEATS = {1024: 200, 16 * 1024: 200, 256 * 1024: 100, 2**20: 50}
FEW_REPEATS = 12


def main() -> None:
    """Measure, and let rank 0 write `bytes` and `seconds` of every size."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[3])
    question = json.loads((folder / "question.json").read_text(encoding="utf-8"))
    device = make_device(question["device"], rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    samples = [{"bytes": size, "seconds": _one_way_s(device, rank, size)} for size in SIZES]
    if rank == 0:
        temporary = folder / f"answer.{os.getpid()}"
        temporary.write_text(json.dumps({"messages": samples}), encoding="utf-8")
        os.replace(temporary, folder / "answer.json")
    dist.barrier()
    dist.destroy_process_group()


def _one_way_s(device: Device, rank: int, size: int) -> float:
    """Half a round trip of a message of `size` bytes: the lower decile, which other load disturbs least."""
    tensor = torch.zeros(size // 4, device=device.torch_device)
    taken = []
    for _ in range(2 + REPEATS.get(size, FEW_REPEATS)):
        device.synchronize()
        begun = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)
        device.synchronize()
        taken.append((time.perf_counter() - begun) / 2)
    return statistics.quantiles(taken[2:], n=10, method="inclusive")[0]


if __name__ == "__main__":
    main()
