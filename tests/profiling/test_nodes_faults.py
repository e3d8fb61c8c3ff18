"""Whatever ends on whichever node: the trial ends on all of them within 10 s, in the state that tells why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from nodes import OTHER, OWNER, Running, once_a_node, once_a_rank, processes, supervisor_of, two_nodes, wait_until

from autotune.profiling.command import WorkerCommand
from autotune.profiling.node_check import check_nodes
from autotune.profiling.process_tree import MARKER, place, started_at
from autotune.results.measurement import TrialOutcome

LIMIT_S = 10.0
LOST = f"node {OTHER} (number 1 of 2) "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_SHELL_PIDS", str(tmp_path))
    return tmp_path / "trial"


def both_run(running: Running) -> None:
    for number in ("0", "1"):
        running.pid(number)


def shell_of(name: str, folder: Path) -> int:
    """The process that leads to a node, as `ssh` does."""
    return int((folder.parent / f"{name}.pid").read_text())


def end_in_time(running: Running) -> TrialOutcome:
    began = time.monotonic()
    outcome = running.finish()
    assert time.monotonic() - began < LIMIT_S
    return outcome


def test_a_dead_remote_shell_is_a_lost_node(folder: Path) -> None:
    running = Running(folder, once_a_node("daemon"))
    both_run(running)
    running.pid("daemon-1")
    os.kill(shell_of(OTHER, folder), signal.SIGKILL)
    outcome = end_in_time(running)
    assert outcome.state == "launcher"
    assert outcome.reason.startswith(LOST + "was lost")


def test_a_silent_node_is_a_lost_node_and_ends_itself(folder: Path) -> None:
    """Nothing comes through any more, as when a cable is cut: no end of the line is told."""
    running = Running(folder, once_a_node("sleep"))
    both_run(running)
    os.kill(shell_of(OTHER, folder), signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: not psutil.pid_exists(running.pid("1")))
    assert time.monotonic() - began < LIMIT_S
    outcome = end_in_time(running)
    assert (outcome.state, outcome.reason[: len(LOST)]) == ("launcher", LOST)
    assert "was lost: it has said nothing for" in outcome.reason


def test_a_killed_supervisor_of_a_node_leaves_nothing_there(folder: Path) -> None:
    running = Running(folder, once_a_node("daemon", "--on", "1"))
    both_run(running)
    running.pid("daemon-1")
    supervisor_of(running.owner, 1).kill()
    outcome = end_in_time(running)
    assert (outcome.state, outcome.reason[: len(LOST)]) == ("launcher", LOST)


def test_a_killed_launcher_is_not_held_against_the_plan_whatever_the_other_node_says(folder: Path) -> None:
    """Torch's launcher on node 1 dies with its rank; the rank on node 0 then loses its peer and fails."""
    running = Running(folder, once_a_node("fail_after_kill"))
    launcher = psutil.Process(running.pid("1")).parent()
    assert launcher is not None
    launcher.kill()
    outcome = end_in_time(running)
    assert (outcome.state, outcome.reason) == ("launcher", LOST + "lost its launcher to SIGKILL")


def test_a_rank_that_fails_ends_the_trial_on_all_nodes(folder: Path) -> None:
    outcome = end_in_time(Running(folder, once_a_node("fail", "--on", "1")))
    assert outcome.state == "failed"
    assert outcome.reason.startswith(f"the worker on node {OTHER} failed first")
    assert outcome.reason.endswith("ValueError: the fault of 1")


@pytest.mark.parametrize("worker", [once_a_node, pytest.param(once_a_rank, marks=pytest.mark.slow)])
def test_a_killed_rank_is_the_cause_across_nodes(folder: Path, worker: Callable[[str], WorkerCommand]) -> None:
    running = Running(folder, worker("sleep"))
    both_run(running)
    os.kill(running.pid("1"), signal.SIGKILL)
    outcome = end_in_time(running)
    assert outcome.state == "killed"
    assert outcome.reason.startswith(f"rank 1 on node {OTHER} was killed by SIGKILL")


def test_a_stopped_rank_on_another_node_hangs_and_is_named(folder: Path) -> None:
    running = Running(folder, once_a_node("stop", "--on", "1"), hang_s=1.0)
    outcome = end_in_time(running)
    assert outcome.state == "hang"
    assert "stopped by a signal: main-1" in outcome.reason
    assert "rank 0" not in outcome.reason.partition(";")[0]
    assert "main 1 in stop (node_worker.py" in outcome.reason
    assert "main in sleep (node_worker.py" in outcome.reason


def test_a_trial_over_nodes_ends_with_its_time(folder: Path) -> None:
    outcome = end_in_time(Running(folder, once_a_node("sleep"), limit_s=2.0))
    assert outcome.state == "timeout"


TUNER = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from nodes import make_request, once_a_node, two_nodes
from autotune.profiling.launcher import launch
launch(make_request(), once_a_node("daemon"), Path(sys.argv[1]), 600, sys.argv[2], hosts=two_nodes())
"""


def local_supervisor(owner: str) -> psutil.Process:
    words = ["-m", "autotune.profiling.supervisor"]
    return next(one for one in processes(owner) if one.cmdline()[1:3] == words)


@pytest.mark.parametrize("victims", ["tuner", "supervisor", "both"])
def test_nothing_lives_on_any_node_after_a_killed_tuner(folder: Path, victims: str) -> None:
    owner = f"{OWNER}-{victims}"
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(folder), owner])
    try:
        wait_until(lambda: all((folder / f"pid-daemon-{number}").exists() for number in (0, 1)))
        dead: list[Callable[[], None]] = [tuner.kill, local_supervisor(owner).kill]
        for kill in {"tuner": dead[:1], "supervisor": dead[1:], "both": dead}[victims]:
            kill()
        wait_until(lambda: not processes(owner), LIMIT_S)
    finally:
        tuner.kill()
        tuner.wait()


def test_what_a_killed_search_left_on_a_node_is_ended_at_the_next_start(tmp_path: Path) -> None:
    def start(mark: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={MARKER: mark})

    here, ours_here = os.getpid(), place().replace("/", "+")
    ours = start(f"s1/{here}/{started_at(here)}/{ours_here}/x/node-1")
    orphan, elsewhere, foreign = (
        start(f"s1/999999/1/{ours_here}/x/node-1"),
        start("s1/999999/1.00/another-machine/x/node-1"),  # its tuner can't be asked
        start("s2/999999/1.00/x"),
    )
    notes: list[str] = []
    try:
        answers = check_nodes(two_nodes(), tmp_path, "s1", notes.append)
        assert orphan.wait(10) == -signal.SIGKILL
        assert [process.poll() for process in (ours, elsewhere, foreign)] == [None] * 3
        assert sum(answer.ended for answer in answers) >= 1
        assert any("that a killed search had left on node" in text for text in notes)
    finally:
        for process in (ours, orphan, elsewhere, foreign):
            process.kill()
            process.wait()
