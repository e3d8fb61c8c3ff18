"""Whether the ranks of a launch get on, and where they stand when they don't. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from autotune.profiling.process_tree import descendants

__all__ = ["ProgressWatch", "save_stacks", "stopped_ranks"]

_STACKS_S = 2.0
_POLL_S = 0.02


class ProgressWatch:
    """Tells for how long no rank of the launch in `folder` has made progress.

    A rank that touches its `rank-N.beat` tells its progress itself, and then nothing else counts. Of ranks that don't,
    growing logs are progress. Until the first rank has its log the launcher is at work, whose time isn't counted.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._seen: dict[str, tuple[int, int]] = {}
        self._since = time.monotonic()

    def restart(self) -> None:
        """Begin anew, for ranks that get their next plan."""
        self._since = time.monotonic()

    def stalled_s(self) -> float:
        """Seconds since the last progress that this watch has seen, or since it began."""
        now = {}
        for path in list(self._folder.glob("rank-*.beat")) or list(self._folder.glob("rank-*.log")):
            with contextlib.suppress(OSError):
                status = path.stat()
                now[path.name] = (status.st_mtime_ns, status.st_size)
        if not now or now != self._seen:
            self._seen = now
            self._since = time.monotonic()
        return time.monotonic() - self._since


def save_stacks(folder: str) -> None:
    """Have every rank of this process's tree write its stacks to `rank-N.stacks`, waiting at most two seconds.

    Only ranks that loaded `autotune.profiling.rank_hooks` can; a stopped one is let go on for that.
    """
    asked = []
    for name, process in _rank_processes(folder).items():
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGUSR2)
            process.send_signal(signal.SIGCONT)
            asked.append(Path(folder, f"{name}.stacks"))
    deadline = time.monotonic() + _STACKS_S
    sizes: list[int] = []
    while time.monotonic() < deadline:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in asked]
        if all(sizes) and sizes == before:
            return
        time.sleep(_POLL_S)


def stopped_ranks(folder: str) -> list[str]:
    """Ranks whose process is stopped (SIGSTOP, a debugger)."""
    stopped = []
    for name, process in _rank_processes(folder).items():
        with contextlib.suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(name)
    return stopped


def _rank_processes(folder: str) -> dict[str, psutil.Process]:
    """The Python process of every rank, if it is below this process: a pid in a file proves nothing."""
    ours = {process.pid: process for process in descendants()}
    found = {}
    for path in sorted([*Path(folder).glob("rank-*.pid"), *Path(folder).glob("main.pid")]):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text(encoding="ascii"))
            if pid in ours and pid != os.getpid():
                found[path.stem] = ours[pid]
    return found
