"""A launch starts every rank, and nothing of it is alive when it has ended, whatever ended it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autotune.errors import UserError
from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand, parse_worker, started_ranks
from autotune.profiling.launcher import empty_folder, launch, prepare_folder
from autotune.profiling.process_tree import MARKER
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.profiling.supervised import SupervisedLaunch, end_leftovers, owner_mark
from autotune.profiling.supervisor import LaunchSpec
from autotune.schedules import registry
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

FAKE = Path(__file__).parents[1] / "fakes" / "worker.py"
LINK = Link(1e-6, 1e10)


def make_request(pp: int = 2, dp: int = 1) -> TrialRequest:
    plan = Plan(pp, 1, dp, 1, 4, "1f1b", 1, (1,) * pp)
    model = ModelSpec(pp, 8, 2, 2, 4, 8, 16, 4)
    cluster = ClusterSpec(1, pp * dp, "cpu", None, LINK, LINK)
    return TrialRequest(3, plan, registry.build("1f1b", pp, 4, 1), model, cluster, TrainingSpec(4 * dp))


def fake(tmp_path: Path, *rules: dict, starter: str = "torchrun") -> WorkerCommand:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(rules))
    text = f"{{python}} {FAKE} --request {{request}} --out {{out}} --script {script}"
    return parse_worker(text, starter)  # type: ignore[arg-type]


def pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("pid-*") if (text := path.read_text())]


def wait_until(what: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def all_gone(folder: Path) -> bool:
    return not any(alive(pid) for pid in pids(folder))


def alive(pid: int) -> bool:
    try:
        return str(FAKE) in psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "trial"
    for pid in pids(tmp_path / "trial"):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"process {pid} outlived its trial")


def test_every_rank_runs_under_torchs_launcher_with_its_own_log_and_report(tmp_path: Path, folder: Path) -> None:
    request = make_request(pp=2, dp=2)
    ending = launch(request, fake(tmp_path), folder, time_limit_s=60)
    assert (ending.kind, ending.exit_code) == ("exited", 0)
    reports = [RankReport.from_dict(json.loads((folder / f"rank-{r}.json").read_text())) for r in range(4)]
    assert [report.rank for report in reports] == [0, 1, 2, 3]
    assert all((folder / f"rank-{rank}.log").exists() for rank in range(4))
    assert TrialRequest.from_dict(json.loads((folder / "request.json").read_text())) == request
    assert len(set(pids(folder))) == 4


def plant_results(folder: Path, request: TrialRequest) -> None:
    """Complete reports and a result file, as an earlier trial may have left them: fast and good."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(request.plan.devices):
        RankReport(rank, "ok", request.id, step_wall_s=(1e-3,) * 3, losses=(1.0,) * 3, peak_memory_bytes=1).write(
            folder
        )
    (folder / "result.json").write_text('{"step_time_s": 0.001}')


def test_results_of_an_earlier_trial_are_not_those_of_a_launch(tmp_path: Path, folder: Path) -> None:
    request = make_request()
    plant_results(folder, request)
    ending = launch(request, fake(tmp_path, {"do": "silent"}, starter="none"), folder, 60)
    assert assess(request, ending, folder).state == "no-result"


def test_folder_is_emptied_but_links_are_not_followed(tmp_path: Path) -> None:
    study, mine = tmp_path / "study", tmp_path / "mine"
    mine.mkdir()
    (mine / "text").write_text("mine")
    folder = study / "logs" / "trial-0003"
    (folder / "launch-1").mkdir(parents=True)
    (folder / "launch-1" / "rank-0.log").write_text("old")
    (folder / "train.log").write_text("old")
    (folder / "link").symlink_to(mine)
    empty_folder(folder, inside=study)
    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.symlink_to(mine)
    empty_folder(folder, inside=study)
    assert not folder.exists()
    (tmp_path / "other" / "logs").parent.mkdir()
    (tmp_path / "other" / "logs").symlink_to(mine)
    with pytest.raises(UserError, match="lies outside of"):
        empty_folder(tmp_path / "other" / "logs" / "text", inside=tmp_path / "other")
    assert (mine / "text").read_text() == "mine"


def test_request_is_known_by_everything_in_it() -> None:
    request = make_request()
    assert TrialRequest.from_dict(json.loads(json.dumps(request.to_dict()))).id == request.id
    for other in (
        replace(request, trial=4),
        replace(request, model=replace(request.model, vocab=17)),
        replace(request, measured_steps=4),
        make_request(dp=2),
    ):
        assert other.id != request.id


def test_time_limit_ends_stopped_and_deaf_ranks_and_their_daemons(tmp_path: Path, folder: Path) -> None:
    worker = fake(tmp_path, {"do": "sleep", "deaf": True, "daemon": True, "stopped": 1})
    request = make_request()
    prepare_folder(request, folder)
    command = started_ranks(worker.fill(request, folder), worker.starter, 2, folder)
    running = SupervisedLaunch(LaunchSpec(command, str(folder), 60), "cpu", "")
    wait_until(lambda: len(list(folder.glob("pid-daemon-*"))) == 2)
    limited = time.monotonic()
    running.limit(0.1)
    while (ending := running.poll(0.1)) is None:
        pass
    assert ending.kind == "timeout"
    assert time.monotonic() - limited < 10
    assert all_gone(folder)


def test_stop_request_ends_the_tree(tmp_path: Path, folder: Path) -> None:
    worker = fake(tmp_path, {"do": "sleep", "daemon": True}, starter="none")
    ending = launch(make_request(), worker, folder, 60, should_stop=lambda: (folder / "pid-daemon-0").exists())
    assert ending.kind == "stopped"
    assert all_gone(folder)


def test_ranks_die_with_a_tuner_that_is_killed(tmp_path: Path, folder: Path) -> None:
    fake(tmp_path, {"do": "sleep", "deaf": True, "daemon": True, "stopped": 1})
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; import test_launcher as t\n"
        f"t.launch(t.make_request(), t.fake(Path({str(tmp_path)!r}), "
        "{'do': 'sleep', 'deaf': True, 'daemon': True, 'stopped': 1}), "
        f"Path({str(folder)!r}), 60)"
    )
    tuner = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: len(list(folder.glob("pid-daemon-*"))) == 2)
    tuner.kill()
    tuner.wait()
    wait_until(lambda: all_gone(folder), limit_s=10)


def test_ranks_die_with_a_supervisor_that_is_killed(tmp_path: Path, folder: Path) -> None:
    worker = fake(tmp_path, {"do": "sleep", "daemon": True}, starter="none")

    def kill_supervisor() -> None:
        wait_until(lambda: (folder / "pid-daemon-0").exists())
        supervisors = [p for p in psutil.Process().children() if "autotune.profiling.supervisor" in p.cmdline()]
        assert len(supervisors) == 1
        supervisors[0].kill()

    killer = threading.Thread(target=kill_supervisor)
    killer.start()
    ending = launch(make_request(), worker, folder, 60)
    killer.join()
    assert ending.kind == "launcher"
    assert "exit code -9" in ending.message
    assert all_gone(folder)


def test_failing_rank_ends_the_trial_long_before_its_time(tmp_path: Path, folder: Path) -> None:
    ending = launch(make_request(), fake(tmp_path, {"do": "crash", "rank": 1}), folder, time_limit_s=60)
    assert ending.kind == "exited"
    assert ending.duration_s < 30
    assert json.loads((folder / "rank-1.exit.json").read_text())["exit_code"] == 3


def test_command_that_does_not_exist_is_a_failed_rank_not_a_crash(tmp_path: Path, folder: Path) -> None:
    ending = launch(make_request(), WorkerCommand(("/no/such/worker",), "none"), folder, time_limit_s=60)
    assert ending.exit_code == 127
    assert "/no/such/worker" in (folder / "rank-0.log").read_text()


def test_leftovers_of_a_dead_tuner_are_ended_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    def start(mark: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: mark})

    ours, orphan, foreign = start(f"{owner_mark('s1')}/x"), start("s1/999999/1.00/x"), start("s2/999999/1.00/x")
    try:
        assert end_leftovers("s1") == 1
        assert orphan.wait(10) == -signal.SIGKILL
        assert ours.poll() is None
        assert foreign.poll() is None
    finally:
        for process in (ours, orphan, foreign):
            process.kill()
            process.wait()


def test_worker_command_is_filled_without_a_shell(tmp_path: Path) -> None:
    worker = parse_worker("train --pp {pp} --name 'a b; rm -rf /' --json '{\"x\": 1}' {out}", "none")
    command = worker.fill(make_request(), Path("/f"))
    assert command == ("train", "--pp", "2", "--name", "a b; rm -rf /", "--json", '{"x": 1}', "/f")


@pytest.mark.parametrize(("text", "why"), [("", "empty"), ("run 'x", "quotation"), ("run {pq}", "unknown placeholder")])
def test_malformed_worker_commands_are_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse_worker(text).fill(make_request(), Path("/f"))


def test_environment_of_a_job_around_the_tuner_does_not_reach_the_ranks(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    worker = WorkerCommand(("sh", "-c", "env"), "none")
    launch(make_request(), worker, folder, time_limit_s=60)
    seen = (folder / "rank-0.log").read_text().splitlines()
    assert not [line for line in seen if line.startswith(("RANK=", "TORCHELASTIC_"))]
    assert "OMP_NUM_THREADS=1" in seen


def test_default_worker_is_run_by_this_python() -> None:
    assert DEFAULT_WORKER.fill(make_request(), Path("/f"))[0] == sys.executable
