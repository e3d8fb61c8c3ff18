"""The engine's front door: the best schedule for a limit, the whole memory front, the least memory for a slowdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autotune.errors import UserError
from autotune.schedules.checks import check
from autotune.schedules.engine.collector import without_collector
from autotune.schedules.engine.effort import FULL, Effort
from autotune.schedules.engine.guard import schedule_of
from autotune.schedules.engine.ladder import Answer, Ladder
from autotune.schedules.engine.problem import CAP_TOLERANCE, Problem
from autotune.schedules.engine.sources import CostSource, Cut, uniform_share
from autotune.schedules.placement import PlacementKind, make_placement
from autotune.schedules.simulate import Timeline, simulate

__all__ = ["MAX_STAGES_PER_DEVICE", "BestSchedule", "Option", "best_schedule", "memory_front", "smallest_memory"]

MAX_STAGES_PER_DEVICE = 4

Limit = float | Sequence[float] | None


@dataclass(frozen=True)
class Option:
    """One placement the engine considered.

    Attributes:
        makespan: the best it reached there; None: its lower bound ruled it out, or it does not fit.
        lower_bound: no schedule on this placement is faster; None: no schedule fits the limit there.
    """

    placement: PlacementKind
    stages_per_device: int
    layer_split: tuple[int, ...] | None
    makespan: float | None
    lower_bound: float | None

    def describe(self) -> str:
        """`loop, 4 stages per device`, with the layer split if there is one."""
        stages = f"{self.stages_per_device} stage{'s' if self.stages_per_device > 1 else ''} per device"
        split = "" if self.layer_split is None else f", layers {'-'.join(map(str, self.layer_split))}"
        return f"{self.placement}, {stages}{split}"


@dataclass(frozen=True)
class BestSchedule:
    """The fastest schedule found, checked and simulated.

    Attributes:
        timeline: its schedule with times, in the unit of the costs.
        origin: `search`, or the name of the named schedule that was not beaten.
        limit: most activation of a device that was asked for (None: no limit).
        chosen: the placement of the schedule.
        options: everything considered, fastest first.
        lower_bound: no schedule on any of the placements is faster within the limit.
    """

    timeline: Timeline
    origin: str
    limit: float | tuple[float, ...] | None
    chosen: Option
    options: tuple[Option, ...] = field(repr=False)
    lower_bound: float

    @property
    def makespan(self) -> float:
        """Time of one step."""
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """The most this could still be improved: makespan / lower bound - 1."""
        return max(0.0, self.makespan / self.lower_bound - 1) if self.lower_bound > 0 else 0.0

    def reason(self) -> str:
        """Why this placement, in one line."""
        if len(self.options) == 1:
            return f"{self.chosen.describe()}: the only placement possible"
        parts = []
        for option in self.options:
            if option == self.chosen:
                continue
            if option.lower_bound is None:
                parts.append(f"{option.describe()}: does not fit")
            elif option.makespan is None:
                parts.append(f"{option.describe()}: at least {option.lower_bound:.6g}")
            else:
                parts.append(f"{option.describe()}: {option.makespan:.6g}")
        return f"{self.chosen.describe()} reaches {self.makespan:.6g}; {'; '.join(parts)}"


@without_collector
def best_schedule(
    devices: int,
    microbatches: int,
    costs: CostSource | None = None,
    limit: Limit = None,
    *,
    placement: PlacementKind | None = None,
    stages_per_device: int | None = None,
    fused: bool = False,
    effort: Effort = FULL,
    seed: int = 0,
) -> BestSchedule:
    """The fastest schedule the engine can find within a memory limit, over placements.

    It is never slower than a named schedule that fits; a larger limit never gives a slower one. Equal arguments give
    equal results on every machine.

    Args:
        costs: what a placement costs (see `sources`); None: F = B = W = 1 for a device's share, no latency.
        limit: most activation of a device, in the memory unit of the costs (under `uniform_share` microbatches of a
            device's share, as in `Timeline.peak_activation`); one number, one per device, or None.
        placement, stages_per_device: stay with them; None: choose (linear 1, v 2, loop 2 to 4 stages per device).
        fused: run B and W as one pass.
        effort: `FULL` (seconds) or `QUICK` (a tenth of a second for 8 devices, 64 microbatches).

    Raises:
        UserError: no placement is possible, or nothing fits the limit; names the smallest one that something fits.
    """
    pipeline = _Pipeline(devices, microbatches, costs, placement, stages_per_device, fused, effort, seed)
    return pipeline.best(_frozen(limit, devices))


@without_collector
def memory_front(
    devices: int,
    microbatches: int,
    costs: CostSource | None = None,
    limit: float | None = None,
    *,
    placement: PlacementKind | None = None,
    stages_per_device: int | None = None,
    fused: bool = False,
    effort: Effort = FULL,
    seed: int = 0,
) -> list[BestSchedule]:
    """All trade-offs of memory and time up to `limit`: each entry is faster and holds more than the one before.

    The limits are shared by one ladder of searches, so this costs far less than a call for each. Every entry equals
    what `best_schedule` returns for its limit. Arguments and errors are those of `best_schedule`.
    """
    pipeline = _Pipeline(devices, microbatches, costs, placement, stages_per_device, fused, effort, seed)
    front: list[BestSchedule] = []
    fastest = math.inf
    for cap in pipeline.limits:
        if limit is not None and cap > limit * (1 + CAP_TOLERANCE):
            break
        answer = pipeline.solve(cap)
        if answer is not None and answer.makespan < fastest * (1 - 1e-9):
            fastest = answer.makespan
            front.append(pipeline.finish(answer, cap))
    if not front:
        pipeline.refuse(limit)
    return front


@without_collector
def smallest_memory(
    devices: int,
    microbatches: int,
    slowdown: float,
    costs: CostSource | None = None,
    *,
    placement: PlacementKind | None = None,
    stages_per_device: int | None = None,
    fused: bool = False,
    effort: Effort = FULL,
    seed: int = 0,
) -> BestSchedule:
    """The schedule with the smallest limit that is at most `slowdown` (0.05 = 5 %) slower than with no limit.

    Found by bisection over the rungs of the ladder. Other arguments are those of `best_schedule`.

    Raises:
        UserError: the slowdown is negative, or no placement is possible.
    """
    if not slowdown >= 0:
        raise UserError(f"slowdown must be 0 or more (0.05 for 5 %), not {slowdown}")
    pipeline = _Pipeline(devices, microbatches, costs, placement, stages_per_device, fused, effort, seed)
    limits = pipeline.limits
    answer = pipeline.solve(limits[-1])
    assert answer is not None, "the last limit fits everything"
    most = answer.makespan * (1 + slowdown) * (1 + 1e-9)
    low, high = -1, len(limits) - 1  # limits[high] is good enough, limits[low] is not
    while high - low > 1:
        middle = (low + high) // 2
        tried = pipeline.solve(limits[middle])
        if tried is not None and tried.makespan <= most:
            high, answer = middle, tried
        else:
            low = middle
    return pipeline.finish(answer, limits[high])


class _Pipeline:
    """The problems of one call, and how an answer becomes a schedule."""

    def __init__(
        self,
        devices: int,
        microbatches: int,
        costs: CostSource | None,
        placement: PlacementKind | None,
        stages_per_device: int | None,
        fused: bool,
        effort: Effort,
        seed: int,
    ) -> None:
        if devices < 1 or microbatches < 1:
            raise UserError(f"a pipeline needs at least 1 device and 1 microbatch, not {devices} and {microbatches}")
        source = uniform_share() if costs is None else costs
        self.cuts: dict[Problem, tuple[PlacementKind, Cut]] = {}
        for kind, stages in _shapes(devices, placement, stages_per_device):
            placed = make_placement(kind, devices, stages)
            for cut in source(placed):
                self.cuts.setdefault(Problem(placed, microbatches, cut.costs, fused), (kind, cut))
        if not self.cuts:
            wanted = "any placement" if placement is None else f"placement {placement}"
            raise UserError(
                f"the costs cut the model for no stages that {wanted} on {devices} devices can have"
                + (f" with {stages_per_device} stages per device" if stages_per_device else "")
            )
        # Even and balanced cuts get searches of their own, so that one more way to cut never makes a result worse.
        self._ladders = [Ladder(problems, unit, effort, seed) for problems, unit in self._groups(devices)]
        self.limits = sorted({rung * ladder.unit for ladder in self._ladders for rung in ladder.rungs})

    def _groups(self, devices: int) -> list[tuple[list[Problem], float]]:
        """Problems by which cut of their placement they are, each with the activation of one device's share."""
        groups: list[list[Problem]] = []
        nth: dict[tuple[int, ...], int] = {}
        for problem in self.cuts:
            number = nth.get(problem.placement, 0)
            nth[problem.placement] = number + 1
            if number == len(groups):
                groups.append([])
            groups[number].append(problem)
        return [(group, sum(group[0].costs.activation) / devices or 1.0) for group in groups]

    def solve(self, limit: float | tuple[float, ...] | None) -> Answer | None:
        """The best over all cuts, or None when nothing fits."""
        best: Answer | None = None
        for ladder in self._ladders:
            answer = ladder.solve(limit)
            if answer is None:
                continue
            if best is None:
                best = answer
            else:
                first, second = (best, answer) if best.makespan <= answer.makespan else (answer, best)
                best = replace(first, reached=second.reached | first.reached, bounds=second.bounds | first.bounds)
        return best

    def best(self, limit: float | tuple[float, ...] | None) -> BestSchedule:
        """The schedule for a limit.

        Raises:
            UserError: nothing fits it.
        """
        answer = self.solve(limit)
        if answer is None:
            self.refuse(limit)
        assert answer is not None
        return self.finish(answer, limit)

    def refuse(self, limit: Limit) -> None:
        """Say which limit would do."""
        if isinstance(limit, tuple):
            least = min((problem.smallest_caps() for problem in self.cuts), key=max)
            raise UserError(
                f"no schedule stays within the memory limits {list(limit)}: the smallest feasible ones are "
                f"{[_shown(need) for need in least]} (one microbatch at a time)"
            )
        smallest = min(max(problem.smallest_caps()) for problem in self.cuts)
        raise UserError(
            f"no schedule stays within a memory limit of {limit}: the smallest feasible one is "
            f"{_shown(smallest)} (one microbatch at a time)"
        )

    def finish(self, answer: Answer, limit: float | tuple[float, ...] | None) -> BestSchedule:
        schedule = schedule_of(answer.problem, answer.found.orders, "best")
        check(schedule)
        timeline = simulate(schedule, answer.problem.costs)
        assert math.isclose(timeline.makespan, answer.makespan, rel_tol=1e-9), "engine and simulation must agree"
        options = [
            Option(
                kind,
                problem.stages_per_device,
                cut.layer_split,
                answer.makespan if problem is answer.problem else answer.reached.get(problem),
                answer.bounds.get(problem),
            )
            for problem, (kind, cut) in self.cuts.items()
        ]
        chosen = options[list(self.cuts).index(answer.problem)]
        options.sort(key=lambda o: (o.lower_bound is None, o.makespan is None, o.makespan or o.lower_bound or 0.0))
        return BestSchedule(
            timeline, answer.found.origin, limit, chosen, tuple(options), min(answer.lower_bound, answer.makespan)
        )


def _shapes(
    devices: int, placement: PlacementKind | None, stages_per_device: int | None
) -> list[tuple[PlacementKind, int]]:
    """Placements to choose from, with their stages per device."""
    shapes: list[tuple[PlacementKind, int]] = [("linear", 1), ("v", 2)]
    most = max(MAX_STAGES_PER_DEVICE, stages_per_device or 0)
    shapes += [("loop", stages) for stages in range(1 if placement == "loop" else 2, most + 1)]
    if devices == 1:
        shapes = [shape for shape in shapes if shape[0] != "v" or placement == "v"]
    found = [
        (kind, stages) for kind, stages in shapes if placement in (None, kind) and stages_per_device in (None, stages)
    ]
    if not found:
        kind = "linear" if placement is None else placement
        make_placement(kind, devices, stages_per_device or 1)  # says what is legal
        raise UserError(f"{kind} placement with {stages_per_device} stages per device is not possible")
    return found


def _frozen(limit: Limit, devices: int) -> float | tuple[float, ...] | None:
    """The limit as the ladder reads it, checked."""
    if limit is None:
        return None
    values = (float(limit),) if isinstance(limit, (int, float)) else tuple(float(value) for value in limit)
    if any(not value > 0 for value in values):
        raise UserError(f"a memory limit must be above 0, not {limit}")
    if isinstance(limit, (int, float)):
        return values[0]
    if len(values) != devices:
        raise UserError(f"memory limits are for {len(values)} devices, the pipeline has {devices}")
    return values


def _shown(value: float) -> float:
    """Rounded up to 9 digits, so that the number shown is feasible when typed back."""
    digits = 9 - math.ceil(math.log10(value)) if value > 0 else 0
    return math.ceil(value * 10**digits - 1e-6) / 10**digits
