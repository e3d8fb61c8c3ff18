"""A trial spans nodes: where its ranks run, how they meet, and what the nodes are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from nodes import FAKES, HEAD, OTHER, Running, make_request, once_a_node, once_a_rank, read, two_nodes

from autotune.errors import UserError
from autotune.profiling.assess import assess
from autotune.profiling.cause import cause
from autotune.profiling.command import parse_worker
from autotune.profiling.node_check import check_nodes
from autotune.profiling.protocol import RankReport
from autotune.profiling.supervisor import Ending


def test_ranks_run_on_the_nodes_in_the_order_of_their_names(tmp_path: Path) -> None:
    Running(tmp_path, once_a_rank("leave"), make_request(per_node=2), two_nodes(OTHER, HEAD)).finish()
    found = [(tmp_path / f"host-{rank}").read_text() for rank in range(4)]
    assert found == [OTHER, OTHER, HEAD, HEAD]


def test_nodes_meet_at_a_port_of_the_first_one(tmp_path: Path) -> None:
    worker = replace(once_a_node("meet"), env=(("MEET_PORT", "{port}"), ("MEET_HOST", "{master_addr}")))
    outcome = Running(tmp_path, worker, hosts=two_nodes("127.0.0.1", OTHER)).finish()
    assert (outcome.state, outcome.reason) == ("ok", "")
    # The first node is this machine: no remote shell, and its own HOSTNAME.
    assert (tmp_path / "host-1").read_text() == OTHER
    assert "Welcome" not in (tmp_path / "node-0.log").read_text()
    assert "Welcome to 127.0.0.3" in (tmp_path / "node-1.log").read_text()


def test_a_command_that_starts_its_own_ranks_is_started_on_the_first_node_and_told_of_the_others(
    tmp_path: Path,
) -> None:
    command = parse_worker(f"{{python}} {FAKES / 'node_worker.py'} leave --show NODES", "none")
    worker = replace(command, env=(("NODES", "{hosts} {nnodes} {nproc} {master_addr}"),))
    running = Running(tmp_path, worker, make_request(per_node=3))
    running.finish()
    assert (tmp_path / "host-0").read_text() == HEAD
    assert (tmp_path / "show-0").read_text() == f"{HEAD},{OTHER} 2 3 {HEAD}"
    assert not (tmp_path / "node-1.log").exists()


def test_secrets_are_on_no_command_line_and_hosts_keep_what_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SHELL_PIDS", str(tmp_path))
    monkeypatch.setenv("OF_THE_TUNER", "mine")
    worker = replace(once_a_node("sleep", "--show", "TOKEN"), env=(("TOKEN", "s3cret-{node_rank}"),))
    folder = tmp_path / "trial"
    running = Running(folder, worker)
    assert read(folder / "show-1") == "s3cret-1"
    ours = [psutil.Process(running.pid("1")), *psutil.Process().children(recursive=True)]
    assert not [one for one in ours if "s3cret" in " ".join(one.cmdline())]
    assert ours[0].environ()["OF_THE_TUNER"] == "mine"
    assert ours[0].environ()["HOSTNAME"] == OTHER
    assert ours[0].cwd() == str(Path.cwd())
    running.is_stopped = True
    running.finish()


def test_the_first_failure_is_the_cause_whatever_the_clocks_say(tmp_path: Path) -> None:
    """Node 1's clock is an hour slow, and its rank fails half a second after the one of node 0."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, time\n"
        "real = time.time\n"
        f"if os.environ.get('HOSTNAME') == {OTHER!r}:\n"
        "    time.time = lambda: real() - 3600\n"
    )
    worker = replace(once_a_node("fail_in_turn"), env=(("PYTHONPATH", str(slow)),))
    outcome = Running(tmp_path / "trial", worker).finish()
    assert outcome.state == "failed"
    assert outcome.reason.startswith(f"the worker on node {HEAD} failed first")
    told = json.loads((tmp_path / "trial" / "nodes.json").read_text())
    assert [node["name"] for node in told] == [HEAD, OTHER]
    assert told[1]["clock_offset_s"] == pytest.approx(-3600, abs=1)


def test_failures_that_follow_the_loss_of_a_node_are_not_held_against_the_plan(tmp_path: Path) -> None:
    lost = Ending("launcher", None, None, 100.0, 9.0, None, "node b (number 1 of 2) was lost", cut_at=105.0)
    request = make_request()
    nodes = [
        {"name": "a", "ranks": [0], "clock_offset_s": 50.0},
        {"name": "b", "ranks": [1], "clock_offset_s": 0.0},
    ]
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))

    def judged(failed_at: float) -> tuple[str, str]:
        report = RankReport(0, "failed", error="connection closed by peer", failed_at=failed_at)
        found = cause(request, lost, tmp_path, {0: report})
        return found.state, found.reason

    assert judged(155.5) == ("launcher", lost.message)  # 105.5 by our clock
    state, reason = judged(154.0)
    assert (state, reason.partition(":")[0]) == ("failed", "rank 0 on node a failed first")


def test_nodes_are_asked_before_the_first_trial(tmp_path: Path) -> None:
    answers = check_nodes(two_nodes(), tmp_path / "logs", "s1")
    assert [answer.name for answer in answers] == [HEAD, OTHER]
    assert all(abs(answer.clock_offset_s) < 1 for answer in answers)
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unreachable", r"node unreachable can't be reached: .* exit code 255: ssh: .* No route to host"),
        ("broken", r"(?s)node broken can't be reached: .* exit code 127: .*/nowhere/python"),
        ("apart", r"node apart does not share the folder .*: what is written here isn't seen there"),
    ],
)
def test_a_node_that_cannot_take_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.setenv("FAKE_SHELL_FOLDER", str(tmp_path / "logs"))
    with pytest.raises(UserError, match=why):
        check_nodes(two_nodes(HEAD, name), tmp_path / "logs", "s1")


def test_a_node_without_our_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("FAKE_SHELL_FOLDER", str(here))
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match=r"node apart: the folder .*here-apart can't be used here: No such file"):
        check_nodes(two_nodes(HEAD, "apart"), tmp_path / "logs", "s1")


def test_a_node_that_cannot_be_reached_is_a_failed_launch(tmp_path: Path) -> None:
    outcome = Running(tmp_path, once_a_node("sleep"), hosts=two_nodes(HEAD, "unreachable")).finish()
    assert outcome.state == "launcher"
    assert outcome.reason.startswith("node unreachable (number 1 of 2) could not be started")
    assert "No route to host" in outcome.reason


def test_a_port_that_is_taken_is_a_failed_launch(tmp_path: Path) -> None:
    """The first node's launcher can't listen: it ends before it has started a rank."""
    ending = Ending("exited", 1, None, 100.0, 3.0)
    (tmp_path / "node-0.log").write_text("DistNetworkError: The server socket has failed to listen: EADDRINUSE\n")
    outcome = assess(make_request(), ending, tmp_path)
    assert outcome.state == "launcher"
    assert "EADDRINUSE" in outcome.reason


def test_the_users_end_of_a_launch_ends_it_everywhere(tmp_path: Path) -> None:
    running = Running(tmp_path, once_a_node("daemon"))
    for number in (0, 1):
        running.pid(f"daemon-{number}")
    running.is_stopped = True
    running.finish()
    assert running.ending is not None
    assert running.ending.kind == "stopped"
