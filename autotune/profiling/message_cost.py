"""What a message between two pipeline devices of this machine takes by the wall clock, measured where it happens.

A ping-pong would find both ranks waiting. In a pipeline one of them computes: the message is carried by gloo's threads
on cores that are busy, and the rank that waits for it is woken up late. So two real ranks run a balanced 1F1B of one
layer each, in which every microbatch waits for a message there and one back, and the latency is the one with which a
simulation of the same passes takes as long.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autotune.profiling.device import Device
from autotune.profiling.host_fit import fit_host
from autotune.profiling.mesh import MeshCache
from autotune.profiling.profile_records import HostFigures, HostKey, PassesKey
from autotune.profiling.stage_profile import collect_garbage, fill_plausibly, measure_passes, profile_request
from autotune.profiling.training import Training
from autotune.schedules import registry
from autotune.schedules.costs import PassCosts
from autotune.schedules.schedule import Schedule
from autotune.schedules.simulate import simulate
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import DType

__all__ = ["message_figures", "solve_increasing"]

MICROBATCHES = 8
MICRO_BATCH_SIZES = (1, 4)
STEPS = 9
ALONE_STEPS = 3


@dataclass(frozen=True)
class _Pipeline:
    """Two pipeline devices as they ran.

    Attributes:
        passes: median CPU seconds by (kind, stage), of the slowest replica.
        between_s: CPU seconds of a rank for each pass outside of it, by stage.
        wall_s: median of the step's passes, from a common start.
        message_bytes: of one message.
    """

    passes: Mapping[tuple[str, int], float]
    between_s: tuple[float, float]
    wall_s: float
    message_bytes: int


def message_figures(
    key: HostKey, model: ModelSpec, dtype: DType, device: Device, worlds: tuple[MeshCache, MeshCache]
) -> HostFigures:
    """Latency, time a byte and a rank's own time for each message; called by all `key.world` ranks.

    Args:
        worlds: groups of the real ranks, and groups whose collectives move nothing.
    """
    real, alone = worlds
    schedule = registry.build("1f1b", 2, MICROBATCHES, 1)
    samples, own = [], []
    for size in MICRO_BATCH_SIZES:
        shape = PassesKey(1, size, "none", False, key.world)
        stages = measure_passes(shape, model, dtype, device, alone, (1,), key.world, ALONE_STEPS, metered=())[1]
        without_messages_s = next(iter(stages.values())).hand_over_s
        pipeline = _run_pipeline(schedule, size, key.world // 2, model, dtype, device, real)
        # In 1F1B on two devices a rank posts as many messages as it runs passes.
        own += [between_s - without_messages_s for between_s in pipeline.between_s]
        samples.append((1.0, float(pipeline.message_bytes), _latency_s(schedule, pipeline)))
    latency = fit_host(samples)
    return HostFigures(latency.call_s, latency.byte_s, max(0.0, statistics.fmean(own)))


def _latency_s(schedule: Schedule, pipeline: _Pipeline) -> float:
    """The hop with which a simulation of the pipeline's passes takes as long as they did."""
    forward, backward = (
        tuple(pipeline.passes[kind, stage] + pipeline.between_s[stage] for stage in (0, 1)) for kind in ("F", "BW")
    )
    nothing = (0.0, 0.0)

    def makespan(hop_s: float) -> float:
        return simulate(schedule, PassCosts(forward, backward, nothing, hop_s, nothing, nothing)).makespan

    return solve_increasing(makespan, pipeline.wall_s)


def solve_increasing(function: Callable[[float], float], value: float) -> float:
    """Where an increasing function of a number >= 0 reaches `value`; 0 if it begins above it.

    >>> round(solve_increasing(lambda x: 1 + 2 * x, 7.0), 6)
    3.0
    """
    low, high = 0.0, 1e-6
    while function(high) < value:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return 0.0 if low == 0.0 else high


def _run_pipeline(
    schedule: Schedule, size: int, dp: int, model: ModelSpec, dtype: DType, device: Device, world: MeshCache
) -> _Pipeline:
    plan = Plan(2, 1, dp, size, MICROBATCHES, schedule.name, 1, (1, 1))
    training = Training(profile_request(plan, schedule, model, dtype), device, world, fill_plausibly)
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    between, walls = [], []
    for step in range(1 + STEPS):
        training.model.prepare_step()
        collect_garbage()
        gc.disable()
        dist.barrier()
        begun, cpu = time.perf_counter(), time.thread_time()
        passes = training.executor.run(training.batch(step)).passes
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - begun
        gc.enable()
        if step == 0:
            continue
        for item, seconds in passes:
            samples[item.kind, item.stage].append(seconds.cpu_s)
        between.append((cpu - sum(seconds.cpu_s for _, seconds in passes)) / len(passes))
        walls.append(wall)
    # By rank, the first device's replicas first: its own medians of F, BW and the time between, then the walls.
    here = training.mesh.pp_rank
    mine = [statistics.median(samples[kind, here]) for kind in ("F", "BW")]
    vector = torch.tensor([*mine, statistics.median(between), *walls], dtype=torch.float64)
    gathered = [torch.empty_like(vector) for _ in range(2 * dp)]
    dist.all_gather(gathered, vector)
    ranks: list[list[float]] = [row.tolist() for row in gathered]
    devices = (ranks[:dp], ranks[dp:])
    slowest = {
        (kind, stage): max(rank[k] for rank in devices[stage]) for stage in (0, 1) for k, kind in enumerate(("F", "BW"))
    }
    first, second = (statistics.fmean(rank[2] for rank in replicas) for replicas in devices)
    wall_s = statistics.median(max(step) for step in zip(*(rank[3:] for rank in ranks), strict=True))
    tokens = size * model.sequence_length * model.hidden
    return _Pipeline(slowest, (first, second), wall_s, tokens * training.model.dtype.itemsize)
