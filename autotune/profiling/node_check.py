"""Before the first trial over nodes: can each be reached, do they share the folder, what is left of a killed search?"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.profiling.command import environment
from autotune.profiling.crew import header_of
from autotune.profiling.hosts import Hosts
from autotune.profiling.node_clients import Client, Event, NodeState, start_clients
from autotune.profiling.part import look_again
from autotune.profiling.process_tree import MARKER
from autotune.profiling.rank_files import last_lines
from autotune.profiling.supervised import is_left_behind

__all__ = ["NodeAnswer", "check_nodes", "end_leftovers"]

_LIMIT_S = 60.0
_CLOCK_S = 0.5
"""Clocks of nodes that differ by more are told: what ranks write down is corrected, what they log isn't."""

_END_S = 3.0


@dataclass(frozen=True)
class NodeAnswer:
    """What a node said of itself.

    Attributes:
        host: by its own name.
        clock_offset_s: what its clock is ahead of ours.
        ended: processes of a killed search that were ended there.
    """

    name: str
    host: str
    clock_offset_s: float
    ended: int = 0


def check_nodes(
    hosts: Hosts, folder: Path, study: str | None, note: Callable[[str], None] = lambda text: None
) -> list[NodeAnswer]:
    """Ask every node, and end what a killed search of `study` left there.

    Args:
        folder: that all nodes must share.
        study: None for one that isn't opened yet.
        note: is told what the user should know.

    Raises:
        UserError: a node can't be reached, or doesn't share the folder; names the node.
    """
    found = _probe(hosts, folder, study)
    ended = _end_marked(hosts, study, found, note)
    answers = [
        NodeAnswer(hosts.names[index], answer["host"], state.offset_s, ended.get(index, 0))
        for index, (state, answer) in sorted(found.items())
    ]
    for one in answers:
        if abs(one.clock_offset_s) > _CLOCK_S:
            note(f"the clock of node {one.name} is {one.clock_offset_s:+.1f} s off; times of failures are corrected")
    return answers


def end_leftovers(hosts: Hosts, folder: Path, study: str, note: Callable[[str], None] = lambda text: None) -> None:
    """End what a killed search of `study` left on the nodes; else as `check_nodes`, which has told the rest."""
    _end_marked(hosts, study, _probe(hosts, folder, study), note)


def _probe(hosts: Hosts, folder: Path, study: str | None) -> dict[int, tuple[NodeState, dict[str, Any]]]:
    """What every node answers. Raises UserError for one that doesn't, or doesn't share the folder."""
    folder = folder.absolute()
    token = f"probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{token}.head").write_text(token, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from error
    try:
        values = {"folder": str(folder), "token": token, "study": f"{study or ''}/"}
        found = _ask(hosts, "probe", "probed", values, needs_clock=True)
        look_again(folder)
        for index, (_, answer) in found.items():
            _require_shared(hosts.names[index], folder, token, index, answer)
    finally:
        for path in folder.glob(f"{token}.*"):
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _require_shared(name: str, folder: Path, token: str, index: int, answer: dict[str, Any]) -> None:
    written = ""
    with contextlib.suppress(OSError):
        written = (folder / f"{token}.{index}").read_text(encoding="utf-8")
    if answer["seen"] and written == f"{token} {index}":
        return
    what = "what is written here isn't seen there" if not answer["seen"] else "what is written there isn't seen here"
    detail = f" ({answer['message']})" if answer["message"] else ""
    raise UserError(
        f"node {name} does not share the folder {folder}: {what}{detail}; --results-dir must lie on a file system that "
        "all nodes share, under the same path"
    )


def _end_marked(
    hosts: Hosts,
    study: str | None,
    found: dict[int, tuple[NodeState, dict[str, Any]]],
    note: Callable[[str], None],
) -> dict[int, int]:
    """How many processes of a killed search were ended on each node."""
    marks = {mark for _, answer in found.values() for mark in answer["left"]}
    left = set() if study is None else {mark for mark in marks if is_left_behind(mark, study)}
    if not left:
        return {}
    swept = _ask(hosts, "sweep", "swept", {"marks": sorted(left)})
    ended = {index: int(answer["count"]) for index, (_, answer) in swept.items()}
    for index, count in sorted(ended.items()):
        if count:
            note(f"ended {count} processes that a killed search had left on node {hosts.names[index]}")
    return ended


def _ask(
    hosts: Hosts, mode: str, event: str, values: dict[str, Any], needs_clock: bool = False
) -> dict[int, tuple[NodeState, dict[str, Any]]]:
    """What every node answers to one header. Raises UserError for one that doesn't."""
    indexes = tuple(range(len(hosts.names)))
    states = {index: NodeState(hosts.names[index]) for index in indexes}
    answers: dict[int, dict[str, Any]] = {}
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    environ = {name: value for name, value in environment("cpu", "").items() if name != MARKER}
    deadline = time.monotonic() + _LIMIT_S
    with tempfile.TemporaryDirectory(prefix="autotune-") as logs:
        clients: list[Client] = []
        try:
            clients = start_clients(hosts, indexes, environ, Path(logs), events)
            for client in clients:
                client.begin(header_of(hosts, environ, mode) | values)
            while len(answers) < len(states) or (needs_clock and any(state.beats < 2 for state in states.values())):
                _take(events, states, answers, event, max(0.0, deadline - time.monotonic()))
        except OSError as error:
            raise UserError(f"cannot start {error.filename!r} to reach the nodes: {error.strerror}") from None
        finally:
            _close(clients)
    return {index: (states[index], answers[index]) for index in indexes}


def _take(
    events: queue.SimpleQueue[Event],
    states: dict[int, NodeState],
    answers: dict[int, dict[str, Any]],
    wanted: str,
    wait_s: float,
) -> None:
    """One event. Raises UserError for a node that is gone before it has answered."""
    try:
        event = events.get(timeout=wait_s)
    except queue.Empty:
        silent = next(index for index in states if index not in answers or states[index].beats < 2)
        raise UserError(f"node {states[silent].name} does not answer within {_LIMIT_S:.0f} s") from None
    if event.node is None:
        for index in event.client.nodes:
            if index not in answers:
                code = event.client.process.wait()
                command = " ".join(event.client.command[:-1])
                raise UserError(
                    f"node {states[index].name} can't be reached: {command} ... ended with exit code {code}: "
                    f"{last_lines(event.client.log) or 'no message'}"
                )
    elif event.event == "refused":
        raise UserError(f"node {states[event.node].name}: {event.values['message']}")
    else:
        states[event.node].hear(event)
        if event.event == wanted:
            answers[event.node] = event.values


def _close(clients: list[Client]) -> None:
    for client in clients:
        client.close()
    deadline = time.monotonic() + _END_S
    for client in clients:
        try:
            client.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            client.process.kill()
            client.process.wait()
