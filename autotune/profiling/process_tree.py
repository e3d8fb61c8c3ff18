"""Keep hold of every process a trial starts, and end them all, whatever happens to their parents.

Three nets, each for the death of another process:

* the supervisor of a trial is a *child subreaper*: a process whose parent dies becomes the supervisor's child, even if
  it opened its own session, so the descendants of the supervisor are exactly the processes of the trial;
* a process started with `die_with_parent` gets SIGKILL from the kernel the moment its parent dies;
* every process of a trial carries `MARKER` in its environment, so a tuner can find what a killed supervisor left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = [
    "MARKER",
    "become_subreaper",
    "descendants",
    "die_with_parent",
    "end_all",
    "end_descendants",
    "marked",
    "place",
    "processes_by_mark",
    "reap",
    "started_at",
]

MARKER = "AUTOTUNE_TRIAL_ID"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


def _prctl(option: int, value: int) -> None:
    """prctl(2); only Linux has it, elsewhere the other nets must hold."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Adopt the orphans among this process's descendants, so that none slips away to init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when `parent`, the thread that forked us, ends. Call between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Living processes below `pid` (default: this process), at any depth; zombies don't count."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if _alive(process)]


def marked(value: str) -> list[psutil.Process]:
    """Living processes of this user whose environment has `MARKER` starting with `value`, this process excepted."""
    return [process for mark, found in processes_by_mark().items() if mark.startswith(value) for process in found]


def processes_by_mark() -> dict[str, list[psutil.Process]]:
    """Living processes of this user that carry `MARKER`, by its value; this process excepted."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and _alive(process) and (mark := process.environ().get(MARKER)):
                found.setdefault(mark, []).append(process)
    return found


def end_descendants(grace_s: float) -> int:
    """End all that this process started: SIGTERM, `grace_s` to obey, then SIGKILL until nothing is left.

    Returns how many processes were alive at the call.
    """
    before = descendants()
    end_all(before, grace_s)
    # A process that forks while it is hunted leaves a child behind: hunt until the tree is empty.
    while left := descendants():
        end_all(left, 0.0)
    _bury(1.0)
    return len(before)


def end_all(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """End the given processes and no others: SIGTERM, `grace_s` to obey, then SIGKILL.

    psutil compares the start time before it sends a signal, so a pid that the kernel gave to a stranger meanwhile is
    left alone. SIGKILL also ends a stopped process.
    """
    living = [process for process in processes if _alive(process)]
    if grace_s > 0:
        _signal(living, signal.SIGTERM)
        living = _wait(living, grace_s)
    _signal(living, signal.SIGKILL)
    _wait(living, 5.0)


def _bury(limit_s: float) -> None:
    """Collect the dead descendants as they are handed to us, so that no zombie is left to an init that is none."""
    deadline = time.monotonic() + limit_s
    while reap() or (psutil.Process().children() and time.monotonic() < deadline):
        time.sleep(_POLL_S)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _wait(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """The processes that still live after at most `limit_s`. Polls: most of them are not our children."""
    deadline = time.monotonic() + limit_s
    while (processes := [process for process in processes if _alive(process)]) and time.monotonic() < deadline:
        reap()
        time.sleep(_POLL_S)
    return processes


def reap() -> dict[int, int]:
    """Collect the dead children of this process: pid -> wait status."""
    dead = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            dead[pid] = status
    return dead


def started_at(pid: int) -> str:
    """When a process started, as text that no step of the machine's clock changes: with the pid it names the process.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    if sys.platform != "linux":
        return f"{psutil.Process(pid).create_time():.2f}"
    try:
        # Behind the name, which may hold anything, the twentieth field: clock ticks since boot.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        raise psutil.NoSuchProcess(pid) from None


def place() -> str:
    """Where a pid means something: this machine and its boot, then the namespace of pids (containers have own ones)."""
    boot, namespace = socket.gethostname(), "0"
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot}/{namespace}"


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
