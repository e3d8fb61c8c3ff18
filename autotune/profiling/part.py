"""A command on this machine with everything it starts: the whole of a launch, or one node's part of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from autotune.profiling.process_tree import die_with_parent, end_descendants, reap
from autotune.profiling.untrusted_json import read_object
from autotune.profiling.watch import ProgressWatch, save_stacks, stopped_ranks

__all__ = ["LocalPart", "Loss", "Part", "look_again", "post_file"]


@dataclass(frozen=True)
class Loss:
    """A launch failed for reasons outside of its ranks, at the UNIX time `at` or a little later; None: unknown."""

    message: str
    at: float | None = None


class Part(Protocol):
    """What a supervisor has started.

    Attributes:
        exit_code, signal: how the command ended by itself; None if it didn't.
        oom_kills: processes that the kernels' out-of-memory killers ended meanwhile; None where none tells.
    """

    exit_code: int | None
    signal: int | None
    oom_kills: int | None

    def start(self) -> Loss | None:
        """Start it; why that can't be done."""

    def ended(self) -> bool:
        """Whether it has ended by itself."""

    def loss(self) -> Loss | None:
        """Why it can't go on, if something else than a rank is the cause."""

    def a_rank_failed(self) -> bool:
        """Whether the command of a rank ended, and not well."""

    def stalled_s(self) -> float:
        """Seconds without progress of any rank."""

    def restart_watch(self) -> None:
        """Count them anew."""

    def save_stacks(self) -> list[str]:
        """Have the ranks write down where they stand; which of them a signal had stopped."""

    def post(self, name: str, text: str) -> None:
        """Write a file into the launch's folder, as every node sees it."""

    def end(self, grace_s: float) -> None:
        """End it, with SIGTERM and after `grace_s` SIGKILL, until no process of it is left."""


class LocalPart:
    """A `Part` on this machine: the calling process has become its subreaper.

    Args:
        folder: where ranks write `rank-N.*`.
        log: file descriptor for both streams of the command.
        is_ours: which names of ranks (`rank-3`, `main`) belong to this part; by default all.
        environ: of the command; None: ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        log: int,
        is_ours: Callable[[str], bool] = lambda name: True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.oom_kills: int | None = None
        self._command, self._folder, self._log, self._environ = tuple(command), folder, log, environ
        self._is_ours = is_ours
        self._watch = ProgressWatch(folder, is_ours)
        self._oom_before = _host_oom_kills()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> Loss | None:
        """Start the command."""
        try:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=None if self._environ is None else dict(self._environ),
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            return Loss(f"cannot start {self._command[0]!r}: {error.strerror}")
        return None

    def ended(self) -> bool:
        """Whether the command has ended."""
        assert self._child is not None
        if (status := reap().get(self._child.pid)) is None:
            return False
        self._child.returncode = 0  # reaped; keeps Popen from waiting for a pid that is no longer ours
        self.exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        return True

    def loss(self) -> Loss | None:
        """Nothing: what can go wrong here is an exit of the command or of a rank."""
        return None

    def a_rank_failed(self) -> bool:
        """Whether the command of a rank of this part ended, and not well."""
        for path in Path(self._folder).glob("rank-*.exit.json"):
            if not self._is_ours(path.name.removesuffix(".exit.json")):
                continue
            with contextlib.suppress(OSError, ValueError):
                if read_object(path).get("exit_code") != 0:
                    return True
        return False

    def progress(self) -> int:
        """A number that grows with the progress of this part's ranks."""
        return self._watch.progress()

    def stalled_s(self) -> float:
        """Seconds without progress of any rank."""
        return self._watch.stalled_s()

    def restart_watch(self) -> None:
        """Count them anew."""
        self._watch.restart()

    def save_stacks(self) -> list[str]:
        """Have the ranks write down where they stand; which of them a signal had stopped."""
        stopped = stopped_ranks(self._folder, self._is_ours)
        save_stacks(self._folder, self._is_ours)
        return stopped

    def post(self, name: str, text: str) -> None:
        """Write a file into the launch's folder."""
        post_file(self._folder, name, text)

    def end(self, grace_s: float) -> None:
        """End all that was started."""
        end_descendants(grace_s)
        if self._child is not None:
            self._child.returncode = 0
        after = _host_oom_kills()
        self.oom_kills = None if after is None or self._oom_before is None else after - self._oom_before


def post_file(folder: str, name: str, text: str) -> None:
    """Write `folder/name`, whole or not at all. A full disk makes the ranks wait in vain, until their time is up."""
    path = Path(folder, name)
    temporary = path.with_name(f".{name}.{os.uname().nodename}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def look_again(folder: str | Path) -> None:
    """Have a network file system ask anew what lies in `folder`: it keeps for a while what it knows of a folder, but
    not over a change that is made here."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def _host_oom_kills() -> int | None:
    """Processes that the kernel's out-of-memory killer has ended since boot, by memory cgroup or host (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
