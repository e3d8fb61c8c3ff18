"""The search under one memory limit: a race of placements in six stages.

After each stage `value` is the best makespan so far and `floor` a makespan the search will not go below, whatever it
finds later: the lower bound, or a fixed share below the value of the stage. The compiled searches pass over anything
faster than the floor. That costs next to nothing (the later stages seldom gain as much as the share) and lets the
ladder leave a search for a smaller limit early: when its floor is no better than a makespan in hand, it can't matter
any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.schedules.engine.backfill import NEVER
from autotune.schedules.engine.bounds import lower_bounds
from autotune.schedules.engine.effort import Effort
from autotune.schedules.engine.problem import Problem
from autotune.schedules.engine.site import Found, Site

__all__ = ["Rung"]

NEAR = 1.08  # placements further than this from the best leave the race
HEAT_SHORT, HEATS_LONG = (0.3, 0.03), ((0.4, 0.02), (0.8, 0.02), (1.2, 0.02))  # first and last, in mean passes
SAME = 1e-9
FIRST_STARTS = 5  # patterns of the first look


class Rung:
    """One search: `advance` until `finished`; the best is (`problem`, `found`).

    All makespans are in the time unit of the costs, which the problems share.

    Attributes:
        entries: (lower bound, problem, caps) of the placements that fit, smallest bound first.
        goal: the smallest lower bound of all placements.
        reached: best makespan of every placement that was looked at.

    Args:
        problems: the placements in the race.
        caps: for each of them the most activation of every device.
    """

    def __init__(self, problems: Sequence[Problem], caps: Sequence[Sequence[float]], effort: Effort, seed: int) -> None:
        self._effort, self._seed = effort, seed
        entries = [(lower_bounds(p, c).best, p, c) for p, c in zip(problems, caps, strict=True) if p.fits(c)]
        entries.sort(key=lambda entry: entry[0])
        self.entries = entries
        self.goal = entries[0][0] if entries else NEVER
        self.value = NEVER
        self.floor = self.goal
        self.problem: Problem | None = None
        self.found: Found | None = None
        self._sites: list[Site] = []
        self._bound: dict[Problem, float] = {p: bound for bound, p, _ in entries}
        self._pool: dict[Problem, list[Found]] = {}
        self.reached: dict[Problem, float] = {}
        self._stages = [
            self._first_look,
            self._second_look,
            self._climb_wide,
            self._climb_deep,
            self._short,
            self._long,
        ]
        self.finished = not entries

    def advance(self) -> None:
        """Run the next stage."""
        self._stages.pop(0)()
        left = len(self._stages)
        if left:
            self.floor = max(self.goal, self.value * (1 - self._effort.gain_after[-left]))
        self.finished = not self._stages or self.value <= self.goal * (1 + SAME)
        if self.finished:
            self.floor = self.value

    def _take(self, problem: Problem, found: Found) -> None:
        """Keep complete orders: as the best, or as a start of the annealing."""
        self._pool.setdefault(problem, []).append(found)
        makespan = found.makespan / problem.scale
        self.reached[problem] = min(makespan, self.reached.get(problem, NEVER))
        if makespan < self.value * (1 - SAME):
            self.value, self.problem, self.found = makespan, problem, found

    def _least(self, problem: Problem) -> float:
        """The floor in engine time; a bound that is met exactly must not shut out by rounding what meets it."""
        return self.floor * problem.scale * (1 - SAME)

    def _hopeful(self, problem: Problem) -> bool:
        return self._bound[problem] < self.value * (1 - SAME)

    def _first_look(self) -> None:
        for _, problem, caps in self.entries:
            if not self._hopeful(problem):
                break  # the others' bounds are no smaller
            site = Site(problem, caps)
            self._sites.append(site)
            self._start(site, slice(FIRST_STARTS))

    def _second_look(self) -> None:
        for site in self._sites:
            if self._hopeful(site.problem):
                self._start(site, slice(FIRST_STARTS, self._effort.starts))

    def _start(self, site: Site, share: slice) -> None:
        site.start(share)
        if site.candidates:
            found = site.orders(site.candidates[0][1])
            if found.makespan >= self._least(site.problem):
                self._take(site.problem, found)

    def _climb_wide(self) -> None:
        self._climb(self._effort.sites, 4, 0.4, 0)

    def _climb_deep(self) -> None:
        self._climb(2, 2, 0.6, 1)

    def _climb(self, sites: int, keep: int, share: float, stream: int) -> None:
        """Climb from the best candidates of the best placements with a share of the budget."""
        self._narrow(sites)
        for site in self._sites:
            if not self._hopeful(site.problem):
                continue
            passes = self._effort.climb_passes * share / len(self._sites)
            floor = self._least(site.problem)
            site.climb(keep, int(passes / site.passes), floor, self._seeded(10 * stream))
            for _, candidate in site.candidates[:2]:
                found = site.orders(candidate)
                if found.makespan >= floor:
                    self._take(site.problem, found)

    def _narrow(self, most: int) -> None:
        """Keep the placements that may still win."""
        self._sites = [site for site in self._sites if site.candidates]
        near = min((site.value / site.problem.scale for site in self._sites), default=NEVER) * NEAR
        sites = [s for s in self._sites if s.value / s.problem.scale <= near]
        sites.sort(key=lambda s: (s.value / s.problem.scale, s.problem.stages))
        self._sites = sites[:most]

    def _short(self) -> None:
        if self._effort.short_anneal:
            self._anneal(self._effort.sites, 2, self._effort.short_anneal, HEAT_SHORT, 100)

    def _long(self) -> None:
        assert self.problem is not None
        wanted = self._effort.long_anneal
        # A small problem does not use up the budget in one run: begin anew, warmer, from the best.
        small = self._effort.budget(wanted, self.problem.passes) < wanted
        for number, heat in enumerate(HEATS_LONG if small else HEATS_LONG[:1]):
            if wanted and self.value > self.goal * (1 + SAME):
                self._anneal(1, 1, wanted, heat, 200 + number)

    def _anneal(self, problems: int, each: int, wanted: int, heat: tuple[float, float], stream: int) -> None:
        """Anneal the best orders of the best placements."""
        pools = [(sorted(pool, key=lambda found: found.makespan)[:each], p) for p, pool in self._pool.items()]
        pools.sort(key=lambda entry: (entry[0][0].makespan / entry[1].scale, entry[1].stages))
        caps = {problem: caps for _, problem, caps in self.entries}
        self._pool = {}
        for pool, problem in pools[:problems]:
            site = Site(problem, caps[problem])
            goal = self._bound[problem] * problem.scale
            budget = self._effort.budget(wanted, problem.passes)
            for number, found in enumerate(pool):
                self._pool.setdefault(problem, []).append(found)
                if self._hopeful(problem):
                    seed = self._seeded(stream + 10 * number)
                    self._take(problem, site.anneal(found, self._least(problem), goal, heat, budget, seed))

    def _seeded(self, stream: int) -> int:
        return (self._seed * 7919 + stream) % 2**31
