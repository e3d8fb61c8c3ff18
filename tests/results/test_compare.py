"""Best, baseline and speed-up are decided once, from rows of one study."""

from __future__ import annotations

from dataclasses import replace

import json
from typing import Any

import pytest

from autotune.results.columns import COLUMNS, Row
from autotune.results.compare import compare
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.results.rows import plan_of, row_of
from autotune.results.verdict import judge
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

TOKENS = 1000.0


def row(schedule: str, step_s: float, spread_s: float = 0.0, state: str = "ok", **values: Any) -> Row:
    return Row(
        state=state,
        schedule=schedule,
        step_time_s=step_s,
        step_time_min_s=step_s - spread_s,
        step_time_max_s=step_s + spread_s,
        tokens_per_s=TOKENS / step_s,
        **values,
    )


def test_speedup_is_against_the_fastest_1f1b_plan_and_marks_are_unique() -> None:
    rows = judge(
        [row("1f1b", 2.0), row("zb-v", 0.8), row("1f1b", 1.0), row("v-min", 4.0), row("zb-v", 0.1, state="oom")]
    )
    assert [r.speedup_vs_1f1b for r in rows] == [0.5, 1.25, 1.0, 0.25, None]
    assert [r.is_baseline for r in rows] == [False, False, True, False, False]
    assert [r.is_best for r in rows] == [False, True, False, False, False]


def test_plan_over_its_memory_is_never_the_best_nor_the_baseline() -> None:
    rows = judge([row("1f1b", 0.1, state="oom"), row("1f1b", 1.0)])
    assert [(r.is_best, r.is_baseline) for r in rows] == [(False, False), (True, True)]


def test_without_a_1f1b_plan_there_is_a_best_but_no_speedup() -> None:
    rows = judge([row("zb-v", 1.0), Row(state="refused", schedule="1f1b")])
    assert (rows[0].is_best, rows[0].speedup_vs_1f1b) == (True, None)
    assert not any(r.is_baseline for r in rows)


def test_tokens_are_counted_once_whatever_the_degrees() -> None:
    plan = Plan(2, 2, 2, 1, 4, "zb-v", 2, (1, 1, 1, 1))
    measured = Measurement("wall", 0.5, 0.4, 0.6, 0.1, 0.5, (10, 20), 0.2, 2.0, "2.13.0", "cpu")
    outcome = TrialOutcome("ok", "", measured, "2026-01-01T00:00:00+00:00", 9.0)
    made = row_of(3, plan, "f" * 16, outcome, ModelSpec(4, 8, 2, 2, 4, 8, 16, sequence_length=64), TrainingSpec(8))
    assert made.tokens_per_s == 8 * 64 / 0.5
    assert made.tokens_per_s_per_device == 8 * 64 / 0.5 / 8
    assert made.peak_memory_bytes == 20
    assert plan_of(made) == plan
    assert list(made.to_dict()) == [column.name for column in COLUMNS]


def test_comparison_gives_ratio_and_what_the_spread_leaves_of_it() -> None:
    found = compare([row("zb-v", 1.0, 0.1), row("1f1b", 1.5, 0.1), row("interleaved-1f1b", 1.2, 0.1)])
    assert found.baseline is not None
    assert found.interleaved is not None
    assert (found.baseline.ratio, found.baseline.low, found.baseline.high) == pytest.approx((1.5, 1.4 / 1.1, 1.6 / 0.9))
    assert found.baseline.beyond_spread
    assert "1.500x" in found.sentences()[0]
    assert found.interleaved.low == pytest.approx(1.0)
    assert not found.interleaved.beyond_spread
    assert "inside the spread" in found.sentences()[1]


def test_comparison_says_plainly_that_1f1b_is_best() -> None:
    found = compare([row("zb-v", 1.0), row("1f1b", 0.5, pp=1, tp=1, dp=4)])
    assert found.sentences()[0].startswith("the best plan is itself a 1F1B plan: pp1 tp1 dp4")
    assert found.sentences()[1] == "this study has no interleaved 1F1B plan to compare with"
    failed = replace(row("interleaved-1f1b", 1.0), state="oom")
    told = compare([row("zb-v", 1.0), row("1f1b", 0.5), failed]).sentences()[1]
    assert told == "no interleaved 1F1B plan of this study ran within its limits"


def test_comparison_of_nothing_says_so() -> None:
    found = compare([row("1f1b", 1.0, state="oom"), Row(state="failed")])
    assert found.best is None
    assert "nothing to compare" in found.sentences()[0]
    json.dumps(found.to_dict(), allow_nan=False)


def predicted(schedule: str, step_s: float, fidelity: str = "predict", **values: Any) -> Row:
    return Row(
        state="predicted",
        schedule=schedule,
        fidelity=fidelity,
        predicted_step_time_s=step_s,
        predicted_tokens_per_s=TOKENS / step_s,
        **values,
    )


def test_predictions_compete_where_nothing_was_run_and_are_called_so() -> None:
    rows = judge([predicted("1f1b", 1.0), predicted("zb-v", 0.8), predicted("zb-v", 0.5, predicted_fits=False)])
    assert [r.is_best for r in rows] == [False, True, False]
    assert [r.speedup_vs_1f1b for r in rows] == [1.0, 1.25, None]
    found = compare(rows)
    assert found.fidelity == "predict"
    assert found.sentences()[0].startswith("predicted by the cost model, not measured: the best plan is 1.250x as fast")
    assert found.baseline is not None
    assert (found.baseline.low, found.baseline.high, found.baseline.beyond_spread) == (None, None, False)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("order", [1, -1])
def test_no_measured_number_is_set_against_a_predicted_one(order: int) -> None:
    mixed = [predicted("zb-v", 0.1), row("1f1b", 2.0, fidelity="run"), row("zb-v", 1.0, fidelity="run")][::order]
    rows = judge(mixed)
    assert [r.speedup_vs_1f1b for r in rows] == [None, 1.0, 2.0][::order]
    assert [r.is_best for r in rows] == [False, False, True][::order]
    profiled = judge([predicted("zb-v", 0.1), predicted("1f1b", 3.0, "profile")])
    assert [r.is_best for r in profiled] == [False, True]


def test_runs_that_all_failed_leave_nothing_to_compare_whatever_is_predicted() -> None:
    rows = judge([Row(state="failed", fidelity="run", schedule="1f1b"), predicted("1f1b", 1.0)])
    assert not any(r.is_best or r.is_baseline for r in rows)
    assert compare(rows).best is None
