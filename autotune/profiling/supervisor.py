"""The parent of one launch: starts it, limits its time, and leaves no process of it behind.

Run as `python -m autotune.profiling.supervisor SPEC` with SPEC the JSON of `LaunchSpec`. Its standard input is its
lifeline: the tuner holds the other end, so the kernel closes it when the tuner dies, even by SIGKILL, and the
supervisor ends the tree. A line on it is either `limit SECONDS HANG`: a new time limit from now and a new hang timeout
(0 for none), or `post NAME TEXT`: a file for the folder of the launch. It prints one JSON line, the `Ending`, when
everything it started is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from autotune.profiling.crew import Crew, NodePlan
from autotune.profiling.hosts import Hosts
from autotune.profiling.node_words import Lines
from autotune.profiling.part import LocalPart, Part
from autotune.profiling.process_tree import become_subreaper

__all__ = ["Ending", "EndingKind", "LaunchSpec"]

EndingKind = Literal["exited", "timeout", "hang", "stopped", "launcher"]

_POLL_S = 0.05


@dataclass(frozen=True)
class LaunchSpec:
    """One command to supervise.

    Attributes:
        command: the launcher of the ranks (or a worker that starts its own).
        folder: folder of the trial; the launcher's output goes to `launcher.log`, ranks write `rank-N.*`.
        time_limit_s: wall time from start to end.
        hang_timeout_s: time without progress of any rank after which the launch is ended; None for no limit.
        follower_grace_s: once one rank failed, how long the others have to say why they fail too.
        term_grace_s: time between SIGTERM and SIGKILL.
        nodes: where the command runs; None: once, on this machine.
    """

    command: tuple[str, ...]
    folder: str
    time_limit_s: float
    hang_timeout_s: float | None = None
    follower_grace_s: float = 3.0
    term_grace_s: float = 2.0
    nodes: NodePlan | None = None

    def to_json(self) -> str:
        """Text that `from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchSpec:
        """The spec that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        if (nodes := values["nodes"]) is not None:
            hosts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in nodes["hosts"].items()}
            values["nodes"] = NodePlan(**nodes | {"hosts": Hosts(**hosts)})
        return cls(**values | {"command": tuple(values["command"])})


@dataclass(frozen=True)
class Ending:
    """How a launch ended.

    Attributes:
        kind: `exited` by itself or because a rank failed, `timeout`, `hang` when no rank made progress, `stopped` by
            the user or the tuner's death, `launcher` when it could not be started, its supervisor was killed, or a
            node was lost.
        exit_code: of the command; None if it didn't exit by itself.
        signal: that ended the command, if one did that we did not send.
        started_at: UNIX time.
        duration_s: wall time from start to the end of the last process.
        host_oom_kills: processes that the kernel's out-of-memory killer ended meanwhile on the machines of the launch;
            None where the kernel doesn't tell.
        message: what went wrong, for `launcher` and `hang`.
        cut_at: UNIX time at which the supervisor began to end it, or from which on a lost node may have made ranks
            fail; None if it ended by itself.
    """

    kind: EndingKind
    exit_code: int | None
    signal: int | None
    started_at: float
    duration_s: float
    host_oom_kills: int | None = None
    message: str = ""
    cut_at: float | None = None


def supervise(spec: LaunchSpec) -> Ending:
    """Run the command of `spec` to its end and end everything it started."""
    become_subreaper()
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    started_at, started = time.time(), time.monotonic()
    with open(Path(spec.folder, "launcher.log"), "ab") as log:
        part = _part_of(spec, log.fileno())
        loss = part.start()
    cut = _Cut("launcher", loss.message) if loss is not None else _watch(part, spec, started, signals)
    part.end(spec.term_grace_s)
    return Ending(
        "exited" if cut is None else cut.kind,
        part.exit_code,
        part.signal,
        started_at,
        time.monotonic() - started,
        part.oom_kills,
        "" if cut is None else cut.message,
        None if cut is None else cut.at,
    )


@dataclass(frozen=True)
class _Cut:
    """Why a launch is ended."""

    kind: EndingKind
    message: str = ""
    at: float | None = None


def _part_of(spec: LaunchSpec, log: int) -> Part:
    if spec.nodes is None:
        return LocalPart(spec.command, spec.folder, log)
    return Crew(spec.command, spec.folder, spec.nodes, spec.term_grace_s)


def _watch(part: Part, spec: LaunchSpec, started: float, signals: list[int]) -> _Cut | None:
    """Until the launch ends by itself (None), or must be ended.

    Args:
        started: by the monotonic clock.
        signals: that have asked for the end, as they come.
    """
    deadline, hang_timeout_s = started + spec.time_limit_s, spec.hang_timeout_s
    first_failure: float | None = None
    lifeline = _Lifeline()
    while not part.ended():
        now = time.monotonic()
        if (loss := part.loss()) is not None:
            return _Cut("launcher", loss.message, loss.at)
        lines = lifeline.read(_POLL_S)
        if signals or lines is None:
            return _Cut("stopped", at=time.time())
        for word, _, rest in (line.decode().partition(" ") for line in lines):
            if word == "limit":
                limit, hang = map(float, rest.split())
                deadline, hang_timeout_s = now + limit, hang or None
                part.restart_watch()
            else:
                name, _, text = rest.partition(" ")
                part.post(name, text)
        if now > deadline:
            cut_at = time.time()
            part.save_stacks()
            return _Cut("timeout", at=cut_at)
        if hang_timeout_s is not None and (stalled_s := part.stalled_s()) > hang_timeout_s:
            message, cut_at = f"no rank made progress for {stalled_s:.0f} s", time.time()
            if stopped := part.save_stacks():
                message += f"; stopped by a signal: {', '.join(stopped)}"
            return _Cut("hang", message, cut_at)
        if first_failure is None and part.a_rank_failed():
            first_failure = now
        if first_failure is not None and now - first_failure > spec.follower_grace_s:
            return _Cut("exited", at=time.time())
    return None


class _Lifeline:
    """Standard input, whose other end the tuner holds."""

    def __init__(self) -> None:
        self._lines = Lines()

    def read(self, wait_s: float) -> list[bytes] | None:
        """Lines that the tuner wrote; None once it has closed the other end, by will or by its death."""
        readable, _, _ = select.select([0], [], [], wait_s)
        if not readable:
            return []
        piece = os.read(0, 65536)
        return self._lines.feed(piece) if piece else None


def main() -> None:
    ending = supervise(LaunchSpec.from_json(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(asdict(ending)) + "\n")
        sys.stdout.flush()
    # The tuner may be gone: a broken pipe at interpreter shutdown would only print noise.
    os._exit(0)


if __name__ == "__main__":
    main()
