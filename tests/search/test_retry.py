"""Failed plans are run again on wish, each once, and nothing that is known is lost by it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from conftest import LEGAL, REFUSED, Bench, Notes, wait_until
from optuna.trial import TrialState, create_trial

from autotune.errors import UserError
from autotune.results.measurement import TrialOutcome
from autotune.search.budget import Budget
from autotune.search.claims import Claim
from autotune.search.options import SearchOptions
from autotune.search.stored_trial import Finished, trials_over
from autotune.search.tuners import local_clock_s, this_tuner
from autotune.space.plan import Plan
from autotune.space.space import load_space

PLANS = {f"plan-{number}": Plan(1, 1, 4, 1, number, "1f1b", 1, (1,)) for number in (1, 2)}
FAILED = TrialOutcome("failed", "ValueError: no", None, "2026-01-01T00:00:00+00:00", 4.0)
DONE = TrialOutcome("ok", "", None, "2026-01-01T00:00:00+00:00", 1.0)


@pytest.fixture
def three(bench: Bench) -> Bench:
    """A space of three plans of three schedules."""
    bench.keep_three_plans("zb-h1, v-min")
    return bench


def rows(bench: Bench) -> dict[str, dict[str, str]]:
    """By schedule."""
    return {row["schedule"]: row for row in bench.table()}


def launched(bench: Bench) -> Counter[str]:
    return Counter(json.loads(plan)["schedule"] for plan in bench.launches())


def test_every_kind_of_failure_is_run_again_and_nothing_else_is(bench: Bench) -> None:
    at = [{"schedule": schedule, "pp": pp} for pp in (2, 4) for schedule in ("1f1b", "interleaved-1f1b", "zb-h1")]
    bench.tell_worker(
        {"when": at[0], "do": "fail"},
        {"when": at[1], "do": "silent"},
        {"when": at[2], "do": "crash", "rank": 0, "signal": int(signal.SIGKILL)},
        {"when": at[3], "do": "succeed", "loss": float("nan")},
        {"when": at[4], "do": "sleep"},
        {"when": at[5], "do": "succeed", "steps": 1},
        {
            "when": {"schedule": "v-min", "pp": 2},
            "do": "fail",
            "rank": 0,
            "state": "oom",
            "error": "CUDA out of memory",
        },
    )
    bench.here(trial_timeout_s=2.0)
    broken = {"failed": 1, "no-result": 1, "killed": 1, "non-finite": 1, "timeout": 1, "invalid": 1}
    assert bench.states() == {**broken, "oom": 1, "ok": 2, "refused": REFUSED}
    before = bench.table()
    bench.tell_worker()
    bench.here(resume=True)
    assert len(bench.launches()) == LEGAL
    assert bench.table() == before
    notes = Notes()
    bench.here(notes, resume=True, retry_failed=True)
    assert "running 6 failed plans again" in notes
    counts = Counter(bench.launches())
    assert sorted(counts.values()) == [1] * (LEGAL - 6) + [2] * 6
    assert bench.states() == {"oom": 1, "ok": LEGAL - 1, "refused": REFUSED}
    again = {row["fingerprint"]: row for row in bench.table()}
    for row in before:
        new = again[row["fingerprint"]]
        if row["state"] in broken:
            said = row["reason"].splitlines()[0].rstrip()
            assert new["reason"] == f"tried again: trial {row['trial']} was {row['state']}: {said}"
            assert int(new["trial"]) >= LEGAL
        elif row["trial"]:
            assert (new["trial"], new["state"], new["reason"]) == (row["trial"], row["state"], row["reason"])
    nothing = Notes()
    bench.here(nothing, resume=True, retry_failed=True)
    assert "no failed plans of earlier searches to run again" in nothing
    assert len(bench.launches()) == LEGAL + 6


def test_a_plan_that_fails_again_tells_every_failure_and_is_not_tried_a_third_time_unasked(three: Bench) -> None:
    for number in range(3):
        three.tell_worker(
            {"when": {"schedule": "zb-h1"}, "do": "fail", "rank": 0, "error": f"ValueError: number {number}"}
        )
        three.here(resume=True, retry_failed=True)
        assert launched(three) == {"1f1b": 1, "zb-h1": 1 + number, "v-min": 1}
    reason = rows(three)["zb-h1"]["reason"].splitlines()
    assert "ValueError: number 2" in reason[0]
    earlier = [line for line in reason if line.startswith("tried again: ")]
    assert [line.split(" was failed: ")[0] for line in earlier] == ["tried again: trial 1", "tried again: trial 3"]
    assert "number 0" in earlier[0]
    assert "number 1" in earlier[1]
    assert reason[-2:] == earlier
    three.here(resume=True)
    assert launched(three)["zb-h1"] == 3
    assert rows(three)["zb-h1"]["reason"].splitlines() == reason


def test_a_retried_plan_counts_as_one_trial_and_the_time_of_all_of_its_trials(three: Bench) -> None:
    three.tell_worker({"when": {"schedule": "1f1b"}, "do": "fail"})
    three.here(trials=2)
    assert launched(three) == {"1f1b": 1, "zb-h1": 1}
    three.tell_worker()
    result = three.here(resume=True, retry_failed=True, trials=2)
    assert result.ended == "trials"
    assert launched(three) == {"1f1b": 2, "zb-h1": 1}
    three.here(resume=True, trials=2)
    assert sum(launched(three).values()) == 3

    budget = Budget(SearchOptions(Path("unused"), trials=2), PLANS)
    failure = Finished(0, PLANS["plan-1"], FAILED)
    waiting = budget.spent([], [], 0.0, 0.0, [failure])
    assert (waiting.trials, waiting.seconds, waiting.device_hours) == (0, 4.0, 4.0 * 4 / 3600)
    after = budget.spent([Finished(2, PLANS["plan-1"], DONE, failure.seconds)], [], 0.0, 0.0)
    assert (after.trials, after.seconds, after.trial_s) == (1, 5.0, 1.0)
    assert after.device_hours == pytest.approx(5.0 * 4 / 3600)
    claims = {"plan-1": Claim("plan-1", "a", "done", 0), "plan-2": Claim("plan-2", "a", "done", 1)}
    assert not budget.allows(claims, ())
    assert budget.allows(claims, (), {"plan-1": 0})
    assert not budget.allows(claims | {"plan-1": Claim("plan-1", "b", "held", 0)}, (), {"plan-1": 0})
    assert not budget.allows(claims | {"plan-1": Claim("plan-1", "b", "done", 2)}, (), {"plan-1": 0})


def test_searches_that_retry_at_once_run_each_failed_plan_once_though_it_fails_again(bench: Bench) -> None:
    bench.tell_worker({"when": {"schedule": ["zb-h1", "v-min"]}, "do": "fail"})
    bench.here()
    before = Counter(bench.launches())
    assert bench.states()["failed"] == 4
    tuners = [bench.start("--resume", "--retry-failed") for _ in range(3)]
    for tuner in tuners:
        _, errors = tuner.communicate(timeout=120)
        assert tuner.returncode == 0, errors
        assert "Traceback" not in errors
    again = Counter(bench.launches()) - before
    assert len(again) == sum(again.values()) == 4
    assert bench.states() == {"failed": 4, "ok": LEGAL - 4, "refused": REFUSED}
    assert all(row["reason"].count("tried again: ") == 1 for row in bench.table() if row["state"] == "failed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_retry_that_is_cut_short_leaves_the_failure_and_may_be_tried_again(three: Bench, number: int) -> None:
    three.tell_worker({"when": {"schedule": "zb-h1"}, "do": "fail"})
    three.here()
    three.tell_worker({"when": {"schedule": "zb-h1"}, "do": "sleep"})
    tuner = three.start("--resume", "--retry-failed")
    wait_until(lambda: launched(three)["zb-h1"] == 2, limit_s=60)
    os.kill(tuner.pid, number)
    tuner.communicate(timeout=30)
    three.tell_worker()
    three.here(resume=True)
    assert (rows(three)["zb-h1"]["state"], rows(three)["zb-h1"]["trial"]) == ("failed", "1")
    assert launched(three)["zb-h1"] == 2
    three.here(resume=True, retry_failed=True)
    assert rows(three)["zb-h1"]["state"] == "ok"
    assert launched(three) == {"1f1b": 1, "zb-h1": 3, "v-min": 1}
    with closing(sqlite3.connect(three.study / "study.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM autotune_claims WHERE state != 'done'").fetchone() == (0,)


def test_retry_of_what_is_no_resume_or_runs_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="give both"):
        SearchOptions(Path("unused"), retry_failed=True)
    with pytest.raises(UserError, match="--retry-failed means nothing with --fidelity predict"):
        SearchOptions(Path("unused"), resume=True, retry_failed=True, fidelity="predict")


def test_only_failures_of_searches_that_were_over_when_this_one_was_started_are_retried(bench: Bench) -> None:
    me = this_tuner(load_space(bench.path / "tiny.yaml").cluster)
    age_s = time.time() - psutil.Process().create_time()
    assert local_clock_s() - me.started_s == pytest.approx(age_s, abs=5.0)  # by a coarse, but independent clock

    def is_over(after_s: float, **changes: object) -> bool:
        begun = me.started_s + after_s
        attrs = {"tuner": "a", "place": me.place, "mark": "1/2", "begun_s": begun, "outcome": {}, **changes}
        trial = create_trial(state=TrialState.FAIL, user_attrs={n: v for n, v in attrs.items() if v is not None})
        return bool(trials_over([trial], {"b", me.key}, me))

    assert is_over(-0.02)
    assert not is_over(0.02)  # it was started beside this one, and is over already
    assert not is_over(-0.02, tuner="b")
    assert is_over(0.02, place="elsewhere")  # clocks of machines are never compared
    assert is_over(0.02, place=None, mark=None, begun_s=None)  # of an earlier version
    assert is_over(0.02, mark=me.mark)  # an earlier search of this very process
    assert not is_over(-0.02, outcome=None)


def test_a_search_that_joins_late_leaves_the_failures_of_one_at_work_alone(three: Bench) -> None:
    three.tell_worker({"when": {"schedule": "zb-h1"}, "do": "fail"})
    three.here(trials=2)
    three.tell_worker({"when": {"schedule": "zb-h1"}, "do": "fail"}, {"when": {"schedule": "v-min"}, "do": "sleep"})
    running = three.start("--resume", "--retry-failed")
    wait_until(lambda: launched(three)["v-min"] == 1, limit_s=60)
    assert launched(three)["zb-h1"] == 2

    class Late(Notes):
        """Ends the one at work as soon as this one knows what it retries: it would wait for it."""

        def note(self, text: str) -> None:
            super().note(text)
            if "failed plans" in text and running.poll() is None:
                running.kill()
                running.wait()

    notes = Late()
    three.tell_worker({"when": {"schedule": "zb-h1"}, "do": "fail"})
    three.here(notes, resume=True, retry_failed=True)
    assert "no failed plans of earlier searches to run again" in notes
    assert launched(three) == {"1f1b": 1, "zb-h1": 2, "v-min": 2}  # the plan of the one that died is measured again
    assert rows(three)["v-min"]["state"] == "ok"
