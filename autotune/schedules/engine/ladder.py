"""Memory limits as rungs of a fixed ladder, so that more memory never gives a slower schedule.

A schedule for a small limit is valid for a larger one, but two independent searches may find the better schedule for
the smaller. So the result for a limit is defined as the best over the searches of all rungs up to it. Rungs are fixed
fractions of the pipeline, the same whatever limit is asked for; a limit between two rungs uses the lower one. Most
smaller rungs cost nothing or little: as soon as their lower bound, or the floor of their search (see `rung`), is no
better than what is in hand, they can't matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.schedules.engine.bounds import lower_bounds
from autotune.schedules.engine.effort import Effort
from autotune.schedules.engine.guard import Guard, Named, orders_of
from autotune.schedules.engine.problem import CAP_TOLERANCE, Problem
from autotune.schedules.engine.rung import HEAT_SHORT, SAME, Rung
from autotune.schedules.engine.site import Found, Site

__all__ = ["Answer", "Ladder", "rungs"]


def rungs(devices: int, microbatches: int) -> tuple[float, ...]:
    """Limits to search at, ascending, in microbatches of a device's share; the last one limits nothing.

    >>> rungs(4, 6)
    (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
    """
    p = devices
    fine = p / 2 + 1 if p > 8 else p  # up to here a stage more or less is worth most
    step = 1.0 if p > 16 else 0.5
    coarse = max(1.0, float(p // 16))
    found = {1.0, 1.5, (p + 2) / 3, p / 2, p / 2 + 1, 2 * p / 3, 3 * p / 4, float(p), 1.25 * p, 1.5 * p, 2.0 * p}
    found |= {1 + k * step for k in range(int((fine - 1) / step) + 1)}
    found |= {fine + k * coarse for k in range(int((p - fine) / coarse) + 1)}
    return (*sorted(limit for limit in found if 1 <= limit < microbatches), float(microbatches))


@dataclass(frozen=True)
class Answer:
    """The best complete orders for a limit, and what the placements reached on the way (None: never looked at)."""

    makespan: float
    problem: Problem
    found: Found
    reached: dict[Problem, float]
    bounds: dict[Problem, float]

    @property
    def lower_bound(self) -> float:
        """No schedule on any of the placements is faster within the limit."""
        return min(self.bounds.values())


class Ladder:
    """Searches of one pipeline for many limits; each rung is searched at most once, and only as far as it matters.

    Args:
        problems: the placements to choose from, on the same devices and microbatches.
        unit: activation of one microbatch on one device's share, in the memory unit of the costs.
    """

    def __init__(self, problems: Sequence[Problem], unit: float, effort: Effort, seed: int) -> None:
        assert problems, "a ladder needs a placement"
        self.problems = tuple(problems)
        self.unit = unit
        self.guard = Guard()
        self._effort, self._seed = effort, seed
        self._named: dict[tuple[Problem, str, tuple[float, ...]], Found] = {}
        self._searches: dict[tuple[float, tuple[float, ...] | None], Rung] = {}
        # Uneven stages hold more than `unit` somewhere: the least and the most a placement can use are rungs too.
        least = {max(problem.smallest_caps()) / unit for problem in problems}
        most = max(max(_everything(problem)) for problem in problems) / unit
        fixed = rungs(problems[0].devices, problems[0].microbatches)
        self.rungs = tuple(sorted({r for r in {*fixed, *least} if min(least) <= r < most} | {most}))

    def solve(self, limit: float | tuple[float, ...] | None) -> Answer | None:
        """The best for a limit; None when no placement fits.

        Args:
            limit: most activation of a device in the memory unit of the costs, one per device, or None for no limit.
        """
        listed = limit if isinstance(limit, tuple) else None
        ceiling = math.inf if limit is None else max(limit) if isinstance(limit, tuple) else limit
        usable = [rung for rung in self.rungs if rung * self.unit <= ceiling * (1 + CAP_TOLERANCE)]
        if listed is not None:
            usable.append(max(listed) / self.unit)  # no ladder orders lists: the limit itself comes first
        best: Rung | None = None
        looked: list[Rung] = []
        for rung in sorted(usable, reverse=True):
            search = self._search(rung, listed)
            if not search.entries:
                continue
            if best is not None and search.goal >= best.value * (1 - SAME):
                break  # smaller limits have no smaller bounds
            looked.append(search)
            while not search.finished and (best is None or search.floor < best.value * (1 - SAME)):
                search.advance()
            if search.finished and (best is None or search.value < best.value * (1 - SAME)):
                best = search
        if best is None:
            return None
        assert best.problem is not None
        assert best.found is not None
        limits = {problem: _caps(problem, limit) for problem in self.problems}
        bounds = {problem: lower_bounds(problem, caps).best for problem, caps in limits.items() if problem.fits(caps)}
        reached: dict[Problem, float] = {}
        for search in looked:
            for problem, value in search.reached.items():
                reached[problem] = min(value, reached.get(problem, value))
        return self._with_named(Answer(best.value, best.problem, best.found, reached, bounds), limits)

    def _search(self, rung: float, listed: tuple[float, ...] | None) -> Rung:
        """The search of a rung; under one limit per device, of the smaller of limit and rung."""
        key = (rung, listed)
        if key not in self._searches:
            cap = rung * self.unit
            caps = [
                (cap,) * problem.devices if listed is None else tuple(min(cap, most) for most in listed)
                for problem in self.problems
            ]
            self._searches[key] = Rung(self.problems, caps, self._effort, self._seed)
        return self._searches[key]

    def _with_named(self, answer: Answer, limits: dict[Problem, tuple[float, ...]]) -> Answer:
        """The answer, or a named schedule that fits the limit and is faster, itself or annealed within its own peak.

        Annealing stays above its floor, so a named schedule that is left out here for being too slow could not have
        mattered; and it does not depend on the limit. So the answers stay ordered by their limits.
        """
        gain = self._effort.gain_after[-1] if self._effort.short_anneal else 0.0

        def slowest() -> float:
            return answer.makespan / (1 - gain)

        for problem, caps in sorted(limits.items(), key=lambda entry: answer.bounds.get(entry[0], math.inf)):
            if problem not in answer.bounds or answer.bounds[problem] >= answer.makespan * (1 - SAME):
                continue
            for named in self._named_candidates(problem, caps, slowest):
                found = self._annealed(problem, named, gain)
                makespan = found.makespan / problem.scale
                if makespan < answer.makespan * (1 - SAME):
                    answer = Answer(makespan, problem, found, answer.reached | {problem: makespan}, answer.bounds)
        return answer

    def _named_candidates(
        self, problem: Problem, caps: tuple[float, ...], slowest: Callable[[], float]
    ) -> Iterator[Named]:
        """Named schedules within the caps and faster than `slowest()`; those that search, at every rung."""
        yield from self.guard.better(problem, caps, slowest)
        for rung in reversed(self.rungs):
            if rung * self.unit <= min(caps) * (1 + CAP_TOLERANCE):
                yield from self.guard.searched(problem, rung * self.unit, slowest())

    def _annealed(self, problem: Problem, named: Named, gain: float) -> Found:
        """A named schedule, annealed without using more memory on any device."""
        key = (problem, named.schedule.name, named.peak)
        if key not in self._named:
            found = orders_of(problem, named.schedule)
            budget = self._effort.budget(self._effort.short_anneal, problem.passes)
            if budget:
                goal = lower_bounds(problem, named.peak).best * problem.scale
                floor = found.makespan * (1 - gain)
                better = Site(problem, named.peak).anneal(found, floor, goal, HEAT_SHORT, budget, self._seed)
                found = better
            self._named[key] = found
        return self._named[key]


def _everything(problem: Problem) -> tuple[float, ...]:
    """What each device holds with every microbatch in flight: more memory changes nothing."""
    return tuple(problem.microbatches * need for need in problem.smallest_caps())


def _caps(problem: Problem, limit: float | tuple[float, ...] | None) -> tuple[float, ...]:
    return _everything(problem) if limit is None else problem.caps(limit)
