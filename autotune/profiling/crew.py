"""The parts of a launch on all its nodes, held together: they begin together, and the end of one ends all."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.profiling.hosts import Hosts
from autotune.profiling.node_clients import Client, Event, NodeState, start_clients
from autotune.profiling.node_words import SILENCE_S
from autotune.profiling.part import Loss, look_again, post_file
from autotune.profiling.process_tree import MARKER, end_descendants
from autotune.profiling.rank_files import NODES_FILE, last_lines

__all__ = ["Crew", "NodePlan", "header_of"]

_START_LIMIT_S = 60.0
"""For a remote shell to connect and Python to load from a shared file system."""

_STACKS_S = 4.0
_SHORT_GRACE_S = 0.5
_DOUBT_S = 3.0
"""A node that has been silent for so long is not waited for when all is to end."""
_SWEEP_S = 5.0

# A launcher that a signal killed is noticed a little after its ranks, which die with it, have cut off those elsewhere.
_NOTICED_LATE_S = 1.0


@dataclass(frozen=True)
class NodePlan:
    """Where the parts of a launch run.

    Attributes:
        devices_per_node: ranks of every node.
        is_head_alone: the command is started on the first node only, and reaches the others itself.
    """

    hosts: Hosts
    devices_per_node: int
    is_head_alone: bool = False

    @property
    def indexes(self) -> tuple[int, ...]:
        """Nodes on which the command is started."""
        return (0,) if self.is_head_alone else tuple(range(len(self.hosts.names)))


class Crew:
    """A `Part` of several nodes: what `LocalPart` is for one machine.

    Args:
        command: of a node's part, with the tokens of `node_words`.
        folder: of the launch, which all nodes share.
        grace_s: between SIGTERM and SIGKILL.
    """

    def __init__(self, command: tuple[str, ...], folder: str, plan: NodePlan, grace_s: float) -> None:
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.oom_kills: int | None = None
        self._folder, self._plan, self._command, self._grace_s = folder, plan, command, grace_s
        self._nodes = {index: NodeState(plan.hosts.names[index]) for index in plan.indexes}
        self._clients: list[Client] = []
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._loss: Loss | None = None
        self._is_started = self._is_ending = self._rank_failed = False
        self._stopped: list[str] = []
        self._answered: set[int] = set()
        self._progress: tuple[int, ...] = ()
        self._progressed_at = self._began_at = time.monotonic()

    def start(self) -> Loss | None:
        """Reach out for the nodes; the command is started when all are there."""
        try:
            self._clients = start_clients(
                self._plan.hosts, self._plan.indexes, os.environ, Path(self._folder), self._events
            )
        except OSError as error:
            return Loss(f"cannot start {error.filename!r}: {error.strerror}")
        header = header_of(self._plan.hosts, os.environ, "run") | {
            "folder": self._folder,
            "command": self._command,
            "grace_s": self._grace_s,
            "ranks": [list(ranks) for ranks in self._ranks()],
        }
        for client in self._clients:
            client.begin(header)
        return None

    def ended(self) -> bool:
        """Whether the command has ended on every node, by itself."""
        self._listen()
        return self._loss is None and all(node.end is not None for node in self._nodes.values())

    def loss(self) -> Loss | None:
        """Why a node can't go on, if it isn't for one of its ranks."""
        self._listen()
        return self._loss

    def a_rank_failed(self) -> bool:
        """Whether a rank failed, or the command ended badly, on any node."""
        return self._rank_failed

    def stalled_s(self) -> float:
        """Seconds without progress of any rank on any node. Until the command runs the launcher is at work."""
        progress = tuple(node.progress for node in self._nodes.values())
        if not self._is_started or progress != self._progress:
            self._progress, self._progressed_at = progress, time.monotonic()
        return time.monotonic() - self._progressed_at

    def restart_watch(self) -> None:
        """Count them anew."""
        self._progressed_at = time.monotonic()
        self._send({"do": "progress"})

    def save_stacks(self) -> list[str]:
        """Have the ranks of every node write down where they stand; which of them a signal had stopped."""
        self._answered, deadline = set(), time.monotonic() + _STACKS_S
        self._send({"do": "stacks"})
        while self._awaits_stacks() and time.monotonic() < deadline and self._loss is None:
            time.sleep(0.02)
            self._listen()
        return list(self._stopped)

    def _awaits_stacks(self) -> bool:
        """Whether a node that still runs owes its answer; one that has ended gives none."""
        return any(node.end is None and index not in self._answered for index, node in self._nodes.items())

    def post(self, name: str, text: str) -> None:
        """Write a file of the launch's folder on every node: what another node wrote, a network file system may hide
        for a while."""
        post_file(self._folder, name, text)
        self._send({"do": "write", "name": name, "text": text})

    def end(self, grace_s: float) -> None:
        """End the parts of all nodes, and what stayed behind of one whose supervisor didn't see to it."""
        self._is_ending = True
        for client in self._clients:
            if all(self._is_silent(index) for index in client.nodes):
                client.process.kill()  # it leads nowhere; the node ends by itself, for it hears nothing, too
            client.close()
        deadline = time.monotonic() + grace_s + 2.0
        while time.monotonic() < deadline and any(client.process.poll() is None for client in self._clients):
            time.sleep(0.02)
        self._listen()
        end_descendants(_SHORT_GRACE_S)  # theirs is spent
        left = tuple(index for index, node in self._nodes.items() if node.is_ready and node.end is None)
        if left and MARKER in os.environ:
            _sweep(self._plan.hosts, left, Path(self._folder), os.environ[MARKER])
        self._judge()
        self._note_nodes()
        look_again(self._folder)

    def _ranks(self) -> list[range]:
        per_node = self._plan.devices_per_node
        count = len(self._plan.hosts.names) if self._plan.is_head_alone else 1
        return [range(index * per_node, (index + count) * per_node) for index in self._plan.indexes]

    def _send(self, message: Mapping[str, Any]) -> None:
        for client in self._clients:
            client.send(message)

    def _listen(self) -> None:
        """Take in what was said since, and notice who fell silent."""
        while not self._events.empty():
            self._hear(self._events.get())
        if not self._is_started and all(node.is_ready for node in self._nodes.values()):
            self._is_started = True
            self._send({"do": "start", "port": next(iter(self._nodes.values())).port})
        now = time.monotonic()
        for index, node in self._nodes.items():
            if node.end is not None:
                continue
            if not node.is_ready and now - self._began_at > _START_LIMIT_S:
                self._lose(index, f"could not be started within {_START_LIMIT_S:.0f} s", self._last_lines(index), None)
            elif node.is_ready and (silent_s := now - node.heard_at) > SILENCE_S:
                self._lose(index, f"was lost: it has said nothing for {silent_s:.0f} s", "", node.heard_time)

    def _is_silent(self, index: int) -> bool:
        node = self._nodes[index]
        return node.end is None and node.is_ready and time.monotonic() - node.heard_at > _DOUBT_S

    def _hear(self, event: Event) -> None:
        if event.node is None:
            for index in event.client.nodes:
                if (node := self._nodes[index]).end is None:
                    self._gone(index, node, event)
            return
        if (heard := self._nodes.get(event.node)) is None:
            return
        heard.hear(event)
        match event.event:
            case "refused":
                self._lose(event.node, "can't take part", event.values["message"], None)
            case "rank-failed":
                self._rank_failed = True
            case "stopped":
                self._stopped += event.values["ranks"]
                self._answered.add(event.node)
            case "ended":
                end = event.values
                self._rank_failed |= end["exit_code"] != 0
                if end["exit_code"] is None:
                    at = end["at"] - heard.offset_s - _NOTICED_LATE_S
                    how = "was ended from outside" if end["signal"] is None else _killed_launcher(end["signal"])
                    self._lose(event.node, how, "", at)

    def _gone(self, index: int, node: NodeState, event: Event) -> None:
        """The process that led to a node has ended before the node's part."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = event.client.process.wait(timeout=1.0)
        text = "was lost" if node.is_ready else "could not be started"
        how = f"{event.client.command[0]} ended with exit code {code}"
        detail = ": ".join(filter(None, (how, self._last_lines(index))))
        self._lose(index, text, detail, node.heard_time if node.is_ready else None)

    def _lose(self, index: int, what: str, detail: str, at: float | None) -> None:
        """Only the first loss counts: it is the cause of others."""
        if self._loss is None and not self._is_ending:
            name, count = self._nodes[index].name, len(self._plan.hosts.names)
            text = f"node {name} (number {index} of {count}) {what}"
            self._loss = Loss(f"{text}: {detail}" if detail else text, at)

    def _last_lines(self, index: int) -> str:
        name = "all" if self._plan.hosts.slurm else str(index)
        return last_lines(Path(self._folder, f"node-{name}.log"))

    def _judge(self) -> None:
        """How the whole ended: as the first part that ended badly."""
        ends = [(node.end["at"] - node.offset_s, node.end) for node in self._nodes.values() if node.end is not None]
        kills = [end["oom_kills"] for _, end in ends if end["oom_kills"] is not None]
        self.oom_kills = sum(kills) if kills else None
        if self._loss is not None or len(ends) < len(self._nodes):
            return
        bad = [(at, end) for at, end in ends if end["exit_code"] != 0]
        if all(end["exit_code"] is not None for _, end in ends):
            self.exit_code = min(bad, key=lambda one: one[0])[1]["exit_code"] if bad else 0

    def _note_nodes(self) -> None:
        """Which ranks ran where, and by whose clock they wrote down their times."""
        nodes = [
            {
                "name": node.name,
                "host": node.host,
                "ranks": list(ranks),
                "clock_offset_s": node.offset_s,
                "round_trip_s": node.round_trip_s,
            }
            for node, ranks in zip(self._nodes.values(), self._ranks(), strict=True)
        ]
        post_file(self._folder, NODES_FILE, json.dumps(nodes))


def header_of(hosts: Hosts, environ: Mapping[str, str], mode: str) -> dict[str, Any]:
    """What every header tells: who the nodes are, and the environment and folder of what is started."""
    return {
        "mode": mode,
        "hosts": hosts.names,
        "python": hosts.python,
        "cwd": os.getcwd(),
        "env": dict(environ),
    }


def _killed_launcher(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"lost its launcher to {signal.Signals(number).name}"
    return f"lost its launcher to signal {number}"


def _sweep(hosts: Hosts, indexes: tuple[int, ...], folder: Path, mark: str) -> None:
    """End what a launch left on nodes whose supervisor was killed, if they can still be reached."""
    environ = {name: value for name, value in os.environ.items() if name != MARKER}
    with contextlib.suppress(OSError):
        clients = start_clients(hosts, indexes, environ, folder, queue.SimpleQueue())
        for client in clients:
            marks = [f"{mark}/node-{index}" for index in indexes]
            client.begin(header_of(hosts, environ, "sweep") | {"marks": marks})
        deadline = time.monotonic() + _SWEEP_S
        while time.monotonic() < deadline and any(client.process.poll() is None for client in clients):
            time.sleep(0.02)
        end_descendants(0.0)
