"""The best plan of a study against its baselines, and whether the difference is more than the spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.results.columns import Row
from autotune.results.verdict import INTERLEAVED_SCHEDULE, fastest, is_baseline_schedule

__all__ = ["Comparison", "Contest", "compare"]


@dataclass(frozen=True)
class Contest:
    """The best plan against one other.

    Attributes:
        ratio: step time of the other over step time of the best; above 1 the best is faster.
        low, high: the ratio when the spread of the measured steps falls least and most in favour of the best: shortest
            step of the other over longest of the best, and the reverse.
    """

    name: str
    other: Row
    ratio: float
    low: float
    high: float

    @property
    def beyond_spread(self) -> bool:
        """Whether even the longest measured step of the best is shorter than the other's shortest."""
        return self.low > 1.0


@dataclass(frozen=True)
class Comparison:
    """The best plan of a study and its contests; `baseline` or `interleaved` is None where no such plan is `ok`."""

    best: Row | None
    baseline: Contest | None
    interleaved: Contest | None

    def sentences(self) -> list[str]:
        """The result in words."""
        if self.best is None:
            return ["no plan of this study ran within its limits, so there is nothing to compare"]
        return [
            _sentence(self.best, self.baseline, "1F1B"),
            _sentence(self.best, self.interleaved, "interleaved 1F1B"),
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "best": self.best.to_dict() if self.best else None,
            "baseline": _contest_dict(self.baseline, self.best),
            "interleaved": _contest_dict(self.interleaved, self.best),
            "summary": self.sentences(),
        }


def compare(rows: Sequence[Row]) -> Comparison:
    """Compare the best plan of a study with its best 1F1B plan and its best interleaved one.

    All rows are of one study, so model, global batch and devices are the same by construction.
    """
    best = fastest(rows)
    return Comparison(
        best,
        _contest("best 1F1B plan", best, fastest(rows, is_baseline_schedule)),
        _contest("best interleaved plan", best, fastest(rows, lambda row: row.schedule == INTERLEAVED_SCHEDULE)),
    )


def _contest(name: str, best: Row | None, other: Row | None) -> Contest | None:
    if best is None or other is None:
        return None
    best_s, other_s = _step_times(best), _step_times(other)
    if best is other:
        return Contest(name, other, 1.0, 1.0, 1.0)
    return Contest(name, other, other_s[1] / best_s[1], other_s[0] / best_s[2], other_s[2] / best_s[0])


def _step_times(row: Row) -> tuple[float, float, float]:
    """Shortest, median and longest measured step of an `ok` row."""
    assert row.step_time_s is not None
    return row.step_time_min_s or row.step_time_s, row.step_time_s, row.step_time_max_s or row.step_time_s


def _sentence(best: Row, contest: Contest | None, family: str) -> str:
    if contest is None:
        return f"no {family} plan of this study ran within its limits"
    if contest.other is best:
        return (
            f"the best plan is itself {'a' if family != 'interleaved 1F1B' else 'an'} {family} plan: {best.describe()}"
        )
    spread = f"{contest.ratio:.3f}x (measured steps: {contest.low:.3f}x to {contest.high:.3f}x)"
    if contest.beyond_spread:
        return f"the best plan is {spread} as fast as the {contest.name} ({contest.other.describe()})"
    return (
        f"the best plan is {spread} as fast as the {contest.name} ({contest.other.describe()}): "
        f"the difference is inside the spread, so no gain over {family} is shown"
    )


def _contest_dict(contest: Contest | None, best: Row | None) -> dict[str, object] | None:
    if contest is None:
        return None
    return {
        "plan": contest.other.to_dict(),
        "ratio": contest.ratio,
        "ratio_low": contest.low,
        "ratio_high": contest.high,
        "beyond_spread": contest.beyond_spread,
        "is_best": contest.other is best,
    }
