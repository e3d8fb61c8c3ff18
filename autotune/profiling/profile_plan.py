"""The `profile` fidelity: a plan's step time and memory from its stages, each measured once on one device. No torch.

Every rank's report is put together from the profiles of its stages and replayed by the virtual clock, the same code
that replays the reports of a run. So a profile and a run differ in how passes were timed, and in nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from autotune.cost.assumptions import element_bytes
from autotune.cost.memory import DeviceMemory, memory_refusal
from autotune.cost.prediction import Breakdown
from autotune.profiling.profile_cache import ProfileCache, hardware
from autotune.profiling.profile_errors import ProfileError
from autotune.profiling.profile_memory import WalkedPeak, walk
from autotune.profiling.profile_network import Network, measured_network
from autotune.profiling.profile_records import (
    DeviceFigures,
    DeviceKey,
    Ends,
    PassesKey,
    StageFigures,
    StageKind,
    device_at,
    stage_at,
)
from autotune.profiling.protocol import PassTime, RankReport, TrialRequest
from autotune.profiling.stage_profiler import StageProfiler
from autotune.profiling.virtual_clock import StepParts, replay
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.schedules.lowering import lower
from autotune.schedules.schedule import PassKind
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import DType

__all__ = ["MEMORY_ERROR", "PlanProfiler", "Profile", "profile_outcome", "wanted_keys"]

MOST_RANKS = 16
"""CPU processes that are started at most to measure as crowded as a run is.

Plans of up to so many ranks are taken to run on this machine alone, larger ones on nodes like this machine.
"""

MEMORY_ERROR = 0.05
"""Largest relative error of the peak memory against runs; `benchmarks/prediction_accuracy.py` saw 1.4 %."""


@dataclass(frozen=True)
class Profile:
    """What a plan is expected to take, from its measured stages.

    Attributes:
        measurement: simulated, so `clock` is `virtual`, also where it stands for the wall clock of a run; peaks are
            those of all ranks, as a run reports them.
        breakdown: where the step of the device that ends last goes.
        memory: of every pipeline device at its peak (its tp and dp ranks are alike).
    """

    plan: Plan
    measurement: Measurement
    breakdown: Breakdown
    memory: tuple[DeviceMemory, ...]

    @property
    def step_time_s(self) -> float:
        """One optimizer step."""
        return self.measurement.step_time_s

    @property
    def peak_memory_bytes(self) -> int:
        """Peak of the heaviest device."""
        return round(max(device.total for device in self.memory))

    def refusal(self, limit_bytes: float | None) -> str | None:
        """Why the plan can't fit, beyond the error of profiles (`refused (estimate): ...`), or None."""
        return memory_refusal(self.memory, limit_bytes, MEMORY_ERROR)


class PlanProfiler:
    """Profiles plans of one model, measuring each distinct stage once.

    Args:
        device: the cluster's device name: the local machine must be one.
        cache: None: the user's own (`autotune.profiling.profile_cache.default_cache_folder`).
    """

    def __init__(self, model: ModelSpec, dtype: DType, device: str, cache: ProfileCache | None = None) -> None:
        self.stages = StageProfiler(model, dtype, device, cache)

    def __enter__(self) -> PlanProfiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the measuring process, if one runs."""
        self.stages.close()

    def profile(self, request: TrialRequest) -> Profile:
        """The profile of a plan under its schedule.

        It predicts the clock that a run would be judged by: on CPU ranks that have a core each, the wall clock.

        Raises:
            ProfileError: a stage could not be measured.
            UserError: the schedule deadlocks, or the cache can't be written.
        """
        figures = self._stage_figures(request)
        devices = [self._device_figures(request, device) for device in range(request.plan.pp)]
        memory = _memory(request, figures, devices)
        width = request.plan.dp * request.plan.tp
        network = measured_network(self.stages, request, _crowd(request))
        if network.hand_over:
            figures = {stage: _with_hand_over(one) for stage, one in figures.items()}
        composed = [_composed(request, device, figures, devices[device], network) for device in range(request.plan.pp)]
        reports = [
            composed[device].report(device * width + k, devices[device], memory[device])
            for device in range(request.plan.pp)
            for k in range(width)
        ]
        once = network.judged(replace(request, measured_steps=1))
        step = replay(once, reports, "virtual")[0]
        without_messages_s = replay(once, reports, "virtual", free_messages=True)[0].step_time_s
        measurement = Measurement(
            clock="virtual",
            step_time_s=step.step_time_s,
            step_time_min_s=step.step_time_s,
            step_time_max_s=step.step_time_s,
            step_time_std_s=0.0,
            step_time_wall_s=step.step_time_s,
            peak_memory_bytes_per_rank=tuple(round(memory[rank // width].total) for rank in range(len(reports))),
            bubble_rate=step.bubble_rate,
            loss=None,
            torch=_torch_version(),
            device=hardware(self.stages.device),
        )
        return Profile(request.plan, measurement, _breakdown(step.parts, without_messages_s, devices, composed), memory)

    def _stage_figures(self, request: TrialRequest) -> dict[int, StageFigures]:
        plan = request.plan
        depths = self.stages.passes(_passes_key(request))
        found = {}
        for stage, layers in enumerate(plan.layer_split):
            kind = _stage_kind(stage, plan.stages)
            found[stage] = stage_at(layers, {depth: stages[kind] for depth, stages in depths.items()})
        return found

    def _device_figures(self, request: TrialRequest, device: int) -> DeviceFigures:
        layers, key = _device_key(request, device)
        return device_at(layers, self.stages.device_figures(key))


def wanted_keys(requests: Iterable[TrialRequest]) -> list[PassesKey | DeviceKey]:
    """Every shape that profiling these plans measures, each once."""
    found: dict[PassesKey | DeviceKey, None] = {}
    for request in requests:
        found[_passes_key(request)] = None
        found |= {_device_key(request, device)[1]: None for device in range(request.plan.pp)}
    return list(found)


def profile_outcome(profiler: PlanProfiler, request: TrialRequest) -> tuple[TrialOutcome, Profile | None]:
    """The outcome of a trial of fidelity `profile`, for its row, and the profile behind it.

    `predicted`, or `refused` with the reason when the plan would exceed its memory by more than the error of profiles;
    `oom`, `timeout` or `failed` when a stage could not be measured.
    """
    began = time.time()
    started = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
    try:
        profile = profiler.profile(request)
    except ProfileError as error:
        return TrialOutcome(error.state, f"profiling a stage: {error}", None, started, time.time() - began), None
    refusal = profile.refusal(request.cluster.memory_limit_bytes)
    if refusal is not None:
        return TrialOutcome("refused", refusal, None, started, time.time() - began), profile
    reason = "stages measured on one device, schedule simulated"
    return TrialOutcome("predicted", reason, profile.measurement, started, time.time() - began), profile


def _stage_kind(stage: int, stages: int) -> StageKind:
    if stages == 1:
        return "whole"
    return "first" if stage == 0 else "last" if stage == stages - 1 else "middle"


def _with_hand_over(stage: StageFigures) -> StageFigures:
    """Passes with the rank's work between them: the wall clock of a run on free cores sees it, CPU times don't."""
    passes = {kind: replace(item, seconds=item.seconds + stage.hand_over_s) for kind, item in stage.passes.items()}
    return replace(stage, passes=passes)


def _passes_key(request: TrialRequest) -> PassesKey:
    plan = request.plan
    return PassesKey(plan.tp, plan.micro_batch_size, plan.recompute, plan.stages == 1, _crowd(request))


def _crowd(request: TrialRequest) -> int:
    """Processes of a run that share the cores of a machine."""
    if request.cluster.device != "cpu":
        return 1
    ranks, node = request.plan.devices, request.cluster.devices_per_node
    return ranks if ranks <= MOST_RANKS else min(node, MOST_RANKS)


def _device_key(request: TrialRequest, device: int) -> tuple[int, DeviceKey]:
    """Layers of a device, and the measurement that its figures follow from."""
    plan, stages = request.plan, request.schedule.device_stages(device)
    layers = sum(plan.layer_split[stage] for stage in stages)
    first, last = 0 in stages, plan.stages - 1 in stages
    ends: Ends = "both" if first and last else "first" if first else "last" if last else "middle"
    return layers, DeviceKey(plan.tp, plan.dp, ends, _crowd(request))


def _boundary_bytes(request: TrialRequest) -> float:
    plan, model = request.plan, request.model
    tokens = plan.micro_batch_size * (model.sequence_length // plan.tp)
    return tokens * model.hidden * element_bytes(request.training.dtype)


def _memory(
    request: TrialRequest, figures: Mapping[int, StageFigures], devices: list[DeviceFigures]
) -> tuple[DeviceMemory, ...]:
    boundary, last_stage = _boundary_bytes(request), request.plan.stages - 1
    return tuple(
        _device_memory(held, walk(actions, figures, boundary, last_stage))
        for held, actions in zip(devices, lower(request.schedule), strict=True)
    )


def _device_memory(held: DeviceFigures, worst: WalkedPeak) -> DeviceMemory:
    """The peak of a device: while its passes run, or while its gradients are reduced and its optimizer steps."""
    activations, boundary, temporary = worst.held_bytes, worst.boundary_bytes, worst.temporary_bytes
    if held.outside_peak_bytes > held.lasting_bytes + worst.total_bytes:
        activations, boundary, temporary = 0.0, 0.0, held.outside_peak_bytes - held.lasting_bytes
    return DeviceMemory(
        parameters=held.parameter_bytes,
        gradients=held.gradient_bytes,
        optimizer=held.optimizer_bytes,
        activations=activations,
        temporary=temporary,
        buffers=boundary,
    )


@dataclass(frozen=True)
class _Composed:
    """The step of a pipeline device's ranks, put together from its stages.

    Attributes:
        seconds: of a pass by (kind, stage), communication that its ranks pay for included.
        tp_s: the part of all passes of a step that is tensor-parallel communication.
        outside_s: a rank's time outside the passes.
        collective_bytes, collective_calls: what is priced by the links, by mesh axis.
    """

    seconds: Mapping[tuple[PassKind, int], float]
    tp_s: float
    outside_s: float
    collective_bytes: Mapping[str, float]
    collective_calls: Mapping[str, float]

    def report(self, rank: int, held: DeviceFigures, memory: DeviceMemory) -> RankReport:
        """What a rank of this pipeline device would report."""
        return RankReport(
            rank=rank,
            state="ok",
            passes=(tuple(PassTime(kind, stage, time_s, time_s) for (kind, stage), time_s in self.seconds.items()),),
            optimizer_cpu_s=(self.outside_s,),
            collective_bytes={axis: round(size) for axis, size in self.collective_bytes.items()},
            collective_calls={axis: round(count) for axis, count in self.collective_calls.items()},
            peak_memory_bytes=round(memory.total),
            parameters=round(held.parameters),
        )


def _composed(
    request: TrialRequest, device: int, figures: Mapping[int, StageFigures], held: DeviceFigures, network: Network
) -> _Composed:
    runs = Counter((item.kind, item.stage) for item in request.schedule.order[device])
    passes = {key: figures[key[1]].passes[key[0]] for key in runs}
    sent = {
        "tp": held.tp_bytes + sum(passes[key].tp_bytes * count for key, count in runs.items()),
        "dp": held.dp_bytes,
        "tied": held.tied_bytes,
    }
    calls = {
        "tp": held.tp_calls + sum(passes[key].tp_calls * count for key, count in runs.items()),
        "dp": held.dp_calls,
        "tied": held.tied_calls,
    }
    tp_s = {key: network.tp.seconds(p.tp_calls, p.tp_bytes) for key, p in passes.items()}
    seconds = {key: p.seconds + tp_s[key] + network.posting_s(request.schedule, *key) for key, p in passes.items()}
    outside_s = held.outside_s + network.tp.seconds(held.tp_calls, held.tp_bytes)
    # Without data parallelism a tied embedding's sum is priced by the links alone: its cost among two nobody measured.
    outside_s += network.dp.seconds(held.dp_calls + held.tied_calls, held.dp_bytes + held.tied_bytes)
    linked = network.by_links
    return _Composed(
        seconds=seconds,
        tp_s=sum(tp_s[key] * count for key, count in runs.items()),
        outside_s=outside_s,
        collective_bytes={axis: size for axis, size in sent.items() if axis in linked},
        collective_calls={axis: count for axis, count in calls.items() if axis in linked},
    )


def _breakdown(
    parts: StepParts, without_messages_s: float, devices: list[DeviceFigures], composed: list[_Composed]
) -> Breakdown:
    """The parts of the step, named as predictions name them; clearing and copying gradients counts as dp."""
    messages_s = min(parts.waiting_s, max(0.0, parts.total_s - without_messages_s))
    optimizer_s = min(devices[parts.device].optimizer_s, parts.outside_s)
    tp_s = composed[parts.device].tp_s
    return Breakdown(
        compute_s=parts.compute_s - tp_s,
        tp_s=parts.tp_s + tp_s,
        pp_s=messages_s,
        overhead_s=0.0,
        bubble_s=parts.waiting_s - messages_s,
        dp_s=parts.reduction_s + parts.outside_s - optimizer_s,
        optimizer_s=optimizer_s,
    )


def _torch_version() -> str:
    from importlib import metadata

    return metadata.version("torch")
