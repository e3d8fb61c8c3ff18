"""The parent of one launch: starts it, limits its time, and leaves no process of it behind.

Run as `python -m autotune.profiling.supervisor SPEC` with SPEC the JSON of `LaunchSpec`. Its standard input is its
lifeline: the tuner holds the other end, so the kernel closes it when the tuner dies, even by SIGKILL, and the
supervisor ends the tree. A line on it, two numbers, is a new time limit in seconds from now and a new hang timeout (0
for none). It prints one JSON line, the `Ending`, when everything it started is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

from autotune.profiling.process_tree import become_subreaper, die_with_parent, end_descendants, reap
from autotune.profiling.watch import ProgressWatch, save_stacks, stopped_ranks

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
    """

    command: tuple[str, ...]
    folder: str
    time_limit_s: float
    hang_timeout_s: float | None = None
    follower_grace_s: float = 3.0
    term_grace_s: float = 2.0


@dataclass(frozen=True)
class Ending:
    """How a launch ended.

    Attributes:
        kind: `exited` by itself or because a rank failed, `timeout`, `hang` when no rank made progress, `stopped` by
            the user or the tuner's death, `launcher` when it could not be started or its supervisor was killed.
        exit_code: of the command; None if it didn't exit by itself.
        signal: that ended the command, if one did that we did not send.
        started_at: UNIX time.
        duration_s: wall time from start to the end of the last process.
        host_oom_kills: processes that the kernel's out-of-memory killer ended on this machine meanwhile; None where
            the kernel doesn't tell.
        message: what went wrong, for `launcher` and `hang`.
        cut_at: UNIX time at which the supervisor began to end it; None if it ended by itself.
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
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)

    started_at, started, oom_before = time.time(), time.monotonic(), _host_oom_kills()
    kind: EndingKind = "exited"
    status: int | None = None
    message = ""
    with open(Path(spec.folder, "launcher.log"), "ab") as log:
        try:
            child = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            message = f"cannot start {spec.command[0]!r}: {error.strerror}"
            return Ending("launcher", None, None, started_at, time.monotonic() - started, 0, message)
    deadline = started + spec.time_limit_s
    first_failure: float | None = None
    hang_timeout_s, watch = spec.hang_timeout_s, ProgressWatch(spec.folder)
    while True:
        if (status := reap().get(child.pid)) is not None:
            break
        now = time.monotonic()
        lines = _lifeline(_POLL_S)
        if stopped or lines is None:
            kind = "stopped"
            break
        if lines:
            limit, hang = map(float, lines[-1].split())
            deadline, hang_timeout_s = now + limit, hang or None
            watch.restart()
        if now > deadline:
            kind = "timeout"
            save_stacks(spec.folder)
            break
        if hang_timeout_s is not None and (stalled_s := watch.stalled_s()) > hang_timeout_s:
            kind = "hang"
            message = f"no rank made progress for {stalled_s:.0f} s"
            if stopped_names := stopped_ranks(spec.folder):
                message += f"; stopped by a signal: {', '.join(stopped_names)}"
            save_stacks(spec.folder)
            break
        if first_failure is None and _a_rank_failed(spec.folder):
            first_failure = now
        if first_failure is not None and now - first_failure > spec.follower_grace_s:
            break
    cut_at = None if status is not None else time.time()
    end_descendants(spec.term_grace_s)
    child.returncode = 0  # reaped above; keeps Popen from waiting for a pid that is no longer ours
    oom_after = _host_oom_kills()
    return Ending(
        kind,
        os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
        os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
        started_at,
        time.monotonic() - started,
        None if oom_after is None or oom_before is None else oom_after - oom_before,
        message,
        cut_at,
    )


def _lifeline(wait_s: float) -> list[bytes] | None:
    """Lines that the tuner wrote to standard input; None once it has closed the other end, by will or by its death."""
    readable, _, _ = select.select([0], [], [], wait_s)
    if not readable:
        return []
    # A line is far shorter than what a pipe writes in one piece, so none arrives in parts.
    return os.read(0, 4096).splitlines() or None


def _a_rank_failed(folder: str) -> bool:
    for path in Path(folder).glob("rank-*.exit.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8")).get("exit_code") != 0:
                return True
    return False


def _host_oom_kills() -> int | None:
    """Processes that the kernel's out-of-memory killer has ended since boot, by memory cgroup or host (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def main() -> None:
    values = json.loads(sys.argv[1])
    ending = supervise(LaunchSpec(**values | {"command": tuple(values["command"])}))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(asdict(ending)) + "\n")
        sys.stdout.flush()
    # The tuner may be gone: a broken pipe at interpreter shutdown would only print noise.
    os._exit(0)


if __name__ == "__main__":
    main()
