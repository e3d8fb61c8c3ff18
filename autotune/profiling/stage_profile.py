"""Times and meters stages: the worker's own model, executor and optimizer, in a `SoloWorld` for one process alone.

A first, a middle and a last stage lie on one device, so the executor hands tensors over without a message. Every
microbatch goes forward through all three; the backward of the one before and the weight gradients of the one before
that follow, so passes meet the allocator as they do in a pipeline.

Where CPU ranks outnumber the cores, a pass that reads a message may have waited for it while another rank had the core:
the caches are swept before such passes. (Warm, a stage of one layer is up to a tenth too fast, a deep one isn't.)
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autotune.profiling.cores import usable_cores
from autotune.profiling.device import Device, Seconds
from autotune.profiling.executor import Executor
from autotune.profiling.mesh import MeshCache
from autotune.profiling.meters import CollectiveCounter, StorageMeter
from autotune.profiling.profile_records import (
    DEPTHS,
    METERED_DEPTHS,
    DeviceFigures,
    DeviceKey,
    PassesKey,
    PassFigures,
    StageFigures,
    StageKind,
    stage_at,
)
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.training import Training
from autotune.profiling.weight_grad import local_tensor
from autotune.schedules.schedule import Pass, PassKind, Schedule
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import DType, TrainingSpec

__all__ = ["collect_garbage", "fill_plausibly", "measure_device", "measure_passes", "profile_request"]

MICROBATCHES = 8
METERED_MICROBATCHES = 4
LEAST_ROUNDS = 3
MOST_ROUNDS = 10
ENOUGH_S = 2.0
"""Rounds are repeated until they took this long."""
DEVICE_STEPS = 7
SWEEP_BYTES = 8 * 2**20
"""Enough to leave nothing in the caches of a core."""
# Where the rank under test (device 0) stands among two pipeline devices, by what its stages hold.
PLACEMENTS = {"both": (0,), "first": (0, 1), "middle": (1, 0, 1), "last": (1, 0)}


def measure_passes(
    key: PassesKey,
    model: ModelSpec,
    dtype: DType,
    device: Device,
    world: MeshCache,
    depths: Sequence[int] = DEPTHS,
    dp: int = 1,
    rounds: int | None = None,
    metered: Sequence[int] = METERED_DEPTHS,
    wall: bool = False,
) -> dict[int, dict[StageKind, StageFigures]]:
    """Figures by depth of the stages that `key` describes: a first, a middle and a last one, or the whole model.

    All depths, with split and with fused backwards, are timed in turns, so that they can be compared.

    Args:
        world: a `SoloWorld`, or the groups of real ranks that all call this.
        dp: data-parallel degree, so that real ranks are all in a mesh.
        rounds: turns to time; None: until enough time went into them, which several ranks must not decide apart.
        metered: depths whose memory and collectives alone are metered; their times follow from those of `depths`.
        wall: time passes by the wall clock, collectives and waiting for them included.

    Raises:
        torch.OutOfMemoryError: the stages don't fit on the device (RuntimeError on CPU).
    """
    kinds: tuple[StageKind, ...] = ("whole",) if key.whole else ("first", "middle", "last")
    schedules = {split: _stream(len(kinds), split, MICROBATCHES) for split in (True, False)}

    def training(depth: int) -> Training:
        split = (depth,) * len(kinds)
        plan = Plan(
            1, key.tp, dp, key.micro_batch_size, MICROBATCHES, "stream", len(kinds), split, recompute=key.recompute
        )
        return Training(profile_request(plan, schedules[True], model, dtype), device, world, fill_plausibly)

    trainings = {depth: training(depth) for depth in depths}
    executors = {
        (depth, way): one.executor.with_schedule(schedule)
        for depth, one in trainings.items()
        for way, schedule in schedules.items()
    }
    # A stage that is the whole model reads no message.
    sweep = _sweeper(device) if len(kinds) > 1 and key.crowd > usable_cores() else None
    timed = _timed(trainings, executors, rounds, sweep, wall)
    found = {depth: _stage_figures(one, kinds, timed, depth) for depth, one in trainings.items()}
    trainings.clear()
    executors.clear()
    for depth in metered:
        times = {kind: stage_at(depth, {at: stages[kind] for at, stages in found.items()}) for kind in kinds}
        found[depth] = _metered_stages(training(depth), kinds, times)
    return found


def _stage_figures(
    training: Training, kinds: Sequence[StageKind], timed: _Times, depth: int
) -> dict[StageKind, StageFigures]:
    """The figures of the stages of one depth."""
    times = {}
    for stage, name in enumerate(kinds):
        seconds = {kind: statistics.median(timed.samples[depth, kind, stage]) for kind in ("F", "B", "W", "BW")}
        passes = {kind: PassFigures(time_s, 0.0, 0.0, 0.0) for kind, time_s in seconds.items()}
        times[name] = StageFigures(passes, 0.0, 0.0, timed.hand_over_s(depth))
    return _metered_stages(training, kinds, times)


def _metered_stages(
    training: Training, kinds: Sequence[StageKind], times: Mapping[StageKind, StageFigures]
) -> dict[StageKind, StageFigures]:
    """Stages with the bytes and collectives that meters see, and the seconds of `times`."""
    split, fused = (
        _metered(training, training.executor.with_schedule(_stream(len(kinds), way, METERED_MICROBATCHES)))
        for way in (True, False)
    )
    boundary = _boundary_bytes(training)
    found: dict[StageKind, StageFigures] = {}
    for stage, name in enumerate(kinds):
        passes = {}
        for kind, timed in times[name].passes.items():
            seen = (fused if kind == "BW" else split)[kind, stage]
            passes[kind] = PassFigures(timed.seconds, seen.peak, seen.tp_bytes, seen.tp_calls)
        output = boundary if stage < len(kinds) - 1 else 0
        held = split["F", stage].change - output
        # B lets go of what is held, the input and the output's gradient, and leaves the input's gradient.
        kept = split["B", stage].change + held + output
        found[name] = StageFigures(passes, held, kept, times[name].hand_over_s)
    return found


def measure_device(
    key: DeviceKey,
    model: ModelSpec,
    dtype: DType,
    device: Device,
    world: MeshCache,
    depths: Sequence[int] = DEPTHS,
    wall: bool = False,
) -> dict[int, DeviceFigures]:
    """Figures by depth of what a rank does outside its passes.

    `world` is a `SoloWorld`, or the groups of real ranks that all call this; `wall` as for `measure_passes`.

    Raises:
        torch.OutOfMemoryError: parameters, gradients and optimizer state don't fit (RuntimeError on CPU).
    """
    placement = PLACEMENTS[key.ends]
    pp = max(placement) + 1
    schedule = Schedule("none", 1, placement, tuple(() for _ in range(pp)))
    trainings = {}
    for depth in depths:
        split = tuple(depth if holder == 0 else 1 for holder in placement)
        plan = Plan(pp, key.tp, key.dp, 1, 1, "none", len(placement), split)
        trainings[depth] = Training(profile_request(plan, schedule, model, dtype), device, world, fill_plausibly)
    sweep = _sweeper(device)
    outside: dict[int, list[float]] = defaultdict(list)
    optimizer: dict[int, list[float]] = defaultdict(list)
    for index in range(DEVICE_STEPS):
        for depth, training in trainings.items():
            parts = _outside_parts(training, sweep, wall)
            if index:  # the first step allocates the optimizer's state
                outside[depth].append(sum(parts))
                optimizer[depth].append(parts[-1])
    return {
        depth: dataclasses.replace(
            _metered_device(training),
            outside_s=statistics.median(outside[depth]),
            optimizer_s=statistics.median(optimizer[depth]),
        )
        for depth, training in trainings.items()
    }


def _outside_parts(training: Training, sweep: Callable[[], None], wall: bool) -> list[float]:
    """Seconds of preparing a step, of finishing its gradients and of the optimizer, without passes."""
    clock = training.device.pass_clock()
    collect_garbage()
    for index, work in enumerate(
        (training.model.prepare_step, training.model.finish_gradients, training.optimizer.step)
    ):
        if index < 2:
            sweep()  # as after passes, of this rank or of another one
        clock.start()
        work()
        clock.stop()
    return [_own(training.device, part, wall) for part in clock.read()]


def _stream(stages: int, split: bool, microbatches: int) -> Schedule:
    """One device's passes: microbatch k goes forward, k - 1 backward, and k - 2 gets its weight gradients."""
    order: list[Pass] = []
    backward: PassKind = "B" if split else "BW"
    for k in range(microbatches + 2):
        if k < microbatches:
            order += [Pass("F", stage, k) for stage in range(stages)]
        if 1 <= k <= microbatches:
            order += [Pass(backward, stage, k - 1) for stage in reversed(range(stages))]
        if k >= 2 and split:
            order += [Pass("W", stage, k - 2) for stage in reversed(range(stages))]
    return Schedule("stream", microbatches, (0,) * stages, (tuple(order),))


def profile_request(plan: Plan, schedule: Schedule, model: ModelSpec, dtype: DType) -> TrialRequest:
    link = Link(0.0, 1.0)
    samples = plan.dp * plan.microbatches * plan.micro_batch_size
    return TrialRequest(
        trial=0,
        plan=plan,
        schedule=schedule,
        model=dataclasses.replace(model, layers=sum(plan.layer_split)),
        cluster=ClusterSpec(1, plan.devices, "cpu", None, link, link),
        training=TrainingSpec(samples, dtype),
    )


@torch.no_grad()
def fill_plausibly(stage: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Plausible values in little time: the normal numbers of one block, over and over. Timing needs no other ones."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(2**16).normal_(0.0, 0.02, generator=generator)
    for name, parameter in stage.named_parameters():
        target = local_tensor(parameter.data).view(-1)
        if "norm" in name:
            target.fill_(1.0)
            continue
        here = block.to(target.device)
        for start in range(0, target.numel(), block.numel()):
            part = target[start : start + block.numel()]
            part.copy_(here[: part.numel()])


def _own(device: Device, seconds: Seconds, wall: bool) -> float:
    """On a CPU its time, where waiting must not count unless asked for; the GPU's own clock on a GPU."""
    return seconds.wall_s if wall or device.torch_device.type != "cpu" else seconds.cpu_s


def collect_garbage() -> None:
    gc.collect()


def _sweeper(device: Device) -> Callable[[], None]:
    """What leaves the caches of a CPU core without anything useful; GPUs have no waiting rank beside them."""
    if device.torch_device.type != "cpu":
        return lambda: None
    scratch = torch.zeros(SWEEP_BYTES // 4)

    def sweep() -> None:
        scratch.add_(1.0)

    return sweep


@dataclass
class _Times:
    """Seconds of passes by (depth, kind, stage), and of the rank between passes by depth."""

    samples: dict[tuple[int, str, int], list[float]]
    between: dict[int, list[float]]

    def hand_over_s(self, depth: int) -> float:
        """Median time of the rank between two passes."""
        return max(0.0, statistics.median(self.between[depth]))


def _timed(
    trainings: dict[int, Training],
    executors: dict[tuple[int, bool], Executor],
    rounds: int | None,
    sweep: Callable[[], None] | None,
    wall: bool,
) -> _Times:
    """Every executor takes its turn, round after round; the first isn't counted."""
    times = _Times(defaultdict(list), defaultdict(list))
    spent_s = 0.0
    for index in range(1 + MOST_ROUNDS):
        for (depth, _), executor in executors.items():
            seconds = _one_step(trainings[depth], executor, depth, times if index else None, sweep, wall)
            spent_s += seconds if index else 0.0
        if index == rounds or (rounds is None and index >= LEAST_ROUNDS and spent_s > ENOUGH_S):
            break
    return times


def _one_step(
    training: Training,
    executor: Executor,
    depth: int,
    times: _Times | None,
    sweep: Callable[[], None] | None,
    wall: bool,
) -> float:
    """Run the passes once and note their times; the wall time of all."""
    swept: list[float] = []

    def around(item: Pass | None) -> None:
        if sweep is not None and item is not None and item.kind != "W":
            cpu = time.thread_time()
            sweep()
            swept.append(time.thread_time() - cpu)

    executor.around_pass = around
    training.model.prepare_step()
    collect_garbage()
    gc.disable()
    try:
        training.device.synchronize()
        begun, cpu = time.perf_counter(), time.thread_time()
        passes = executor.run(training.batch(0)).passes
        cpu = time.thread_time() - cpu
        taken = time.perf_counter() - begun
    finally:
        gc.enable()
        executor.around_pass = None
    if times is not None:
        for item, seconds in passes:
            times.samples[depth, item.kind, item.stage].append(_own(training.device, seconds, wall))
        own = sum(seconds.cpu_s for _, seconds in passes)
        times.between[depth].append((cpu - sum(swept) - own) / len(passes))
    return taken


@dataclass
class _Metered:
    """One pass as the meters saw it: bytes more held after it than before, the peak, and the tp collectives."""

    change: int = 0
    peak: int = 0
    tp_bytes: float = 0.0
    tp_calls: float = 0.0


class _PassMeter(StorageMeter):
    """A storage meter whose highest mark can be set back."""

    highest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self.highest = max(self.highest, self.live_bytes)
        return result

    def mark(self) -> int:
        """Bytes held now; the highest mark starts anew from here."""
        self.highest = self.live_bytes
        return self.highest


def _metered(training: Training, executor: Executor) -> dict[tuple[str, int], _Metered]:
    """Every kind of pass in the middle of a step, when everything that lasts has been made."""
    counted = METERED_MICROBATCHES // 2
    found: dict[tuple[str, int], _Metered] = {}
    counter = CollectiveCounter(training.axis_groups())
    meter = _PassMeter(training.lasting_tensors, training.model.gathered_parameters)
    state: list[tuple[Pass, int, int, int]] = []

    def around(item: Pass | None) -> None:
        if item is not None:
            state.append((item, meter.mark(), counter.bytes_sent.get("tp", 0), counter.calls.get("tp", 0)))
            return
        begun, before, sent, calls = state.pop()
        if begun.microbatch != counted:
            return
        highest, after = meter.highest, meter.live_bytes
        found[begun.kind, begun.stage] = _Metered(
            change=after - before,
            peak=max(0, highest - (after if begun.kind == "F" else before)),
            tp_bytes=counter.bytes_sent.get("tp", 0) - sent,
            tp_calls=counter.calls.get("tp", 0) - calls,
        )

    training.model.prepare_step()
    executor.around_pass = around
    collect_garbage()
    with meter, counter if training.request.plan.tp > 1 else nullcontext():
        executor.run(training.batch(0))
    executor.around_pass = None
    return found


def _boundary_bytes(training: Training) -> int:
    """Bytes of the activation between two stages on this rank."""
    numbers = 1
    for size in training.executor.boundary:
        numbers *= size
    return numbers * training.model.dtype.itemsize


def _metered_device(training: Training) -> DeviceFigures:
    """Bytes and collectives of a step without passes; no times."""
    counter = CollectiveCounter(training.axis_groups())
    meter = _PassMeter(training.lasting_tensors, training.model.gathered_parameters)
    sent: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    peaks = []

    def metered(work) -> None:  # type: ignore[no-untyped-def]
        meter.mark()
        with counter:
            work()
        peaks.append(meter.highest)

    collect_garbage()
    with meter:
        metered(training.model.prepare_step)
        parameters = _bytes(_parameter_tensors(training))
        gradients = _bytes(training.lasting_tensors()) - _bytes(_own_parameters(training)) - _optimizer_bytes(training)
        metered(training.model.finish_gradients)
        metered(training.optimizer.step)
    for axis, size in counter.bytes_sent.items():
        sent[axis], calls[axis] = size, counter.calls[axis]
    return DeviceFigures(
        outside_s=0.0,
        optimizer_s=0.0,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=_optimizer_bytes(training),
        outside_peak_bytes=max(peaks),
        dp_bytes=sent["dp"],
        dp_calls=calls["dp"],
        tied_bytes=sent["tied"],
        tied_calls=calls["tied"],
        tp_bytes=sent["tp"],
        tp_calls=calls["tp"],
        parameters=training.parameters,
    )


def _own_parameters(training: Training) -> list[Tensor]:
    return [local_tensor(parameter.detach()) for _, parameter in training.model.named_parameters()]


def _parameter_tensors(training: Training) -> Iterator[Tensor]:
    """The rank's own parameters and the copies that data parallelism gathers for the passes."""
    yield from (local_tensor(parameter) for parameter in training.optimizer._locals)
    yield from _own_parameters(training)
    yield from training.model.gathered_parameters()


def _optimizer_bytes(training: Training) -> int:
    return _bytes(training.optimizer.state_tensors())


def _bytes(tensors) -> int:  # type: ignore[no-untyped-def]
    """Bytes of the distinct storages of `tensors`."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in map(local_tensor, tensors)}
    return sum(storages.values())
