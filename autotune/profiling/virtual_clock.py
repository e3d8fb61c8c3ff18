"""Step time and bubble from measured passes: replay the schedule with them.

When ranks outnumber cores, wall time measures the operating system's scheduler. The CPU time of a pass doesn't: no
waiting is inside it. So the virtual clock takes

* the CPU time of every pass of the step (median over its microbatches; of the tp and dp ranks that run a stage, the
  slowest),
* plus the tensor-parallel collectives inside it, by the cluster's link model, as the worker's layout issues them,

replays the schedule with these, a message costing latency + bytes / bandwidth of the link it crosses, and adds to
every device, when its last pass is done, its data-parallel reduction by the link model and its optimizer's CPU time.
The slowest device gives the step. docs/results.md says what is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.cost.assumptions import WORKER, element_bytes
from autotune.cost.communication import Layout, gather_s, group_link, message_s
from autotune.cost.parameters import StageShape, stage_parameters
from autotune.cost.work import PassWork, stage_work
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.results.measurement import Clock
from autotune.schedules.costs import PassCosts
from autotune.schedules.simulate import simulate

__all__ = ["ReplayedStep", "pick_clock", "replay"]


@dataclass(frozen=True)
class ReplayedStep:
    """One measured step, replayed.

    Attributes:
        step_time_s: passes, messages, reductions and optimizer; the slowest device's.
        bubble_rate: 1 - work of the busiest device / makespan of the passes.
    """

    step_time_s: float
    bubble_rate: float


def pick_clock(device: str, ranks: int, cores: float, reports: Sequence[RankReport]) -> Clock:
    """`virtual` if CPU ranks outnumber the cores and every rank timed its passes; else `wall`."""
    crowded = device == "cpu" and ranks > cores
    return "virtual" if crowded and all(report.passes for report in reports) else "wall"


def replay(request: TrialRequest, reports: Sequence[RankReport], clock: Clock) -> tuple[ReplayedStep, ...]:
    """Every measured step, replayed from the passes that the ranks timed.

    Args:
        reports: complete reports of all ranks, rank r at index r, each with `passes`.
        clock: `virtual` adds tp collectives to the CPU times; wall times of passes contain them already.

    Raises:
        ValueError: a pass of the schedule was not timed; the message names it.
    """
    times = _PassTimes(request, reports)
    return tuple(_replay_step(request, reports, times, step, clock) for step in range(request.measured_steps))


class _PassTimes:
    """Time of each (kind, stage) of a step: the slowest of the ranks that run it."""

    def __init__(self, request: TrialRequest, reports: Sequence[RankReport]) -> None:
        self.steps: list[dict[tuple[str, int], tuple[float, float]]] = []
        for step in range(request.measured_steps):
            slowest: dict[tuple[str, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
            for report in reports:
                for entry in report.passes[step]:
                    key = (entry.kind, entry.stage)
                    cpu_s, wall_s = slowest[key]
                    slowest[key] = (max(cpu_s, entry.cpu_s), max(wall_s, entry.wall_s))
            self.steps.append(dict(slowest))

    def of(self, step: int, clock: Clock) -> dict[tuple[str, int], float]:
        """Seconds of each pass by one of the two clocks."""
        column = 0 if clock == "virtual" else 1
        return {key: values[column] for key, values in self.steps[step].items()}


def _replay_step(
    request: TrialRequest, reports: Sequence[RankReport], times: _PassTimes, step: int, clock: Clock
) -> ReplayedStep:
    schedule, plan = request.schedule, request.plan
    seconds = times.of(step, clock)
    if clock == "virtual":
        collectives = _tp_collectives(request)
        seconds = {key: value + collectives[key] for key, value in seconds.items()}
    nothing = (0.0,) * schedule.stages
    costs = PassCosts(
        forward=tuple(_time(seconds, "F", stage) for stage in range(schedule.stages)),
        backward=tuple(_backward(seconds, stage) for stage in range(schedule.stages)),
        weight=tuple(seconds.get(("W", stage), 0.0) for stage in range(schedule.stages)),
        hop=_hops(request),
        activation=nothing,
        kept=nothing,
    )
    timeline = simulate(schedule, costs)
    width = plan.dp * plan.tp
    finished = []
    for device in range(schedule.devices):
        ranks = reports[device * width : (device + 1) * width]
        optimizer_s = max((report.optimizer_cpu_s[step] for report in ranks if report.optimizer_cpu_s), default=0.0)
        finished.append(timeline.end[device][-1] + _reduction_s(request, device) + optimizer_s)
    return ReplayedStep(max(finished), timeline.bubble_rate)


def _time(seconds: Mapping[tuple[str, int], float], kind: str, stage: int) -> float:
    if (kind, stage) not in seconds:
        raise ValueError(f"no rank timed pass {kind} of stage {stage}")
    return seconds[kind, stage]


def _backward(seconds: Mapping[tuple[str, int], float], stage: int) -> float:
    """B where a stage splits its backward; else the fused pass, which the simulation charges as B + W with W = 0."""
    return _time(seconds, "B" if ("B", stage) in seconds else "BW", stage)


def _stage_shape(request: TrialRequest, stage: int) -> StageShape:
    split = request.plan.layer_split
    return StageShape(split[stage], embeds=stage == 0, heads=stage == len(split) - 1)


def _tp_collectives(request: TrialRequest) -> dict[tuple[str, int], float]:
    """Seconds of tensor-parallel collectives inside each pass; the slowest of the pipeline device's tp groups."""
    plan, cluster, dtype = request.plan, request.cluster, request.training.dtype
    layout = Layout(plan.pp, plan.dp, plan.tp, cluster.devices_per_node)
    found: dict[tuple[str, int], float] = {}
    for stage, device in enumerate(request.schedule.placement):
        work = stage_work(
            request.model,
            _stage_shape(request, stage),
            plan.tp,
            plan.micro_batch_size,
            dtype,
            WORKER,
            WORKER.recomputation(plan.recompute),
        )
        links = [group_link(layout.tp_group(device, k), layout, cluster) for k in range(plan.dp)]

        def seconds(part: PassWork, links: list = links) -> float:
            if part.gathers == 0:
                return 0.0
            mean = part.gather_bytes / part.gathers
            return max(part.gathers * gather_s(mean, plan.tp, link, efficiency=1.0) for link in links)

        found["F", stage] = seconds(work.forward)
        found["B", stage] = seconds(work.backward)
        found["W", stage] = seconds(work.weight)
        found["BW", stage] = found["B", stage] + found["W", stage]
    return found


def _hops(request: TrialRequest) -> tuple[tuple[float, ...], ...]:
    """Seconds of a message between any two pipeline devices: each tp rank sends its slice of the sequence."""
    plan, cluster, model = request.plan, request.cluster, request.model
    layout = Layout(plan.pp, plan.dp, plan.tp, cluster.devices_per_node)
    tokens = plan.micro_batch_size * model.sequence_length / plan.tp
    message_bytes = tokens * model.hidden * element_bytes(request.training.dtype)

    def hop(sender: int, receiver: int) -> float:
        if sender == receiver:
            return 0.0
        link = cluster.inter_node if layout.crosses(sender, receiver) else cluster.intra_node
        return message_s(message_bytes, link, efficiency=1.0)

    return tuple(tuple(hop(a, b) for b in range(plan.pp)) for a in range(plan.pp))


def _reduction_s(request: TrialRequest, device: int) -> float:
    """Seconds of a device's gradient reduction over dp: a reduce-scatter and an all-gather of its parameters."""
    plan, cluster = request.plan, request.cluster
    if plan.dp == 1:
        return 0.0
    layout = Layout(plan.pp, plan.dp, plan.tp, cluster.devices_per_node)
    link = max(
        (group_link(layout.dp_group(device, k), layout, cluster) for k in range(plan.tp)),
        key=lambda one: one.latency_s + 1.0 / one.bandwidth_bytes_per_s,
    )
    total = 0.0
    for stage in request.schedule.device_stages(device):
        parameters = stage_parameters(request.model, _stage_shape(request, stage), plan.tp)
        size = parameters * element_bytes(request.training.dtype)
        total += 2 * gather_s(size, plan.dp, link, efficiency=1.0)
    return total
