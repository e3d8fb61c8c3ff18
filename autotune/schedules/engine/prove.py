"""The exact optimum of small problems, by the CP-SAT solver of OR-tools (extra `prove`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autotune.errors import UserError
from autotune.schedules.costs import PassCosts
from autotune.schedules.engine.problem import CAP_TOLERANCE, Problem
from autotune.schedules.schedule import Pass, Schedule
from autotune.schedules.simulate import Timeline, simulate

__all__ = ["Proof", "prove"]

# Times become integers: exactly if their denominators allow it, else on a grid this fine for the longest pass.
FINEST = 10_000
LARGEST_DENOMINATOR = 10_000


@dataclass(frozen=True)
class Proof:
    """What the solver found for one placement.

    Attributes:
        timeline: its best schedule, simulated.
        lower_bound: no schedule of the placement within the limit is faster (in the time unit of the costs).
        optimal: whether the schedule is proven to be the fastest.
    """

    timeline: Timeline
    lower_bound: float
    optimal: bool


def prove(
    problem: Problem,
    limit: float | Sequence[float],
    seconds: float,
    hint: Timeline | None = None,
    workers: int = 1,
) -> Proof:
    """Solve a problem exactly, or as far as `seconds` allow.

    Microbatches of one kind and stage run in order, as in all schedules of this package. Practical for a few hundred
    passes (4 devices with 6 microbatches on a V are 144).

    Args:
        limit: most activation of a device, one number or one per device.
        hint: a schedule of the problem within the limit to begin with.
        workers: threads of the solver.

    Raises:
        UserError: OR-tools is not installed, nothing fits the limit, or no schedule was found in time.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UserError(
            "an exact solution needs OR-tools: install the extra with `pip install 'autotune[prove]'`"
        ) from (error)
    caps = problem.caps(limit)
    if not problem.fits(caps):
        raise UserError(f"no schedule fits {limit}: one microbatch alone holds {list(problem.smallest_caps())}")
    grid = _grid(problem)
    model = cp_model.CpModel()
    start, makespan = _build(cp_model, model, problem, caps, grid, hint)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise UserError(f"no schedule was found in {seconds} s; give more time")
    schedule = _read(problem, {item: solver.value(variable) for item, variable in start.items()})
    exact = grid == _exact_grid(problem)
    # On a rounded grid a time may be up to half a step off for every pass and hop of the critical path.
    slack = 0.0 if exact else 0.5 * 2 * problem.passes
    bound = max(0.0, solver.best_objective_bound - slack) / grid
    timeline = simulate(schedule, problem.costs)
    return Proof(timeline, bound, status == cp_model.OPTIMAL and exact)


def _times(problem: Problem) -> list[float]:
    """Every time of the problem that is not zero, in the unit of the costs."""
    costs = problem.costs
    hops = [costs.edge_latency(problem.placement, s, s + 1) for s in range(problem.stages - 1)]
    hops += [costs.edge_latency(problem.placement, s + 1, s) for s in range(problem.stages - 1)]
    return [time for time in (*costs.forward, *costs.backward, *costs.weight, *hops) if time > 0]


def _exact_grid(problem: Problem) -> int | None:
    """Steps per unit of time that make all times whole, or None when there are too many."""
    steps = 1
    for time in set(_times(problem)):
        steps = math.lcm(steps, Fraction(time).limit_denominator(LARGEST_DENOMINATOR).denominator)
        if steps > 1000 * LARGEST_DENOMINATOR:
            return None
    exact = all(abs(time * steps - round(time * steps)) < 1e-6 * max(1.0, time * steps) for time in _times(problem))
    return steps if exact else None


def _grid(problem: Problem) -> float:
    return _exact_grid(problem) or FINEST / max(_times(problem))


def _build(
    cp_model: Any, model: Any, problem: Problem, caps: Sequence[float], grid: float, hint: Timeline | None
) -> tuple[dict[Pass, Any], Any]:
    """Variables and rules: one start per pass."""
    costs, m, S = problem.costs, problem.microbatches, problem.stages
    backward: Any = "BW" if problem.fused else "B"
    kinds: tuple[Any, ...] = ("F", "BW") if problem.fused else ("F", "B", "W")
    both = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)]
    time = {"F": costs.forward, "B": costs.backward, "W": costs.weight, "BW": both}

    def steps(value: float) -> int:
        return round(value * grid)

    longest = sum(steps(time[kind][s]) * m for kind in kinds for s in range(S))
    longest += (
        2 * m * sum(steps(max(_hop(costs, problem, s, s + 1), _hop(costs, problem, s + 1, s))) for s in range(S - 1))
    )
    items = [Pass(kind, s, i) for kind in kinds for s in range(S) for i in range(m)]
    start = {item: model.new_int_var(0, longest, str(item)) for item in items}
    length = {item: steps(time[item.kind][item.stage]) for item in items}
    makespan = model.new_int_var(0, longest, "makespan")
    for item in items:
        model.add(start[item] + length[item] <= makespan)
    for s in range(S):
        for i in range(m):
            f, b = Pass("F", s, i), Pass(backward, s, i)
            model.add(start[b] >= start[f] + length[f])
            if not problem.fused:
                model.add(start[Pass("W", s, i)] >= start[b] + length[b])
            if s < S - 1:
                after_f, after_b = Pass("F", s + 1, i), Pass(backward, s + 1, i)
                model.add(start[after_f] >= start[f] + length[f] + steps(_hop(costs, problem, s, s + 1)))
                model.add(start[b] >= start[after_b] + length[after_b] + steps(_hop(costs, problem, s + 1, s)))
            for kind in kinds if i else ():
                before = Pass(kind, s, i - 1)
                model.add(start[Pass(kind, s, i)] >= start[before] + length[before])
    for device in range(problem.devices):
        mine = [item for item in items if problem.placement[item.stage] == device]
        model.add_no_overlap([model.new_fixed_size_interval_var(start[x], length[x], f"run {x}") for x in mine])
        _limit_memory(model, problem, device, caps[device], start, length)
    if hint is not None:
        schedule = hint.schedule
        for order, starts in zip(schedule.order, hint.start, strict=True):
            for item, begin in zip(order, starts, strict=True):
                if item in start:
                    model.add_hint(start[item], steps(begin))
        if schedule.placement == problem.placement and grid == _exact_grid(problem):
            model.add(makespan <= math.ceil(hint.makespan * grid - 1e-6))
    return start, makespan


def _limit_memory(
    model: Any, problem: Problem, device: int, cap: float, start: dict[Pass, Any], length: dict[Pass, int]
) -> None:
    """What is held from F to the end of B, and what stays until the end of W, never exceeds the cap."""
    costs = problem.costs
    sizes = [*costs.activation, *costs.kept]
    unit = max(sizes, default=0.0)
    if unit <= 0:
        return
    scale = 1 / min(size for size in sizes if size > 0)
    if any(abs(size * scale - round(size * scale)) > 1e-9 for size in sizes):
        scale = 1_000_000 / unit
    capacity = math.floor(cap * (1 + CAP_TOLERANCE) * scale)
    spans, demands = [], []
    for item in start:
        if problem.placement[item.stage] != device or item.kind not in ("F", "B"):
            continue
        s, i = item.stage, item.microbatch
        if item.kind == "F":
            last = Pass("BW" if problem.fused else "B", s, i)
            held = costs.activation[s]
            begin = start[item]
        else:
            last = Pass("W", s, i)
            held = costs.kept[s]
            begin = start[item] + length[item]
        size = model.new_int_var(0, 10**9, "")
        end = start[last] + length[last]
        spans.append(model.new_interval_var(begin, size, end, f"hold {item}"))
        demands.append(math.ceil(held * scale - 1e-9))
    model.add_cumulative(spans, demands, capacity)


def _hop(costs: PassCosts, problem: Problem, sender: int, receiver: int) -> float:
    return costs.edge_latency(problem.placement, sender, receiver)


def _read(problem: Problem, start: dict[Pass, int]) -> Schedule:
    """The schedule of the solver's starts."""
    rank = {"F": 0, "B": 1, "BW": 1, "W": 2}
    order = tuple(
        tuple(
            sorted(
                (item for item in start if problem.placement[item.stage] == device),
                key=lambda item: (start[item], rank[item.kind], item.microbatch, item.stage),
            )
        )
        for device in range(problem.devices)
    )
    return Schedule("optimum", problem.microbatches, problem.placement, order)
