"""Whether the ranks of a launch get on, and where they stand when they don't. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
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

    Args:
        is_ours: which names of ranks (`rank-3`) count; by default all.
    """

    def __init__(self, folder: str, is_ours: Callable[[str], bool] = lambda name: True) -> None:
        self._folder, self._is_ours = Path(folder), is_ours
        self._seen: dict[str, tuple[int, int]] = {}
        self._since = time.monotonic()
        self._progress = 0

    def restart(self) -> None:
        """Begin anew, for ranks that get their next plan."""
        self._since = time.monotonic()

    def progress(self) -> int:
        """How often this watch has seen progress."""
        self.stalled_s()
        return self._progress

    def stalled_s(self) -> float:
        """Seconds since the last progress that this watch has seen, or since it began."""
        now = {}
        for path in self._files("beat") or self._files("log"):
            with contextlib.suppress(OSError):
                status = path.stat()
                now[path.name] = (status.st_mtime_ns, status.st_size)
        if not now or now != self._seen:
            self._seen = now
            self._since = time.monotonic()
            self._progress += 1
        return time.monotonic() - self._since

    def _files(self, kind: str) -> list[Path]:
        return [path for path in self._folder.glob(f"rank-*.{kind}") if self._is_ours(path.stem)]


def save_stacks(folder: str, is_ours: Callable[[str], bool] = lambda name: True) -> None:
    """Have every rank of this process's tree write its stacks to `rank-N.stacks`, waiting at most two seconds.

    Only ranks that loaded `autotune.profiling.rank_hooks` can; a stopped one is let go on for that.
    """
    asked = []
    for name, process in _rank_processes(folder, is_ours).items():
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


def stopped_ranks(folder: str, is_ours: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Ranks whose process is stopped (SIGSTOP, a debugger)."""
    stopped = []
    for name, process in _rank_processes(folder, is_ours).items():
        with contextlib.suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(name)
    return stopped


def _rank_processes(folder: str, is_ours: Callable[[str], bool]) -> dict[str, psutil.Process]:
    """The Python process of every rank, if it is below this process: a pid in a file proves nothing."""
    ours = {process.pid: process for process in descendants()}
    found = {}
    for path in sorted([*Path(folder).glob("rank-*.pid"), *Path(folder).glob("main*.pid")]):
        if not is_ours(path.stem):
            continue
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text(encoding="ascii"))
            if pid in ours and pid != os.getpid():
                found[path.stem] = ours[pid]
    return found
