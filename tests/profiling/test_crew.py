"""What the head of a launch over nodes makes of the nodes' words; no node is started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotune.profiling import crew as module
from autotune.profiling import node
from autotune.profiling.crew import Crew, NodePlan
from autotune.profiling.hosts import Hosts
from autotune.profiling.node_clients import Client, Event
from autotune.profiling.process_tree import MARKER, processes_by_mark

ENDED = {"exit_code": 0, "signal": None, "at": 0.0, "oom_kills": None}


class Line:
    """In place of the processes that lead to the nodes: node 1 alone answers."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.nodes = crew, (0, 1)
        crew._clients.append(cast(Client, self))

    def says(self, number: int, event: str, **values: Any) -> None:
        now = time.monotonic()
        self.crew._events.put(Event(cast(Client, self), number, event, values, now, time.time()))

    def send(self, message: dict[str, Any]) -> None:
        if message["do"] == "stacks":
            self.says(1, "stopped", ranks=["rank-1"])


def test_stacks_are_not_waited_for_from_a_node_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(("unused",), str(tmp_path), NodePlan(Hosts(("a", "b")), 1), 1.0)
    line, naps = Line(crew), []
    line.says(0, "ended", **ENDED)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=naps.append))
    monkeypatch.setattr(module, "_STACKS_S", 0.5)
    assert crew.save_stacks() == ["rank-1"]
    assert len(naps) <= 2


@pytest.fixture
def parts() -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Processes that stand for the parts of nodes 1 and 12 of one launch."""
    mark, command = f"test-{os.getpid()}/launch", [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    made = {number: subprocess.Popen(command, env=os.environ | {MARKER: f"{mark}/node-{number}"}) for number in (1, 12)}
    while len([found for found in processes_by_mark() if found.startswith(mark)]) < 2:
        time.sleep(0.02)
    yield made
    for process in made.values():
        process.kill()
        process.wait()


def test_a_sweep_of_node_1_spares_nodes_10_to_19(parts: dict[int, subprocess.Popen[bytes]]) -> None:
    assert node._sweep([f"test-{os.getpid()}/launch/node-1"]) == 1
    parts[1].wait(timeout=10)
    assert parts[12].poll() is None
