"""The best plan of a study against its baselines, and whether the difference is more than the noise.

Where the study had a final that decides it, the final's numbers are the answer; else those of the search itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.results.columns import Row
from autotune.results.final import Final, pick_lineup, too_few
from autotune.results.measurement import Fidelity
from autotune.results.ratios import CONFIDENCE
from autotune.results.sentences import final_sentence, search_sentence
from autotune.results.verdict import INTERLEAVED_SCHEDULE, fastest, fidelity_of, is_baseline_schedule

__all__ = ["Comparison", "Contest", "compare", "in_force"]

_GOES_ON = "a search that is at it goes on, else --resume does"


@dataclass(frozen=True)
class Contest:
    """The best plan against one other.

    Attributes:
        ratio: step time of the other over step time of the best; above 1 the best is faster. None if the final, which
            decides, has no measurement of the other.
        low, high: of a final, the 95 % confidence interval of the ratio. Else the ratio when the spread of the measured
            steps falls least and most in favour of the best: shortest step of the other over longest of the best, and
            the reverse. None where nothing was measured.
        trouble: why the other fell out of the final.
        rounds: of the final in which both were measured.
    """

    name: str
    other: Row
    ratio: float | None
    low: float | None
    high: float | None
    trouble: str = ""
    rounds: int | None = None

    @property
    def beyond_spread(self) -> bool:
        """Whether the best is faster beyond the noise: the lower end of the ratio is above 1."""
        return self.low is not None and self.low > 1.0


@dataclass(frozen=True)
class Comparison:
    """The best plan of a study and its contests; `baseline` or `interleaved` is None where no such plan competes.

    Attributes:
        fidelity: at which all plans in it were evaluated; `run` is measured, the others are predicted.
        challenger: the fastest other plan of the final.
        final: the final whose numbers these are; None where they are the search's own.
        remark: why a final that there is doesn't count, or that it isn't over; empty if it counts and is, or there is
            none.
        tried: whether the study has 1F1B plans at all, and interleaved ones.
    """

    best: Row | None
    baseline: Contest | None
    interleaved: Contest | None
    fidelity: Fidelity = "run"
    challenger: Contest | None = None
    final: Final | None = None
    remark: str = ""
    tried: tuple[bool, bool] = (True, True)

    @property
    def source(self) -> str:
        """Where the numbers come from, in words; empty if they were measured."""
        return {
            "run": "",
            "profile": "predicted from profiled stages, not measured",
            "predict": "predicted by the cost model, not measured",
        }[self.fidelity]

    def sentences(self) -> list[str]:
        """The result in words: over 1F1B, over interleaved 1F1B, and why a final doesn't count."""
        if self.best is None:
            return ["no plan of this study ran within its limits, so there is nothing to compare"]
        remarks = [self.remark] if self.remark else []
        families = ((self.baseline, "1F1B", self.tried[0]), (self.interleaved, "interleaved 1F1B", self.tried[1]))
        if self.final is not None:
            return [
                final_sentence(self.best, one, self.challenger, name, tried) for one, name, tried in families
            ] + remarks
        label = f"{self.source}: " if self.source else ""
        predicted = bool(self.source)
        return [
            label + search_sentence(self.best, one, name, predicted, tried) for one, name, tried in families
        ] + remarks

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "fidelity": self.fidelity,
            "best": self.best.to_dict() if self.best else None,
            "baseline": _contest_dict(self.baseline, self.best),
            "interleaved": _contest_dict(self.interleaved, self.best),
            "challenger": _contest_dict(self.challenger, self.best),
            "final": None if self.final is None else {"confidence": CONFIDENCE, **self.final.to_dict()},
            "summary": self.sentences(),
        }


def in_force(final: Final | None, rows: Sequence[Row]) -> Final | None:
    """The final if it decides the study that `rows` are: with rounds enough, and between the plans it calls for now."""
    return final if final is not None and final.decides and final.holds_for(rows) else None


def compare(rows: Sequence[Row], final: Final | None = None) -> Comparison:
    """Compare the best plan of a study with its best 1F1B plan and its best interleaved one.

    All rows are of one study, so model, global batch and devices are the same by construction.

    Args:
        final: of the study; it counts only if it is decided and of the plans that the rows call for.
    """
    if (deciding := in_force(final, rows)) is not None:
        return _by_final(rows, deciding)
    fidelity = fidelity_of(rows)
    best = fastest(rows, fidelity=fidelity)
    baseline = fastest(rows, is_baseline_schedule, fidelity)
    interleaved = fastest(rows, lambda row: row.schedule == INTERLEAVED_SCHEDULE, fidelity)
    return Comparison(
        best,
        _contest("best 1F1B plan", best, baseline, fidelity),
        _contest("best interleaved plan", best, interleaved, fidelity),
        fidelity,
        remark="" if final is None else _why_not(final, rows),
        tried=_tried(rows),
    )


def _by_final(rows: Sequence[Row], final: Final) -> Comparison:
    by_fingerprint = {row.fingerprint: row for row in rows}
    assert final.best is not None
    best = by_fingerprint[final.best]

    def contest(name: str, fingerprint: str | None) -> Contest | None:
        if fingerprint is None:
            return None
        other = by_fingerprint[fingerprint]
        if other is best:
            return Contest(name, other, 1.0, 1.0, 1.0)
        found = None if fingerprint in final.lost else final.ratio(best.fingerprint, fingerprint)
        if found is None:
            return Contest(name, other, None, None, None, final.lost.get(fingerprint, "too few measurements"))
        return Contest(name, other, found.ratio, found.low, found.high, rounds=found.rounds)

    return Comparison(
        best,
        contest("best 1F1B plan", final.lineup.baseline),
        contest("best interleaved plan", final.lineup.interleaved),
        "run",
        contest("fastest other plan", final.challenger()),
        final,
        "" if final.upcoming() is None else f"the final isn't over: {final.progress} so far; {_GOES_ON}",
        _tried(rows),
    )


def _tried(rows: Sequence[Row]) -> tuple[bool, bool]:
    return any(map(is_baseline_schedule, rows)), any(row.schedule == INTERLEAVED_SCHEDULE for row in rows)


def _why_not(final: Final, rows: Sequence[Row]) -> str:
    if not final.holds_for(rows):
        few = too_few(pick_lineup(rows, final.top))
        so = f"there is none to hold now, {few}" if few else "--resume holds another"
        return f"the final was between other plans than those that lead now, so it doesn't count; {so}"
    if not final.launches or final.upcoming() is not None:
        return f"the final isn't over: {final.progress} so far, so it doesn't count yet; {_GOES_ON}"
    return final.decided_nothing


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
        "trouble": contest.trouble or None,
        "rounds": contest.rounds,
    }
