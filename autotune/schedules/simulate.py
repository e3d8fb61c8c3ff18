"""From a schedule and costs to its timeline: when every pass runs, the bubble, the memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from autotune.errors import UserError
from autotune.schedules import kernel
from autotune.schedules.costs import PassCosts
from autotune.schedules.schedule import Schedule

__all__ = ["Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """A schedule with times; all in the unit of its costs.

    Attributes:
        start, end: for every device the times of its passes, in the order of `schedule.order`.
        peak_activation: the most activation each device ever holds. Under uniform costs the unit is one microbatch on
            one device's share of the model, so 1F1B has p on device 0.
    """

    schedule: Schedule
    costs: PassCosts
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    peak_activation: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From time 0 to the end of the last pass."""
        return max((times[-1] for times in self.end if times), default=0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time each device is busy."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.start, self.end, strict=True)
        )

    @property
    def bubble_rate(self) -> float:
        """1 - work of the busiest device / makespan."""
        return _share_lost(max(self.work), self.makespan)

    @property
    def span(self) -> float:
        """The longest time from a device's first start to its last end."""
        return max(
            (ends[-1] - starts[0] for starts, ends in zip(self.start, self.end, strict=True) if ends), default=0.0
        )

    @property
    def span_bubble_rate(self) -> float:
        """1 - work of the busiest device / longest span, as in the zero-bubble paper (arXiv 2401.10241, Table 5)."""
        return _share_lost(max(self.work), self.span)

    def memory_curve(self, device: int) -> list[tuple[float, float]]:
        """Steps (time, activation held from then on) of one device, times ascending, beginning at (0, 0)."""
        change: dict[float, float] = {}
        costs = self.costs
        for item, start, end in zip(self.schedule.order[device], self.start[device], self.end[device], strict=True):
            stage = item.stage
            if item.kind == "F":
                change[start] = change.get(start, 0.0) + costs.activation[stage]
            else:
                whole, kept = costs.activation[stage], costs.kept[stage]
                freed = {"B": whole - kept, "W": kept, "BW": whole}[item.kind]
                change[end] = change.get(end, 0.0) - freed
        held = 0.0
        curve = [(0.0, 0.0)]
        for time in sorted(change):
            held += change[time]
            curve.append((time, held))
        return curve


def _share_lost(work: float, time: float) -> float:
    # Rounding of long sums must not show as a bubble of -1e-16.
    return max(0.0, 1.0 - work / time) if time > 0 else 0.0


def simulate(schedule: Schedule, costs: PassCosts | None = None) -> Timeline:
    """Run `schedule` under `costs`: every pass starts as soon as its device is free and what it reads has arrived.

    Args:
        costs: None: F = B = W = 1 for a device's whole share, no latency.

    Raises:
        UserError: the costs are for another number of stages or devices, or the orders deadlock
            (`autotune.schedules.checks.problems` says where).
    """
    costs = PassCosts.uniform(schedule.placement) if costs is None else costs
    stages, devices, microbatches = schedule.stages, schedule.devices, schedule.microbatches
    if costs.stages != stages:
        raise UserError(f"costs are for {costs.stages} stages, schedule {schedule.name} has {stages}")
    if not isinstance(costs.hop, (int, float)) and len(costs.hop) != devices:
        raise UserError(f"hop table is for {len(costs.hop)} devices, schedule {schedule.name} has {devices}")
    order, first = kernel.encode(schedule)
    tables = kernel.cost_tables(schedule.placement, costs)
    work = kernel.scratch(devices, stages, microbatches, len(order))
    ran = kernel.run(order, first, stages, microbatches, tables.duration, tables.hop, tables.every, **work)
    if ran < len(order):
        raise UserError(f"schedule {schedule.name} deadlocks: {ran} of {len(order)} passes can run")
    peak = [0.0] * devices
    kernel.peaks(order, first, stages, microbatches, tables.activation, tables.kept, peak)
    bounds = list(pairwise(first))
    return Timeline(
        schedule=schedule,
        costs=costs,
        start=tuple(tuple(work["start"][a:b]) for a, b in bounds),
        end=tuple(tuple(work["end"][a:b]) for a, b in bounds),
        # 1/3 + 1/3 + 1/3 is not 1: a peak is a short sum of stage activations, so 12 digits are all there is to it.
        peak_activation=tuple(round(value, 12) for value in peak),
    )
