"""The best plan of a study against its baselines, and whether the difference is more than the spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.results.columns import Row
from autotune.results.measurement import Fidelity
from autotune.results.verdict import INTERLEAVED_SCHEDULE, fastest, fidelity_of, is_baseline_schedule

__all__ = ["Comparison", "Contest", "compare"]


@dataclass(frozen=True)
class Contest:
    """The best plan against one other.

    Attributes:
        ratio: step time of the other over step time of the best; above 1 the best is faster.
        low, high: the ratio when the spread of the measured steps falls least and most in favour of the best: shortest
            step of the other over longest of the best, and the reverse. None where nothing was measured.
    """

    name: str
    other: Row
    ratio: float
    low: float | None
    high: float | None

    @property
    def beyond_spread(self) -> bool:
        """Whether even the longest measured step of the best is shorter than the other's shortest."""
        return self.low is not None and self.low > 1.0


@dataclass(frozen=True)
class Comparison:
    """The best plan of a study and its contests; `baseline` or `interleaved` is None where no such plan competes.

    Attributes:
        fidelity: at which all plans in it were evaluated; `run` is measured, the others are predicted.
    """

    best: Row | None
    baseline: Contest | None
    interleaved: Contest | None
    fidelity: Fidelity = "run"

    @property
    def source(self) -> str:
        """Where the numbers come from, in words; empty if they were measured."""
        return {
            "run": "",
            "profile": "predicted from profiled stages, not measured",
            "predict": "predicted by the cost model, not measured",
        }[self.fidelity]

    def sentences(self) -> list[str]:
        """The result in words."""
        if self.best is None:
            return ["no plan of this study ran within its limits, so there is nothing to compare"]
        label = f"{self.source}: " if self.source else ""
        return [
            label + _sentence(self.best, self.baseline, "1F1B", bool(self.source)),
            label + _sentence(self.best, self.interleaved, "interleaved 1F1B", bool(self.source)),
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "fidelity": self.fidelity,
            "best": self.best.to_dict() if self.best else None,
            "baseline": _contest_dict(self.baseline, self.best),
            "interleaved": _contest_dict(self.interleaved, self.best),
            "summary": self.sentences(),
        }


def compare(rows: Sequence[Row]) -> Comparison:
    """Compare the best plan of a study with its best 1F1B plan and its best interleaved one.

    All rows are of one study, so model, global batch and devices are the same by construction.
    """
    fidelity = fidelity_of(rows)
    best = fastest(rows, fidelity=fidelity)
    baseline = fastest(rows, is_baseline_schedule, fidelity)
    interleaved = fastest(rows, lambda row: row.schedule == INTERLEAVED_SCHEDULE, fidelity)
    return Comparison(
        best,
        _contest("best 1F1B plan", best, baseline, fidelity),
        _contest("best interleaved plan", best, interleaved, fidelity),
        fidelity,
    )


def _contest(name: str, best: Row | None, other: Row | None, fidelity: Fidelity) -> Contest | None:
    if best is None or other is None:
        return None
    if fidelity != "run":
        assert best.predicted_step_time_s is not None
        assert other.predicted_step_time_s is not None
        return Contest(name, other, other.predicted_step_time_s / best.predicted_step_time_s, None, None)
    if best is other:
        return Contest(name, other, 1.0, 1.0, 1.0)
    best_s, other_s = _step_times(best), _step_times(other)
    return Contest(name, other, other_s[1] / best_s[1], other_s[0] / best_s[2], other_s[2] / best_s[0])


def _step_times(row: Row) -> tuple[float, float, float]:
    """Shortest, median and longest measured step of an `ok` row."""
    assert row.step_time_s is not None
    return row.step_time_min_s or row.step_time_s, row.step_time_s, row.step_time_max_s or row.step_time_s


def _sentence(best: Row, contest: Contest | None, family: str, predicted: bool) -> str:
    if contest is None:
        return f"no {family} plan of this study {'fits' if predicted else 'ran within its limits'}"
    if contest.other is best:
        article = "an" if family.startswith("interleaved") else "a"
        return f"the best plan is itself {article} {family} plan: {best.describe()}"
    other = f"the {contest.name} ({contest.other.describe()})"
    if contest.low is None or contest.high is None:
        return f"the best plan is {contest.ratio:.3f}x as fast as {other}"
    said = (
        f"the best plan is {contest.ratio:.3f}x (measured steps: {contest.low:.3f}x to {contest.high:.3f}x) "
        f"as fast as {other}"
    )
    if contest.beyond_spread:
        return said
    return f"{said}: the difference is inside the spread, so no gain over {family} is shown"


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
