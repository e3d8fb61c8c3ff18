"""Real processes end in every way there is, and each way gets its state, its rank and the words that help."""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_launcher import make_request, wait_until

from autotune.profiling.assess import assess
from autotune.profiling.attempts import MOST_LAUNCHES, run_trial
from autotune.profiling.command import WorkerCommand
from autotune.profiling.launcher import launch
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import TrialOutcome

RANK = Path(__file__).parents[1] / "fakes" / "rank.py"


def rank_worker(*arguments: str, starter: str = "none") -> WorkerCommand:
    return WorkerCommand(("{python}", str(RANK), *arguments), starter)  # type: ignore[arg-type]


def outcome(
    tmp_path: Path, worker: WorkerCommand, hang_s: float | None = None, limit_s: float = 60, pp: int = 1
) -> TrialOutcome:
    folder, request = tmp_path / "trial", make_request(pp=pp)
    return assess(request, launch(request, worker, folder, limit_s, hang_timeout_s=hang_s), folder, worker=worker)


def test_memory_that_runs_out_is_oom_by_the_type_of_the_error(tmp_path: Path) -> None:
    found = outcome(tmp_path, rank_worker("out_of_memory"))
    assert found.state == "oom"
    assert found.reason.startswith("the worker on cpu ran out of memory:")
    assert "Tried to allocate 2.00 GiB" in found.reason


def test_allocation_that_fails_is_oom_in_any_python(tmp_path: Path) -> None:
    assert outcome(tmp_path, rank_worker("allocate")).state == "oom"


def test_error_that_speaks_of_memory_is_failed(tmp_path: Path) -> None:
    found = outcome(tmp_path, rank_worker("speak_of_memory"))
    assert found.state == "failed"
    assert "ValueError: torch.OutOfMemoryError" in found.reason


def test_rank_and_device_that_ran_out_of_memory_are_named(tmp_path: Path) -> None:
    found = outcome(tmp_path, rank_worker("out_of_memory", "--rank", "1", starter="torchrun"), pp=2)
    assert found.state == "oom"
    assert found.reason.startswith("rank 1 on cpu ran out of memory")


def test_helper_process_that_fails_is_not_the_rank(tmp_path: Path) -> None:
    found = outcome(tmp_path, rank_worker("helper"))
    assert found.state == "no-result"
    assert "exit code 0" in found.reason


def test_without_hooks_a_python_error_is_failed_by_its_exit_code(tmp_path: Path) -> None:
    found = outcome(tmp_path, replace(rank_worker("out_of_memory"), python_hooks=False))
    assert found.state == "failed"
    assert "exit code 1" in found.reason


def test_hooks_leave_a_module_of_their_name_alone(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('the other one')")
    code = "import sitecustomize, sys; print(sitecustomize.__file__); print([p for p in sys.path if 'rank_hooks' in p])"
    worker = WorkerCommand(("{python}", "-c", code), "none", env=(("PYTHONPATH", str(tmp_path / "site")),))
    outcome(tmp_path, worker)
    said, where, left = (tmp_path / "trial" / "rank-0.log").read_text().splitlines()
    assert (said, where, left) == ("the other one", str(tmp_path / "site" / "sitecustomize.py"), "[]")


def test_no_progress_is_hang_with_the_stacks_of_the_ranks(tmp_path: Path) -> None:
    found = outcome(tmp_path, rank_worker("forever_in_here"), hang_s=3.0)
    assert found.state == "hang"
    assert found.reason.startswith("no rank made progress for 3 s; main in forever_in_here (rank.py:")
    assert "in main" in (tmp_path / "trial" / "main.stacks").read_text()


def test_every_rank_saves_its_stacks_and_a_stopped_one_is_named(tmp_path: Path) -> None:
    found = outcome(tmp_path, rank_worker("stop", "--rank", "1", starter="torchrun"), hang_s=6.0, pp=2)
    assert found.state == "hang"
    assert "stopped by a signal: rank-1;" in found.reason
    assert "rank 0 in forever_in_here" in found.reason
    assert "rank 1 in " in found.reason


@pytest.mark.parametrize("action", ["beat", "chatter"])
def test_progress_is_a_beat_or_else_a_growing_log(tmp_path: Path, action: str) -> None:
    assert outcome(tmp_path, rank_worker(action), hang_s=3.0).state == "no-result"


def test_rank_that_beats_no_more_hangs_however_much_it_prints(tmp_path: Path) -> None:
    code = "import os, time; open(os.environ['AUTOTUNE_RANK_FOLDER'] + '/rank-0.beat', 'w')\n"
    code += "while True: print('busy', flush=True); time.sleep(0.1)"
    assert outcome(tmp_path, WorkerCommand(("{python}", "-c", code), "none"), hang_s=1.0).state == "hang"


def test_trial_over_its_time_says_where_the_ranks_stood(tmp_path: Path) -> None:
    found = outcome(tmp_path, rank_worker("forever_in_here"), limit_s=4)
    assert found.state == "timeout"
    assert "main in forever_in_here (rank.py:" in found.reason


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_signal_that_ends_a_rank_is_killed_with_its_name(tmp_path: Path, number: signal.Signals) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    found = outcome(tmp_path, WorkerCommand((sys.executable, "-c", code), "none"))
    assert found.state == "killed"
    assert f"rank 0 was killed by {number.name}" in found.reason
    assert ("memory" in found.reason) == (number == signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_launcher_that_is_killed_leaves_no_rank_and_says_nothing_about_the_plan(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder, request, ranks = tmp_path / "trial", make_request(), []
    worker = rank_worker("forever_in_here", starter="torchrun")

    def kill_launcher() -> None:
        wait_until(lambda: all((folder / f"rank-{rank}.pid").exists() for rank in range(2)))
        below = psutil.Process().children(recursive=True)
        ranks.extend(process for process in below if str(RANK) in process.cmdline()[:2])
        agents = [process for process in below if "torch.distributed.run" in process.cmdline()]
        agents[0].send_signal(number)

    killer = threading.Thread(target=kill_launcher)
    killer.start()
    ending = launch(request, worker, folder, 60)
    killer.join()
    assert len(ranks) == 2
    assert not [process for process in ranks if process.is_running()]
    found = assess(request, ending, folder, worker=worker)
    assert found.state == "launcher", found.reason


def test_signal_under_a_shell_is_known_by_the_shells_exit_code(tmp_path: Path) -> None:
    found = outcome(tmp_path, WorkerCommand(("sh -c 'kill -9 $$'; exit $?",), "none", shell=True))
    assert found.state == "killed"
    assert "SIGKILL" in found.reason


def test_launch_that_fails_is_tried_again_on_another_port_and_its_logs_are_kept(tmp_path: Path) -> None:
    folder, request, worker = tmp_path / "trial", make_request(pp=1), rank_worker("take_port", "--port", "{port}")
    found = run_trial(lambda: launch(request, worker, folder, 60), request, folder, worker)
    assert found is not None
    assert (found.state, found.reason) == ("ok", "")
    assert (folder / "port").read_text() != (folder / "launch-1" / "port").read_text()
    failure = json.loads((folder / "launch-1" / "main.failure.json").read_text())
    assert failure["state"] == "launcher"
    assert not (folder / "launch-2").exists()


def test_launches_that_all_fail_are_a_launcher_row_that_says_so(tmp_path: Path) -> None:
    launches = []

    def run() -> Ending:
        launches.append(1)
        return Ending("exited", 1, None, 0.0, 1.0)

    (tmp_path / "launcher.log").write_text("RendezvousTimeoutError: node 3 never came\n")
    found = run_trial(run, make_request(), tmp_path)
    assert found is not None
    assert len(launches) == MOST_LAUNCHES == 3
    assert found.state == "launcher"
    assert found.reason.startswith("3 launches failed, at last: no rank was started")
    assert "node 3 never came" in (tmp_path / "launch-1" / "launcher.log").read_text()


def test_a_trial_took_the_time_of_all_its_launches_and_began_with_the_first(tmp_path: Path) -> None:
    endings = [Ending("exited", 1, None, 60.0, 5.0), Ending("exited", 1, None, 90.0, 7.0)]
    (tmp_path / "launcher.log").write_text("RendezvousTimeoutError: node 3 never came\n")
    endings.append(Ending("timeout", None, None, 120.0, 11.0))
    launches = iter(endings)
    found = run_trial(lambda: next(launches), make_request(), tmp_path)
    assert found is not None
    assert (found.state, found.duration_s) == ("timeout", 23.0)
    assert found.started == "1970-01-01T00:01:00+00:00"


def test_trial_that_is_stopped_has_no_outcome(tmp_path: Path) -> None:
    assert run_trial(lambda: Ending("stopped", None, None, 0.0, 1.0), make_request(), tmp_path) is None


def test_secrets_of_the_environment_are_in_no_command_line(tmp_path: Path) -> None:
    folder, seen = tmp_path / "trial", []
    worker = replace(rank_worker("forever_in_here"), env=(("TOKEN", "s3cret-value"),))

    def look() -> None:
        wait_until(lambda: (folder / "main.pid").exists())
        ours = psutil.Process().children(recursive=True)
        seen.extend(" ".join(process.cmdline()) for process in ours if process.is_running())

    looker = threading.Thread(target=look)
    looker.start()
    ending = launch(make_request(pp=1), worker, folder, 60, should_stop=lambda: bool(seen))
    looker.join()
    assert ending.kind == "stopped"
    assert any("rank.py" in line for line in seen)
    assert not any("s3cret-value" in line for line in seen)
    assert not any("s3cret-value" in path.read_text() for path in folder.rglob("*") if path.is_file())
