"""How much work a search does, counted in simulated passes: the same numbers give the same result on any machine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Effort"]


@dataclass(frozen=True)
class Effort:
    """Budgets of one search (one memory limit of the ladder).

    Attributes:
        sites: placements that stay in the race after their first look.
        climb_passes: passes simulated by the hill climb, over all placements.
        short_anneal, long_anneal: passes looked at by one annealing run: first of every placement left, then of the
            best.
        gain_after: the largest share that a search may gain after each stage but the last (two looks at starts, two
            climbs, short annealing), about the largest gains seen; see `rung`.
        per_pass: caps each annealing budget at so many times the passes of the schedule, so that small problems end
            early.
        starts: start patterns of a placement to look at.
    """

    sites: int
    climb_passes: int
    short_anneal: int
    long_anneal: int
    gain_after: tuple[float, float, float, float, float]
    per_pass: int = 20_000
    starts: int = 100

    def budget(self, wanted: int, passes: int) -> int:
        """An annealing budget for a schedule of `passes` passes."""
        return min(wanted, self.per_pass * passes)


FULL = Effort(
    sites=3,
    climb_passes=1_500_000,
    short_anneal=800_000,
    long_anneal=12_000_000,
    gain_after=(0.12, 0.08, 0.045, 0.03, 0.006),
)
QUICK = Effort(
    sites=2,
    climb_passes=90_000,
    short_anneal=0,
    long_anneal=700_000,
    gain_after=(0.1, 0.06, 0.04, 0.03, 0.03),
    starts=12,
)
