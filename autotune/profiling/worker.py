"""One rank of a trial: `python -m autotune.profiling.worker --request request.json --out DIR`.

Started by torch's elastic launcher (or anything else that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT). Trains the requested plan for a few steps and writes `DIR/rank-N.json`, a `RankReport`, whole or not at
all. Exit code 0 means that the report's state is `ok`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autotune.profiling.device import Device, Seconds, make_device
from autotune.profiling.failure import fail
from autotune.profiling.heartbeat import beat
from autotune.profiling.mesh import MeshCache
from autotune.profiling.meters import CollectiveCounter, MemoryPeak, memory_meter
from autotune.profiling.protocol import PassTime, RankReport, TrialRequest
from autotune.profiling.training import StepResult, Training
from autotune.schedules.checks import check
from autotune.schedules.schedule import Pass

__all__ = ["main", "run_plan"]


def main(arguments: list[str] | None = None) -> int:
    """Run one request; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m autotune.profiling.worker", description="one rank of a trial")
    parser.add_argument("--request", type=Path, required=True, help="JSON file of the plan to run")
    parser.add_argument("--out", type=Path, required=True, help="existing folder for rank-N.json")
    options = parser.parse_args(arguments)
    rank, request_id = int(os.environ["RANK"]), ""
    try:
        request = TrialRequest.from_dict(json.loads(options.request.read_text(encoding="utf-8")))
        request_id = request.id
        check(request.schedule)
        device = make_device(request.cluster.device, int(os.environ.get("LOCAL_RANK", "0")))
        timeout = timedelta(seconds=request.collective_timeout_s)
        dist.init_process_group(device.backend, timeout=timeout)
        report = run_plan(request, device, MeshCache(device.torch_device.type, timeout))
        # Nobody leaves, and closes connections, while a peer still needs them.
        dist.barrier()
    except Exception as error:
        fail(options.out, rank, error, request_id)
    report.write(options.out)
    dist.destroy_process_group()
    return 0


def run_plan(request: TrialRequest, device: Device, meshes: MeshCache) -> RankReport:
    """Train one plan and measure it. Collective: every rank of the default process group calls it with one request.

    Args:
        meshes: process groups made before in this launch, to which the plan's are added.
    """
    beat()
    training = Training(request, device, meshes)
    beat()
    index = 0
    counter = CollectiveCounter(training.axis_groups())
    for k in range(max(1, request.warmup_steps)):
        if k == 0:
            with counter:
                _step(training, index)
        else:
            _step(training, index)
        index += 1
    steps, losses = [], []
    for _ in range(request.measured_steps):
        step = _step(training, index)
        steps.append(step)
        losses.append(training.global_loss(step.loss))
        index += 1
    peak = _metered_step(training, index) if request.measure_memory else None
    return RankReport(
        rank=dist.get_rank(),
        state="ok",
        request_id=request.id,
        step_wall_s=tuple(step.wall_s for step in steps),
        passes=tuple(_pass_times(step.passes) for step in steps),
        optimizer_cpu_s=tuple(step.optimizer_cpu_s for step in steps),
        collective_bytes=counter.bytes_sent,
        collective_calls=dict(counter.calls),
        peak_memory_bytes=peak.total_bytes if peak else None,
        activation_peak_bytes=peak.activation_bytes if peak else None,
        reserved_memory_bytes=peak.reserved_bytes if peak else None,
        parameters=training.parameters,
        losses=tuple(loss for loss in losses if loss is not None),
        torch=torch.__version__,
        device=device.describe(),
    )


def _step(training: Training, index: int) -> StepResult:
    """One step that all ranks begin together, undisturbed by the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        training.device.synchronize()
        dist.barrier()
        beat()
        return training.step(index)
    finally:
        gc.enable()


def _metered_step(training: Training, index: int) -> MemoryPeak:
    meter = memory_meter(training.device.torch_device, training.lasting_tensors, training.model.gathered_parameters)

    def after_pass(item: Pass | None) -> None:
        if item is None:
            meter.refresh()

    training.executor.around_pass = after_pass
    gc.collect()
    beat()
    with meter:
        training.step(index, before_update=meter.refresh)
    training.executor.around_pass = None
    return meter.peak()


def _pass_times(passes: list[tuple[Pass, Seconds]]) -> tuple[PassTime, ...]:
    """Medians over the microbatches of each kind of pass of each stage."""
    found: dict[tuple[int, str], list[Seconds]] = defaultdict(list)
    for item, seconds in passes:
        found[item.stage, item.kind].append(seconds)
    return tuple(
        PassTime(kind, stage, statistics.median(s.cpu_s for s in samples), statistics.median(s.wall_s for s in samples))
        for (stage, kind), samples in sorted(found.items())
    )


if __name__ == "__main__":
    sys.exit(main())
