"""One problem under fixed caps: candidates found so far, and the complete orders they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.schedules.engine.anneal import anneal
from autotune.schedules.engine.backfill import NEVER, evaluate
from autotune.schedules.engine.climb import climb
from autotune.schedules.engine.problem import Floats, Ints, Problem
from autotune.schedules.engine.starts import Candidate, starts

__all__ = ["Found", "Site"]

# With many microbatches a candidate is judged by fewer, the rest added at the pace of the middle: the pattern repeats.
FULL_LENGTH, JUDGED_LENGTH = 4, 3  # in devices


@dataclass(frozen=True)
class Found:
    """Complete orders of a problem, int64[p, kinds * v * m], and their makespan in engine time.

    Attributes:
        origin: `search`, or the name of the named schedule these are the orders of.
    """

    makespan: float
    orders: Ints
    origin: str = "search"


class Site:
    """The candidates of one problem under one set of caps, best first.

    Attributes:
        candidates: (makespan, candidate); the makespan is estimated when the problem has many microbatches.
    """

    def __init__(self, problem: Problem, caps: Sequence[float]) -> None:
        self.problem = problem
        self.caps: Floats = np.array(caps, dtype=np.float64)
        m, p = problem.microbatches, problem.devices
        self.judged = m if m <= FULL_LENGTH * p else JUDGED_LENGTH * p
        self.candidates: list[tuple[float, Candidate]] = []
        tables = problem.tables
        work = tables.forward + tables.backward + tables.weight
        self.work = float(work.sum()) / p

    @property
    def value(self) -> float:
        """Makespan of the best candidate, in engine time; NEVER while there is none."""
        return self.candidates[0][0] if self.candidates else NEVER

    @property
    def passes(self) -> int:
        """Passes one evaluation simulates."""
        return self.problem.passes * self.judged // self.problem.microbatches

    def start(self, share: slice, keep: int = 8) -> None:
        """Evaluate a part of the start patterns; of all candidates so far keep the best different ones."""
        listed = starts(self.problem)[share]
        valued = [(value, c) for value, c in self.candidates]
        for candidate in listed:
            value, period = self._evaluate(candidate)
            valued.append((value, replace(candidate, period=period)))
        order = sorted(range(len(valued)), key=lambda number: (valued[number][0], number))
        self.candidates = []
        seen: set[tuple[float, int]] = set()
        for value, candidate in (valued[number] for number in order):
            mark = (round(value, 6), candidate.group)
            if value < NEVER and mark not in seen and len(self.candidates) < keep:
                seen.add(mark)
                self.candidates.append((value, candidate))

    def climb(self, keep: int, evaluations: int, floor: float, seed: int) -> None:
        """Spread `evaluations` over the best `keep` candidates and drop the others."""
        each = max(1, evaluations // max(1, min(keep, len(self.candidates))))
        climbed = []
        for number, (_, c) in enumerate(self.candidates[:keep]):
            value, increments, period, tau, policy = climb(
                self.problem.tables,
                self.judged,
                self.problem.microbatches - self.judged,
                self.caps,
                c.increments,
                c.period,
                c.tau,
                c.group,
                c.policy,
                self.work,
                floor,
                seed + number,
                each,
            )
            climbed.append((value, number, Candidate(increments, period, tau, c.group, policy)))
        climbed.sort(key=lambda entry: entry[:2])
        self.candidates = [(value, candidate) for value, _, candidate in climbed]

    def orders(self, candidate: Candidate) -> Found:
        """The complete orders of a candidate, all microbatches simulated."""
        problem = self.problem
        m, p = problem.microbatches, problem.devices
        per_device = problem.passes // p
        order = np.zeros((p, 2 * problem.stages_per_device * m), np.int64)
        complete = np.zeros((p, per_device), np.int64)
        end = np.zeros(2 * problem.stages * m)
        c = candidate
        value, _ = evaluate(
            problem.tables,
            m,
            0,
            self.caps,
            c.increments,
            c.period,
            c.tau,
            c.group,
            c.policy,
            order,
            True,
            complete,
            end,
        )
        return Found(value, complete)

    def anneal(
        self, found: Found, floor: float, goal: float, heat: tuple[float, float], budget: int, seed: int
    ) -> Found:
        """Improve complete orders; temperatures are in mean passes of a stage."""
        mean = self.work / (3 * self.problem.stages_per_device)
        makespan, orders = anneal(
            self.problem.tables,
            self.problem.microbatches,
            self.caps,
            found.orders,
            floor,
            goal,
            heat[0] * mean,
            heat[1] * mean,
            budget,
            seed,
        )
        return Found(makespan, orders) if makespan < found.makespan else found

    def _evaluate(self, c: Candidate) -> tuple[float, float]:
        problem, m = self.problem, self.judged
        order = np.zeros((problem.devices, 2 * problem.stages_per_device * m), np.int64)
        nothing = np.zeros((1, 1), np.int64)
        end = np.zeros(2 * problem.stages * m)
        return evaluate(
            problem.tables,
            m,
            problem.microbatches - m,
            self.caps,
            c.increments,
            c.period,
            c.tau,
            c.group,
            c.policy,
            order,
            False,
            nothing,
            end,
        )
