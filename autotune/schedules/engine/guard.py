"""The named schedules as candidates: a search that knows them can't be slower than the best of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autotune.schedules.engine.graph import chain_rows, time_orders
from autotune.schedules.engine.problem import Ints, Problem
from autotune.schedules.engine.site import Found
from autotune.schedules.registry import SCHEDULES, ScheduleKind
from autotune.schedules.schedule import Pass, Schedule
from autotune.schedules.simulate import simulate

__all__ = ["Guard", "Named", "orders_of", "schedule_of"]

NUMBER = {"F": 0, "B": 1, "W": 2}


@dataclass(frozen=True)
class Named:
    """A named schedule under the costs of a problem.

    Attributes:
        makespan: as the schedule stands, in the time unit of the costs.
        peak: most activation each device holds.
    """

    schedule: Schedule
    makespan: float
    peak: tuple[float, ...]


class Guard:
    """Builds each named schedule that a problem allows at most once."""

    def __init__(self) -> None:
        self._built: dict[tuple[Problem, str], Named] = {}

    def kinds(self, problem: Problem) -> list[ScheduleKind]:
        """The named schedules legal for the problem's placement, stages, microbatches and backward."""
        kind, v = problem.kind, problem.stages_per_device
        return [
            named
            for named in SCHEDULES.values()
            if named.placement == kind
            and not named.stages_problem(v)
            and not named.microbatches_problem(problem.devices, problem.microbatches)
            and not (problem.fused and named.split_backward)
        ]

    def named(self, problem: Problem, kind: ScheduleKind) -> Named:
        """One of them, timed."""
        key = (problem, kind.name)
        if key not in self._built:
            schedule = kind.generate(problem.devices, problem.microbatches, problem.stages_per_device)
            timeline = simulate(schedule, problem.costs)
            self._built[key] = Named(schedule, timeline.makespan, timeline.peak_activation)
        return self._built[key]

    def built(self) -> Iterable[Named]:
        """All that were built so far."""
        return self._built.values()


def orders_of(problem: Problem, schedule: Schedule) -> Found:
    """The complete orders of a schedule, each BW of a split problem as B and W; never slower than the schedule."""
    S, m = problem.stages, problem.microbatches
    rows: list[list[int]] = []
    for passes in schedule.order:
        row = []
        for kind, stage, microbatch in passes:
            cell = stage * m + microbatch
            if kind == "BW":
                row.append(S * m + cell)
                if not problem.fused:
                    row.append(2 * S * m + cell)
            else:
                row.append(NUMBER[kind] * S * m + cell)
        rows.append(row)
    orders = np.array(rows, np.int64)
    return Found(_makespan(problem, orders), orders, schedule.name)


def schedule_of(problem: Problem, orders: Ints, name: str) -> Schedule:
    """The schedule that complete orders stand for."""
    S, m = problem.stages, problem.microbatches
    kinds = ("F", "BW") if problem.fused else ("F", "B", "W")
    kind_of, cell = np.divmod(orders, S * m)
    stage, microbatch = np.divmod(cell, m)
    order = tuple(
        tuple(Pass(kinds[k], s, i) for k, s, i in zip(ks, ss, ms, strict=True))  # type: ignore[arg-type]
        for ks, ss, ms in zip(kind_of.tolist(), stage.tolist(), microbatch.tolist(), strict=True)
    )
    return Schedule(name=name, microbatches=m, placement=problem.placement, order=order)


def _makespan(problem: Problem, orders: Ints) -> float:
    m = problem.microbatches
    duration, before, before_hop, *_ = chain_rows(problem.tables, m)
    codes = orders.size
    start, place, topology = np.zeros(codes), np.zeros(codes, np.int64), np.zeros(codes, np.int64)
    return time_orders(m, orders, duration, before, before_hop, start, place, topology)
