"""The head's end of the lines to the nodes: one process a node, or one of Slurm for all, that starts and reaches it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.profiling.hosts import Hosts
from autotune.profiling.node_words import BEAT_S, Lines, line_of
from autotune.profiling.slurm import step_command, step_environment

__all__ = ["Client", "Event", "NodeState", "start_clients"]

_SCRIPT = str(Path(__file__).with_name("node_start.py"))


@dataclass(frozen=True)
class Event:
    """Something that a node said, or that its client ended (`event` is `gone`).

    Attributes:
        node: None for `gone`: it concerns all nodes of the client.
        heard_at: by the monotonic clock; `heard_time` as UNIX time.
    """

    client: Client
    node: int | None
    event: str
    values: dict[str, Any]
    heard_at: float
    heard_time: float


@dataclass
class NodeState:
    """What is known of one node.

    Attributes:
        heard_at: last word, by the monotonic clock; `heard_time` as UNIX time.
        offset_s: what its clock is ahead of ours, by the beat that came back soonest.
    """

    name: str
    host: str = ""
    port: int | None = None
    is_ready: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    heard_time: float = field(default_factory=time.time)
    offset_s: float = 0.0
    round_trip_s: float | None = None
    beats: int = 0
    progress: int = 0
    end: dict[str, Any] | None = None

    def hear(self, event: Event) -> None:
        """Take in what a node said."""
        self.heard_at, self.heard_time = event.heard_at, event.heard_time
        values = event.values
        match event.event:
            case "probed" | "swept":
                self.host = values.get("host", "")
            case "ready":
                self.is_ready, self.host, self.port = True, values["host"], values["port"]
            case "ended":
                self.end = values
            case "beat":
                self.progress, self.beats = values["progress"], self.beats + 1
                # By the beat that came back soonest: the way back can't have taken longer than the whole.
                sent = event.client.sent_at(values["n"])
                if sent is not None and (self.round_trip_s is None or event.heard_time - sent < self.round_trip_s):
                    self.round_trip_s = event.heard_time - sent
                    self.offset_s = values["at"] - (sent + event.heard_time) / 2


class Client:
    """One process that leads to one node or several, with threads that talk to it.

    Args:
        nodes: that it leads to.
        log: file for what it and the nodes' commands print to standard error.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        nodes: tuple[int, ...],
        environ: Mapping[str, str],
        log: Path,
        events: queue.SimpleQueue[Event],
    ) -> None:
        self.nodes, self.log, self.command = nodes, log, command
        self._events = events
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sent: dict[int, float] = {}
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C at the tuner's terminal isn't for it
            )

    def begin(self, header: Mapping[str, Any]) -> None:
        """Send the header and talk from now on."""
        self.send(header)
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Say something to all nodes behind this client."""
        self._outbox.put(line_of(message))

    def beat(self) -> None:
        """Send a beat now: the first one waited for the nodes to start and tells nothing of their clocks."""
        self._outbox.put(b"")

    def close(self) -> None:
        """End the line: the nodes end their parts."""
        self._outbox.put(None)

    def sent_at(self, beat: int) -> float | None:
        """UNIX time at which that beat was sent."""
        return self._sent.get(beat)

    def _write(self) -> None:
        """Send what is to be sent, and a beat every second. A client that reads nothing stops this thread alone."""
        stdin = self.process.stdin
        assert stdin is not None
        number, next_beat = 0, time.monotonic()
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(queue.Empty):
                    line = self._outbox.get(timeout=max(0.0, next_beat - time.monotonic()))
                    if line is None:
                        break
                    if line:
                        stdin.write(line)
                        stdin.flush()
                        continue
                number, next_beat = number + 1, time.monotonic() + BEAT_S
                self._sent[number] = time.time()
                stdin.write(line_of({"do": "beat", "n": number}))
                stdin.flush()
        with contextlib.suppress(OSError):
            stdin.close()

    def _read(self) -> None:
        """Pass on what the nodes say. What isn't a message, such as the greeting of a shell, goes to the log."""
        stdout = self.process.stdout
        assert stdout is not None
        lines = Lines()
        while piece := os.read(stdout.fileno(), 65536):
            for line in lines.feed(piece):
                try:
                    values = json.loads(line)
                    node, event = int(values.pop("node")), str(values.pop("event"))
                except (ValueError, TypeError, KeyError, AttributeError):
                    with contextlib.suppress(OSError), open(self.log, "ab") as file:
                        file.write(line + b"\n")
                    continue
                self._tell(node, event, values)
        self._tell(None, "gone", {})

    def _tell(self, node: int | None, event: str, values: dict[str, Any]) -> None:
        if event in ("ready", "probed"):
            self.beat()
        self._events.put(Event(self, node, event, values, time.monotonic(), time.time()))


def start_clients(
    hosts: Hosts, indexes: tuple[int, ...], environ: Mapping[str, str], folder: Path, events: queue.SimpleQueue[Event]
) -> list[Client]:
    """The processes that lead to the nodes `indexes`, none of which has been told anything yet.

    Raises:
        OSError: one of them can't be started; those before it are ended.
    """
    words = (hosts.python, "-I", "-S", _SCRIPT)
    if hosts.slurm:
        names = tuple(hosts.names[index] for index in indexes)
        return [Client(step_command(names, words), indexes, step_environment(environ), folder / "node-all.log", events)]
    clients: list[Client] = []
    try:
        for index in indexes:
            command = hosts.command_on(index, (*words, str(index)))
            clients.append(Client(command, (index,), environ, folder / f"node-{index}.log", events))
    except OSError:
        for client in clients:
            client.process.kill()
            client.process.wait()
        raise
    return clients
