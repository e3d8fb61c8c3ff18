"""The named schedules as candidates: a search that knows them can't be slower than the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.schedules.costs import PassCosts
from autotune.schedules.engine.bounds import lower_bounds
from autotune.schedules.engine.graph import blank_state, chain_rows, time_orders
from autotune.schedules.engine.problem import CAP_TOLERANCE, Ints, Problem
from autotune.schedules.engine.site import Found
from autotune.schedules.registry import SCHEDULES, ScheduleKind
from autotune.schedules.schedule import Pass, Schedule
from autotune.schedules.simulate import simulate

__all__ = ["Guard", "Named", "orders_of", "schedule_of"]

# What a short one says of a long one does not hold for these.
UNSTEADY = frozenset({"gis-h"})
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
    """The named schedules of some problems, timed at most once each."""

    def __init__(self) -> None:
        self._timed: dict[tuple[Problem, str], Named] = {}

    def better(self, problem: Problem, caps: Sequence[float], slowest: Callable[[], float]) -> Iterator[Named]:
        """The named schedules legal for the problem that fit `caps` and are faster than `slowest()`, one by one.

        It is asked again before each, so that one good schedule saves building the others.
        """
        if not problem.fits(caps):
            return
        for kind in _legal(problem):
            timed = problem if kind.split_backward else problem.with_fused_backward()
            if lower_bounds(timed, caps).best >= slowest() or not self._hopeful(problem, kind, caps, slowest()):
                continue
            named = self._named(problem, kind)
            if _within(named.peak, caps) and named.makespan < slowest():
                yield named

    def searched(self, problem: Problem, limit: float, makespan: float) -> list[Named]:
        """What the named schedules that adapt to costs and to a limit reach, where faster than `makespan`.

        Three of them differ in their default limit only, so one stands for all.
        """
        search = SCHEDULES["zb"].search
        caps = problem.caps(limit)
        if problem.kind != "linear" or problem.fused or search is None or not problem.fits(caps):
            return []
        if lower_bounds(problem, caps).best >= makespan:
            return []
        key = (problem, f"zb {limit}")
        if key not in self._timed:
            self._timed[key] = _timed(problem, search(problem.devices, problem.microbatches, limit, problem.costs))
        named = self._timed[key]
        return [named] if _within(named.peak, caps) and named.makespan < makespan else []

    def _hopeful(self, problem: Problem, kind: ScheduleKind, caps: Sequence[float], makespan: float) -> bool:
        """Whether a short one of its kind leaves room: building and timing all of them would take most of a search."""
        few = short_enough(kind, problem.devices, problem.microbatches)
        if few is None:
            return True
        short = simulate(_short(kind.name, problem.devices, few, problem.stages_per_device), problem.costs)
        least = short.makespan + (problem.microbatches - few) * problem.busiest_work
        return least * (1 - margin(problem.costs)) < makespan and _within(short.peak_activation, caps)

    def _named(self, problem: Problem, kind: ScheduleKind) -> Named:
        key = (problem, kind.name)
        if key not in self._timed:
            schedule = kind.generate(problem.devices, problem.microbatches, problem.stages_per_device)
            self._timed[key] = _timed(problem, schedule)
        return self._timed[key]


def _timed(problem: Problem, schedule: Schedule) -> Named:
    timeline = simulate(schedule, problem.costs)
    return Named(schedule, timeline.makespan, timeline.peak_activation)


def short_enough(kind: ScheduleKind, devices: int, microbatches: int) -> int | None:
    """Microbatches after which a named schedule only repeats itself, or None: then it must be built in full.

    A longer one holds no less and takes at least the work of the busiest device for each further microbatch; tests hold
    this against all named schedules. Loops with microbatches left over from their groups change with every number.
    """
    few = 2 * devices
    steady = kind.name not in UNSTEADY and (kind.placement != "loop" or microbatches % devices == 0)
    return few if microbatches > few and steady and not kind.microbatches_problem(devices, few) else None


def margin(costs: PassCosts) -> float:
    """How far, as a share, a long schedule may stay below what a short one lets expect; twice the most seen."""
    stages = set(zip(costs.forward, costs.backward, costs.weight, strict=True))
    return 1e-3 if len(stages) == 1 and isinstance(costs.hop, (int, float)) else 0.05


@lru_cache(maxsize=256)
def _short(name: str, devices: int, microbatches: int, stages_per_device: int) -> Schedule:
    return SCHEDULES[name].generate(devices, microbatches, stages_per_device)


def _legal(problem: Problem) -> list[ScheduleKind]:
    """The fixed named schedules of the problem's placement, stages, microbatches and backward."""
    return [
        named
        for named in SCHEDULES.values()
        if named.search is None
        and named.placement == problem.kind
        and not named.stages_problem(problem.stages_per_device)
        and not named.microbatches_problem(problem.devices, problem.microbatches)
        and not (problem.fused and named.split_backward)
    ]


def _within(peak: Sequence[float], caps: Sequence[float]) -> bool:
    return all(held <= cap * (1 + CAP_TOLERANCE) for held, cap in zip(peak, caps, strict=True))


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
    links, costs = chain_rows(problem.tables, m)
    whole, times = blank_state(m, links.shape[1])
    return time_orders(orders, links, costs, whole, times)
