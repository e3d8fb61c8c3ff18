"""Profiles that were refused by their memory, seen again under another limit or without refusals."""

from __future__ import annotations

from autotune.results.measurement import TrialOutcome
from autotune.results.predicted import Predicted
from autotune.search.judgement import judged_by

SECONDS = dict.fromkeys(
    ("step_time_s", "compute_s", "bubble_s", "tp_s", "pp_s", "dp_s", "optimizer_s", "overhead_s"), 1.0
)


def refused() -> TrialOutcome:
    told = Predicted(**SECONDS, peak_memory_bytes=1000)
    reason = "refused (estimate): pipeline device 0"
    return TrialOutcome("refused", reason, None, "2026-01-01T00:00:00+00:00", 1.0, predicted=told)


def test_refused_profile_stays_refused_under_the_same_limit() -> None:
    outcome = refused()
    assert judged_by(outcome, 900) is outcome


def test_refused_profile_is_kept_under_a_higher_limit_and_without_refusals() -> None:
    outcome = refused()
    assert judged_by(outcome, 1000).state == "predicted"
    assert judged_by(outcome, None).state == "predicted"
    kept = judged_by(outcome, 900, refuses=False)
    assert kept.state == "predicted"
    assert kept.reason == "kept by --no-refuse-by-estimate: refused (estimate): pipeline device 0"
