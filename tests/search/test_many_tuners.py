"""Many searches on one study: no plan is measured twice, none is lost when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Bench, wait_until

from autotune.errors import UserError
from autotune.profiling.process_tree import MARKER

PLANS = 48
SPACE_OF_48 = """
name: tiny
model: {layers: 8, hidden: 64, heads: 4, kv_heads: 4, ffn_hidden: 128, vocab: 128, sequence_length: 32}
cluster: {nodes: 1, devices_per_node: 4, device: cpu}
training: {global_batch_size: 32}
search:
  pp: [2, 4]
  tp: [1]
  micro_batch_size: [1, 2]
  schedule: [1f1b, gpipe, zb-h1, zb-h2, v-min, v-half]
  recompute: [none, full]
"""
THREE_PLANS = (("pp: [1, 2, 4]", "pp: [1, 2]"), ("tp: [1, 3]", "tp: [1]"), ("interleaved-1f1b, zb-h1, v-min", "zb-h1"))


@pytest.fixture
def wide(bench: Bench) -> Bench:
    (bench.path / "tiny.yaml").write_text(SPACE_OF_48)
    return bench


@pytest.fixture
def three(bench: Bench) -> Bench:
    for old, new in THREE_PLANS:
        bench.edit_space(old, new)
    return bench


def end(tuners: list[subprocess.Popen[str]]) -> list[str]:
    """What they said, when all have ended well."""
    said = [tuner.communicate(timeout=300) for tuner in tuners]
    for tuner, (_, errors) in zip(tuners, said, strict=True):
        assert tuner.returncode == 0, errors
        assert "Traceback" not in errors
    return [out for out, _ in said]


def launched(bench: Bench) -> Counter[str]:
    return Counter(bench.launches())


def every_plan_has_one_row_with_a_trial(bench: Bench, plans: int) -> bool:
    rows = bench.table()
    with_trial = [row for row in rows if row["trial"] and row["state"] == "ok"]
    return len(rows) == len({row["fingerprint"] for row in rows}) == len(with_trial) == plans


def tuner_of(worker: int) -> int:
    """The process that a worker's plan is tried by."""
    return int(psutil.Process(worker).environ()[MARKER].split("/")[1])


def test_six_searches_started_at_once_on_a_new_study_launch_each_of_48_plans_once(wide: Bench) -> None:
    said = end([wide.start("--resume") for _ in range(6)])
    assert len(launched(wide)) == sum(launched(wide).values()) == PLANS
    assert every_plan_has_one_row_with_a_trial(wide, PLANS)
    # Everyone ends with the same knowledge, and is told once that the devices are shared.
    assert all("every legal plan was measured; 48 plans: 48 ok" in out for out in said)
    assert all(out.count("may use the same devices") == 1 for out in said)
    assert not list(wide.study.glob("study.db-*"))


def test_on_postgresql_the_plan_of_a_killed_search_is_launched_again_and_no_row_is_lost(
    wide: Bench, postgres: Any
) -> None:
    fatal = {"schedule": "v-half", "pp": 4, "micro_batch_size": 1, "recompute": "none"}
    wide.tell_worker({"when": fatal, "do": "sleep", "deaf": True})
    tuners = [wide.start("--resume", "--storage", postgres.url) for _ in range(6)]

    def doomed() -> str | None:
        plans = [plan for plan in wide.launches() if fatal.items() <= json.loads(plan).items()]
        return plans[0] if plans else None

    wait_until(lambda: doomed() is not None, limit_s=200)
    plan = doomed()
    wide.tell_worker()
    folder = next(
        path.parent
        for path in wide.study.glob("logs/trial-*/plan.json")
        if json.loads(path.read_text()) == json.loads(plan)
    )
    worker = int((folder / "pid-0").read_text())
    victim = next(tuner for tuner in tuners if tuner.pid == tuner_of(worker))
    victim.kill()
    victim.wait()
    said = end([tuner for tuner in tuners if tuner is not victim])
    assert {plan: count for plan, count in launched(wide).items() if count > 1} == {plan: 2}
    assert len(launched(wide)) == PLANS
    assert every_plan_has_one_row_with_a_trial(wide, PLANS)
    assert sum(f"(process {victim.pid} on" in out and "is measured again" in out for out in said) == 1
    assert not psutil.pid_exists(worker)
    assert not (wide.study / "study.db").exists()


def test_a_search_that_was_stopped_for_long_loses_its_plan_and_writes_no_second_row(three: Bench) -> None:
    three.tell_worker({"when": {"schedule": "zb-h1"}, "do": "sleep"})
    stopped = three.start("--takeover-after", "4")
    wait_until(lambda: any('"zb-h1"' in plan for plan in three.launches()), limit_s=60)
    three.tell_worker()
    os.kill(stopped.pid, signal.SIGSTOP)
    (said,) = end([three.start("--resume", "--takeover-after", "4")])
    assert f"(process {stopped.pid} on" in said
    assert "is measured again" in said
    os.kill(stopped.pid, signal.SIGCONT)
    end([stopped])
    assert every_plan_has_one_row_with_a_trial(three, 3)
    assert outcomes_in(three.study / "study.db") == 3


def outcomes_in(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        return connection.execute("SELECT COUNT(*) FROM trial_user_attributes WHERE key = 'outcome'").fetchone()[0]


def test_a_search_waits_for_the_plans_of_others_and_measures_the_one_of_a_dead_one(three: Bench) -> None:
    three.tell_worker({"when": {"schedule": "zb-h1"}, "do": "sleep"})
    first = three.start()
    wait_until(lambda: len(three.launches()) == 3, limit_s=60)
    second = three.start("--resume")
    wait_until(lambda: len(registered(three.study / "study.db")) == 2, limit_s=60)
    assert second.poll() is None
    three.tell_worker()
    first.kill()
    end([second])
    assert launched(three).most_common(1)[0][1] == 2
    assert every_plan_has_one_row_with_a_trial(three, 3)
    assert registered(three.study / "study.db") == []


def registered(database: Path) -> list[int]:
    with sqlite3.connect(database) as connection:
        return [row[0] for row in connection.execute("SELECT pid FROM autotune_tuners")]


def test_a_study_is_neither_deleted_nor_changed_under_a_running_search(three: Bench) -> None:
    three.tell_worker({"do": "sleep"})
    running = three.start()
    wait_until(lambda: len(three.launches()) == 1, limit_s=60)
    who = f"another search \\(process {running.pid}( on .*)?\\) is running"
    with pytest.raises(UserError, match=who):
        three.here(fresh=True)
    three.edit_space("schedule: [1f1b, zb-h1]", "schedule: [1f1b, zb-h1, v-min]")
    with pytest.raises(UserError, match=f"(?s){who}.*search.schedule"):
        three.here(resume=True)
    assert running.poll() is None
