"""One of several CPU ranks that measure what communication costs: the thread that calls it, or by the wall clock.

`python -m autotune.profiling.host_cost RANK RANKS FOLDER`, started by `autotune.profiling.host_ranks`.

Of collectives: the same stages are timed twice by the same ranks, at the same time: with collectives over gloo, and
with collectives that move nothing. The difference is the callers' CPU time: copies, hand-over to gloo's threads, waking
up again, and what a switch to another process on the same core does to the caches; by the wall clock the way of the
bytes and the waiting, too. Of messages: `autotune.profiling.message_cost`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from autotune.profiling.device import CpuDevice
from autotune.profiling.host_fit import Sample, fit_host
from autotune.profiling.mesh import MeshCache
from autotune.profiling.message_cost import message_figures
from autotune.profiling.profile_records import DeviceKey, HostKey, PassesKey
from autotune.profiling.stage_profile import measure_device, measure_passes
from autotune.space.model import ModelSpec
from autotune.space.training import DType

__all__ = ["main"]

STEPS = 3
ROUNDS = 2
MICRO_BATCH_SIZES = (1, 4)


def main() -> None:
    """Measure, and let rank 0 write the answer."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    question = json.loads((folder / "question.json").read_text(encoding="utf-8"))
    timeout = timedelta(seconds=120)
    device = CpuDevice()
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    worlds = (MeshCache("cpu", timeout), MeshCache("cpu", timeout, backend="fake"))
    gc.collect()
    gc.freeze()
    key, model = HostKey(**question["key"]), ModelSpec(**question["model"])
    if key.axis == "pp":
        figures = message_figures(key, model, question["dtype"], device, worlds)
    else:
        measure = _pass_samples if key.axis == "tp" else _device_samples
        figures = fit_host([s for _ in range(ROUNDS) for s in measure(key, model, question["dtype"], device, worlds)])
    if rank == 0:
        temporary = folder / f"answer.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(figures)), encoding="utf-8")
        os.replace(temporary, folder / "answer.json")
    dist.barrier()
    dist.destroy_process_group()


def _pass_samples(
    key: HostKey, model: ModelSpec, dtype: DType, device: CpuDevice, worlds: tuple[MeshCache, MeshCache]
) -> list[Sample]:
    samples = []
    for size in MICRO_BATCH_SIZES:
        shape = PassesKey(key.ranks, size, "none", False, key.world)
        dp = key.world // key.ranks
        real, solo = (
            measure_passes(shape, model, dtype, device, world, (1,), dp, STEPS, metered=(), wall=key.clock == "wall")[1]
            for world in worlds
        )
        for kind, stage in real.items():
            for name, item in stage.passes.items():
                if item.tp_calls:
                    samples.append((item.tp_calls, item.tp_bytes, item.seconds - solo[kind].passes[name].seconds))
    return samples


def _device_samples(
    key: HostKey, model: ModelSpec, dtype: DType, device: CpuDevice, worlds: tuple[MeshCache, MeshCache]
) -> list[Sample]:
    """The other ranks of the world form more groups of the same kind, by sharding the model over tp."""
    shape = DeviceKey(key.world // key.ranks, key.ranks, "both", key.world)
    real, solo = (measure_device(shape, model, dtype, device, world, wall=key.clock == "wall") for world in worlds)
    return [
        (real[depth].dp_calls, real[depth].dp_bytes, real[depth].outside_s - solo[depth].outside_s) for depth in real
    ]


if __name__ == "__main__":
    main()
