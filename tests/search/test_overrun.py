"""Out of memory is graded by bytes over the limit, measured or else predicted, never as nearly fitting by default."""

from __future__ import annotations

import math

import optuna
import pytest
from conftest import Bench
from sampler_cases import make_plans, ok, out_of_memory, predict

from autotune.results.measurement import Measurement, TrialOutcome
from autotune.search.overrun import overrun_bytes
from autotune.search.samplers import make_proposer
from autotune.search.samplers.optuna_samplers import Nsga2

LIMIT = 1000
PLAN, *OTHERS = make_plans()


def ended(state: str, peak: int | None = None) -> TrialOutcome:
    measured = Measurement("wall", 1.0, 1.0, 1.0, 0.0, 1.0, None if peak is None else (peak,), None, None, "", "")
    return TrialOutcome(state, "", None if peak is None else measured, "", 1.0)  # type: ignore[arg-type]


def test_a_measured_peak_is_the_grade_whatever_was_predicted() -> None:
    assert overrun_bytes(ended("oom", 1300), LIMIT, 1900) == 300
    assert overrun_bytes(ended("ok", 900), LIMIT, 1900) == -100


def test_without_a_peak_the_prediction_is_the_grade() -> None:
    assert overrun_bytes(ended("oom"), LIMIT, 1900) == 900


@pytest.mark.parametrize("worst", [0.0, 700.0, 5000.0])
def test_a_prediction_that_was_wrong_makes_no_plan_look_better_than_measured_ones(worst: float) -> None:
    lighter, heavier = (overrun_bytes(ended("oom"), LIMIT, peak, worst) for peak in (200, 1000))
    unknown = overrun_bytes(ended("oom"), LIMIT, None, worst)
    assert lighter is not None
    assert heavier is not None
    assert unknown is not None
    assert max(worst, LIMIT) <= unknown < lighter < heavier


def test_failures_say_nothing_of_memory_and_without_a_limit_out_of_memory_is_still_infeasible() -> None:
    assert overrun_bytes(ended("failed"), LIMIT, 1900) is None
    assert overrun_bytes(ended("oom"), None, 1900) == 1900
    assert overrun_bytes(ended("oom"), None, None) == 1


@pytest.mark.parametrize(
    ("predicted", "limit", "told"), [(1900, 1000, 1900), (200, 1000, 1000), (None, 1000, 1000), (None, None, math.inf)]
)
def test_nsga2_is_told_the_predicted_peak_and_at_least_the_limit(
    predicted: int | None, limit: int | None, told: float
) -> None:
    plans = [PLAN, *OTHERS]
    forecasts = {} if predicted is None else {PLAN: predict(1.0, predicted)}
    sampler = make_proposer("nsga2", plans, 0, forecasts, limit)
    assert isinstance(sampler, Nsga2)
    assert sampler.values(out_of_memory(PLAN, 50.0)) == [0.0, told]
    assert sampler.values(out_of_memory(PLAN, 50.0, 1050)) == [0.0, 1050.0]
    known = [out_of_memory(plan, 50.0) if plan.tp == 2 else ok(plan, 100.0, 500, 1000) for plan in plans[:60]]
    assert sampler.propose(plans[60:], known) in plans[60:]


def test_nothing_but_unmeasured_out_of_memory_names_the_closest_by_prediction_and_the_study_the_bytes(
    bench: Bench,
) -> None:
    bench.edit_space("pp: [1, 2, 4]", "pp: [2]")
    bench.edit_space("tp: [1, 3]", "tp: [1]")
    bench.tell_worker({"do": "memory_error", "limit": 8 << 30})
    done = bench.search()
    assert done.returncode == 1
    rows = [row for row in bench.table() if row["state"] == "oom"]
    peaks = {row["fingerprint"]: int(row["predicted_peak_memory_bytes"]) for row in rows}
    assert len(rows) == 4
    least = min(rows, key=lambda row: peaks[row["fingerprint"]])
    assert f"no peak was measured, closest by prediction is pp2 tp1 dp2 mbs2 m4 {least['schedule']}" in done.stderr
    assert "its predicted peak is" in done.stderr
    study = optuna.load_study(study_name="tiny", storage=f"sqlite:///{bench.study / 'study.db'}")
    limit = 1 << 20
    for trial in study.get_trials():
        peak = peaks[trial.user_attrs["plan"]]
        over = peak - limit if peak > limit else limit + peak
        assert trial.constraints == {"memory_bytes_over_limit": over}
