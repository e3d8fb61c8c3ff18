"""Warm ranks run plan after plan, and are trusted only as long as all goes well."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_launcher import make_request, plant_results, wait_until

from autotune.profiling import pool as module
from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.launcher import launch
from autotune.profiling.pool import RankPool
from autotune.profiling.protocol import TrialRequest
from autotune.results.measurement import TrialOutcome
from autotune.schedules import registry
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan

SERVING = Path(__file__).parents[1] / "fakes" / "serving.py"


class Warm:
    """A pool of fake ranks and the trials it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.json"
        self.tell()
        argv = ("{python}", str(SERVING), "--inbox", "{inbox}", "--script", str(self.script))
        self.pool = RankPool(WorkerCommand(("unused",), "none", argv), folder / "logs")
        self.count = 0

    def tell(self, *rules: dict) -> None:
        self.script.write_text(json.dumps(rules))

    def run(
        self, limit_s: float = 60, stop_at: str | None = None, pp: int = 2, hang_s: float | None = None
    ) -> TrialOutcome | None:
        where = self.folder / f"trial-{self.count}"
        self.count += 1
        request = make_request(pp=pp)
        stop = lambda: stop_at is not None and (where / stop_at).exists()  # noqa: E731
        ending = self.pool.run(request, where, limit_s, stop, hang_s)
        return None if ending.kind == "stopped" else assess(request, ending, where)

    def pid(self, trial: int) -> int:
        return int((self.folder / f"trial-{trial}" / "pid-0").read_text())


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Warm]:
    made = Warm(tmp_path)
    yield made
    made.pool.close()
    assert not [pid for trial in range(made.count) if psutil.pid_exists(pid := made.pid(trial))]


def states(*outcomes: TrialOutcome | None) -> list[str]:
    return [outcome.state if outcome else "stopped" for outcome in outcomes]


def test_trials_that_are_ok_share_their_ranks(warm: Warm) -> None:
    assert states(warm.run(), warm.run(), warm.run()) == ["ok", "ok", "ok"]
    assert warm.pid(0) == warm.pid(1) == warm.pid(2)


def test_failed_trial_says_why_and_the_next_gets_new_ranks(warm: Warm) -> None:
    first = warm.run()
    warm.tell({"do": "fail", "rank": 0})
    second = warm.run()
    warm.tell()
    third = warm.run()
    assert states(first, second, third) == ["ok", "failed", "ok"]
    assert second is not None
    assert second.reason == "rank 0 failed first: ValueError: the first cause"
    assert warm.pid(0) == warm.pid(1) != warm.pid(2)


def test_reports_of_another_request_are_not_taken_for_those_of_warm_ranks(warm: Warm) -> None:
    warm.run()
    where = warm.folder / "trial-1"
    warm.tell({"do": "sleep"})
    plant_results(where, make_request())
    early = warm.run(limit_s=1.0)
    assert early is not None
    assert early.state == "timeout"
    # also where they appear while the trial runs
    warm.tell({"do": "other"})
    late = warm.run(limit_s=2.0)
    assert late is not None
    assert late.state == "timeout"


def test_rank_that_dies_without_a_word_is_seen_by_its_exit(warm: Warm) -> None:
    warm.run()
    warm.tell({"do": "crash", "rank": 0})
    outcome = warm.run()
    assert outcome is not None
    assert outcome.state == "failed"
    assert "exit code 3 and no report" in outcome.reason
    assert "lost my marbles" in outcome.reason


def test_time_limit_counts_from_the_trial_not_from_the_launch(warm: Warm) -> None:
    warm.tell({"do": "succeed", "sleep_s": 0.2})
    assert states(*(warm.run(limit_s=5) for _ in range(3))) == ["ok", "ok", "ok"]
    warm.tell({"do": "sleep"})
    slow = warm.run(limit_s=0.5)
    assert slow is not None
    assert slow.state == "timeout"
    assert slow.duration_s < 5
    warm.tell()
    assert states(warm.run()) == ["ok"]


def test_hang_counts_while_a_plan_runs_and_not_while_the_ranks_wait_for_one(warm: Warm) -> None:
    first = warm.run()
    second = warm.run(hang_s=2.0)
    time.sleep(2.5)
    third = warm.run(hang_s=2.0)
    assert states(first, second, third) == ["ok", "ok", "ok"]
    assert warm.pid(0) == warm.pid(2)
    warm.tell({"do": "sleep"})
    fourth = warm.run(hang_s=2.0)
    assert fourth is not None
    assert fourth.state == "hang"
    assert "main in sleep (worker.py:" in fourth.reason
    warm.tell()
    assert states(warm.run()) == ["ok"]


def test_stop_request_ends_the_ranks(warm: Warm) -> None:
    warm.run()
    warm.tell({"do": "sleep"})
    assert states(warm.run(stop_at="pid-0")) == ["stopped"]
    wait_until(lambda: not psutil.pid_exists(warm.pid(1)), limit_s=10)


@pytest.mark.parametrize("how", ["killed", "idle for too long"])
def test_ranks_that_ended_while_idle_are_held_against_no_plan(
    warm: Warm, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how != "killed":
        monkeypatch.setattr(module, "_IDLE_LIMIT_S", 0.1)
    warm.run()
    launch = warm.pool._launch
    assert launch is not None
    if how == "killed":
        os.kill(warm.pid(0), signal.SIGKILL)
    wait_until(lambda: launch._process.poll() is not None, limit_s=20)
    assert states(warm.run()) == ["ok"]
    assert warm.pid(0) != warm.pid(1)


def test_another_number_of_ranks_gets_a_launch_of_its_own(warm: Warm) -> None:
    assert states(warm.run(pp=2), warm.run(pp=4)) == ["ok", "ok"]
    assert warm.pid(0) != warm.pid(1)


def test_ranks_are_renewed_after_so_many_trials(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TRIALS", 2)
    for _ in range(3):
        warm.run()
    assert warm.pid(0) == warm.pid(1) != warm.pid(2)


@pytest.mark.ranks
def test_real_ranks_measure_the_same_memory_and_loss_warm_as_alone(tmp_path: Path) -> None:
    model = ModelSpec(4, 64, 4, 4, 16, 128, 128, 32)
    request = make_request(pp=2)

    def other(schedule: str, stages: int, split: tuple[int, ...], mbs: int) -> TrialRequest:
        plan = Plan(2, 1, 1, mbs, 4 // mbs, schedule, stages, split)
        built = registry.build(schedule, 2, 4 // mbs, stages)
        return replace(request, plan=plan, schedule=built, model=model, measured_steps=2)

    wanted = other("zb-v", 2, (1, 1, 1, 1), 1)
    pool = RankPool(DEFAULT_WORKER, tmp_path / "logs")
    try:
        for number, before in enumerate([other("1f1b", 1, (2, 2), 1), other("gpipe", 1, (2, 2), 2)]):
            where = tmp_path / f"before-{number}"
            outcome = assess(before, pool.run(before, where, 120), where)
            assert outcome.state == "ok", outcome.reason
        warm = assess(wanted, pool.run(wanted, tmp_path / "warm", 120), tmp_path / "warm").measurement
        assert {path.name for path in (tmp_path / "logs").rglob("*.beat")} == {"rank-0.beat", "rank-1.beat"}
    finally:
        pool.close()
    alone = assess(wanted, launch(wanted, DEFAULT_WORKER, tmp_path / "alone", 120), tmp_path / "alone").measurement
    assert warm is not None
    assert alone is not None
    assert warm.loss == alone.loss
    assert warm.peak_memory_bytes_per_rank == pytest.approx(alone.peak_memory_bytes_per_rank, rel=0.01)
