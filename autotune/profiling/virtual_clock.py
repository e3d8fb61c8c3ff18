"""Step time and bubble from measured passes: replay the schedule with them.

When ranks outnumber cores, wall time measures the operating system's scheduler. The CPU time of a pass doesn't: no
waiting is inside it. So the virtual clock takes

* the CPU time of every pass of the step (median over its microbatches; of the tp and dp ranks that run a stage, the
  slowest),
* plus the tensor-parallel collectives inside it: the bytes and calls that the ranks counted, as rings over
  the cluster's links, spread over the forward and backward passes of the device by their layers,

replays the schedule with these, messages taking the time of the link they cross, and adds to every device, when its
last pass is done, its gradient reductions (dp and tied embeddings, bytes and calls as counted) and its CPU time outside
the passes. The slowest device gives the step. Collectives and messages take what they take in the cost model, by its
own functions (`autotune.cost.communication`). docs/results.md says what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.cost.assumptions import element_bytes
from autotune.cost.communication import Layout, group_link, message_s, rings_s
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.results.measurement import Clock
from autotune.schedules.costs import PassCosts
from autotune.schedules.simulate import simulate
from autotune.space.cluster import Link

__all__ = ["ReplayedStep", "StepParts", "pick_clock", "replay"]

PassSeconds = dict[tuple[str, int], float]
"""Seconds of the passes of one step by (kind, stage)."""


@dataclass(frozen=True)
class StepParts:
    """Where the step of the device that ends last goes; the parts sum to the step time.

    Attributes:
        device: that pipeline device.
        compute_s: its passes, without the tp collectives that the virtual clock adds to them.
        tp_s: those collectives.
        waiting_s: until its last pass has ended, for other devices and messages.
        reduction_s: gradient reductions over dp and of tied embeddings.
        outside_s: its CPU time outside the passes.
    """

    device: int
    compute_s: float
    tp_s: float
    waiting_s: float
    reduction_s: float
    outside_s: float

    @property
    def total_s(self) -> float:
        """The step time."""
        return self.compute_s + self.tp_s + self.waiting_s + self.reduction_s + self.outside_s


@dataclass(frozen=True)
class ReplayedStep:
    """One measured step, replayed.

    Attributes:
        step_time_s: passes, messages, reductions and optimizer; the slowest device's.
        bubble_rate: 1 - work of the busiest device / makespan of the passes.
        parts: where the time of that device goes.
    """

    step_time_s: float
    bubble_rate: float
    parts: StepParts


def pick_clock(device: str, ranks: int, cores: float, reports: Sequence[RankReport]) -> Clock:
    """`virtual` if CPU ranks outnumber the cores and every rank timed its passes; else `wall`."""
    crowded = device == "cpu" and ranks > cores
    return "virtual" if crowded and all(report.passes for report in reports) else "wall"


def replay(
    request: TrialRequest, reports: Sequence[RankReport], clock: Clock, free_messages: bool = False
) -> tuple[ReplayedStep, ...]:
    """Every measured step, replayed from the passes that the ranks timed.

    Args:
        reports: complete reports of all ranks, rank r at index r, each with `passes`.
        clock: `virtual` adds the tp collectives to the CPU times; the wall times of passes contain them already.
        free_messages: let messages between pipeline devices take no time.

    Raises:
        ValueError: a pass of the schedule was not timed; the message names it.
    """
    network = _Network(request, reports)
    finish_s = tuple(network.reduction_s(device) for device in range(request.plan.pp))
    inside_s = network.collectives_in_passes() if clock == "virtual" else {}
    steps = []
    for step in range(request.measured_steps):
        seconds = _slowest(reports, step, clock)
        seconds = {key: value + inside_s.get(key, 0.0) for key, value in seconds.items()}
        timeline = simulate(request.schedule, _costs(request, seconds, 0.0 if free_messages else network.hops()))
        tp_s = [sum(inside_s.get((p.kind, p.stage), 0.0) for p in order) for order in request.schedule.order]
        parts = [
            StepParts(
                device=device,
                compute_s=timeline.work[device] - tp_s[device],
                tp_s=tp_s[device],
                waiting_s=timeline.end[device][-1] - timeline.work[device],
                reduction_s=finish_s[device],
                outside_s=_outside_passes_s(request, reports, device, step),
            )
            for device in range(request.plan.pp)
        ]
        last = max(parts, key=lambda part: part.total_s)
        steps.append(ReplayedStep(last.total_s, timeline.bubble_rate, last))
    return tuple(steps)


def _slowest(reports: Sequence[RankReport], step: int, clock: Clock) -> PassSeconds:
    """Each pass as slow as on the slowest of the ranks that run its stage."""
    seconds: PassSeconds = {}
    for report in reports:
        for entry in report.passes[step]:
            key = (entry.kind, entry.stage)
            value = entry.cpu_s if clock == "virtual" else entry.wall_s
            seconds[key] = max(seconds.get(key, 0.0), value)
    return seconds


def _costs(request: TrialRequest, seconds: PassSeconds, hop: float | tuple[tuple[float, ...], ...]) -> PassCosts:
    stages = range(request.schedule.stages)
    nothing = (0.0,) * len(stages)
    return PassCosts(
        forward=tuple(_time(seconds, "F", stage) for stage in stages),
        # A fused pass is charged as B + W with W = 0.
        backward=tuple(_time(seconds, "B" if ("B", stage) in seconds else "BW", stage) for stage in stages),
        weight=tuple(seconds.get(("W", stage), 0.0) for stage in stages),
        hop=hop,
        activation=nothing,
        kept=nothing,
    )


def _time(seconds: PassSeconds, kind: str, stage: int) -> float:
    if (kind, stage) not in seconds:
        raise ValueError(f"no rank timed pass {kind} of stage {stage}")
    return seconds[kind, stage]


def _device_ranks(request: TrialRequest, device: int) -> range:
    """Global ranks of one pipeline device: pp is the outermost axis of the layout."""
    width = request.plan.dp * request.plan.tp
    return range(device * width, (device + 1) * width)


def _outside_passes_s(request: TrialRequest, reports: Sequence[RankReport], device: int, step: int) -> float:
    """CPU seconds outside the passes of the device's slowest rank: optimizer, clearing and reducing gradients."""
    ranks = [reports[rank] for rank in _device_ranks(request, device)]
    return max((report.optimizer_cpu_s[step] for report in ranks if report.optimizer_cpu_s), default=0.0)


class _Network:
    """Seconds of what the ranks send, by the links it crosses."""

    def __init__(self, request: TrialRequest, reports: Sequence[RankReport]) -> None:
        plan = request.plan
        self.request, self.reports = request, reports
        self.layout = Layout(plan.pp, plan.dp, plan.tp, request.cluster.devices_per_node)

    def hops(self) -> tuple[tuple[float, ...], ...]:
        """A message between any two devices: every tp rank sends its slice of the sequence to its counterpart."""
        plan, model = self.request.plan, self.request.model
        tokens = plan.micro_batch_size * model.sequence_length / plan.tp
        size = tokens * model.hidden * element_bytes(self.request.training.dtype)
        devices, share = range(plan.pp), self.request.link_efficiency
        return tuple(
            tuple(0.0 if a == b else message_s(size, self._link(a, b), share) for b in devices) for a in devices
        )

    def collectives_in_passes(self) -> PassSeconds:
        """The tp collectives of a step, spread over the passes of each device.

        Forward and backward of a layer issue the same collectives, a recomputed forward its own again, and the
        weight pass none.
        """
        request = self.request
        backward = 2.0 if request.plan.recompute == "full" else 1.0
        found: PassSeconds = {}
        for device in range(request.plan.pp):
            total_s = self._slowest_s(device, "tp")
            counts = Counter((p.kind, p.stage) for p in request.schedule.order[device] if p.kind != "W")
            weights = {key: request.plan.layer_split[key[1]] * (1.0 if key[0] == "F" else backward) for key in counts}
            whole = sum(weights[key] * count for key, count in counts.items())
            found |= {key: total_s * weight / whole for key, weight in weights.items()}
        return found

    def reduction_s(self, device: int) -> float:
        """The gradient reductions of a device's slowest rank: over dp, and of a tied embedding on two devices."""
        return self._slowest_s(device, "dp") + self._slowest_s(device, "tied")

    def _slowest_s(self, device: int, axis: str) -> float:
        found = []
        for rank in _device_ranks(self.request, device):
            report = self.reports[rank]
            size = (report.collective_bytes or {}).get(axis, 0)
            calls = (report.collective_calls or {}).get(axis, 0)
            ranks, link = self._axis_group(rank, axis)
            found.append(rings_s(size, calls, ranks, link, self.request.link_efficiency))
        return max(found)

    def _axis_group(self, rank: int, axis: str) -> tuple[int, Link]:
        """How many ranks communicate over the axis, and the link that bounds them."""
        plan = self.request.plan
        device, within = divmod(rank, plan.dp * plan.tp)
        dp_rank, tp_rank = divmod(within, plan.tp)
        if axis == "tp":
            return plan.tp, group_link(self.layout.tp_group(device, dp_rank), self.layout, self.request.cluster)
        if axis == "dp":
            return plan.dp, group_link(self.layout.dp_group(device, tp_rank), self.layout, self.request.cluster)
        placement = self.request.schedule.placement
        return 2, self._link(placement[0], placement[-1])

    def _link(self, sender: int, receiver: int) -> Link:
        cluster = self.request.cluster
        return cluster.inter_node if self.layout.crosses(sender, receiver) else cluster.intra_node
