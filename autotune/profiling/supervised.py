"""The tuner's hand on one launch: a supervisor process, its lifeline and its last word."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from autotune.profiling.command import ELASTIC_LOGS, environment
from autotune.profiling.process_tree import MARKER, end_all, marked, place, started_at
from autotune.profiling.supervisor import Ending, LaunchSpec

__all__ = ["SupervisedLaunch", "end_leftovers", "is_left_behind", "owner_mark"]

_SLACK_S = 20.0  # saving stacks and ending the tree


class SupervisedLaunch:
    """A running launch. Whatever happens to this process, its supervisor ends the tree.

    Args:
        device: decides the environment of the processes.
        owner: marks the processes (see `end_leftovers`).
        env: environment variables of the processes beside ours. They are handed over as such: a command line can be
            read by every user of the machine.
    """

    def __init__(self, spec: LaunchSpec, device: str, owner: str, env: Mapping[str, str] | None = None) -> None:
        self._spec = spec
        self._mark = f"{owner}/{uuid.uuid4().hex}"
        self._answer = b""
        self._ending: Ending | None = None
        self._started_at = time.time()
        self._deadline = self._deadline_after(spec.time_limit_s)
        with open(Path(spec.folder, "launcher.log"), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.profiling.supervisor", spec.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(device, self._mark, env),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lifeline, self._words = self._process.stdin, self._process.stdout

    def limit(self, seconds: float, hang_timeout_s: float | None = None) -> None:
        """Allow `seconds` from now, and so many without progress, instead of what was allowed before."""
        self._deadline = self._deadline_after(seconds)
        with contextlib.suppress(OSError):  # it has ended: `poll` tells
            self._lifeline.write(f"limit {seconds} {hang_timeout_s or 0.0}\n".encode())
            self._lifeline.flush()

    def post(self, name: str, text: str) -> None:
        """Write a file of one line into the launch's folder, where the ranks of every node see it at once."""
        with contextlib.suppress(OSError):
            self._lifeline.write(f"post {name} {text}\n".encode())
            self._lifeline.flush()

    def poll(self, wait_s: float) -> Ending | None:
        """How the launch ended, if it does within `wait_s`; then no process of it is left."""
        if self._ending is None:
            readable, _, _ = select.select([self._words], [], [], wait_s)
            if readable:
                chunk = os.read(self._words.fileno(), 65536)
                self._answer += chunk
                if not chunk:
                    self._finish()
            elif time.monotonic() > self._deadline:  # the supervisor itself hangs, stopped perhaps
                self._process.kill()
                self._finish()
        return self._ending

    def stop(self) -> None:
        """Ask for the end; `poll` tells when it has come."""
        if not self._lifeline.closed:
            with contextlib.suppress(OSError):
                self._lifeline.close()

    def close(self) -> Ending:
        """End the launch, if it hasn't ended, and wait until no process of it is left."""
        self.stop()
        self._deadline = min(self._deadline, self._deadline_after(0.0))
        while (ending := self.poll(0.1)) is None:
            pass
        return ending

    def _deadline_after(self, seconds: float) -> float:
        """When the supervisor must have answered, if the launch may take `seconds` from now."""
        return time.monotonic() + seconds + self._spec.term_grace_s + self._spec.follower_grace_s + _SLACK_S

    def _finish(self) -> None:
        self.stop()
        self._words.close()
        self._process.wait()
        # Nothing unless the supervisor itself was killed.
        end_all(marked(self._mark), grace_s=0.0)
        shutil.rmtree(Path(self._spec.folder, ELASTIC_LOGS), ignore_errors=True)
        try:
            self._ending = Ending(**json.loads(self._answer))
        except (ValueError, TypeError):
            message = f"the supervisor of the trial ended without a word (exit code {self._process.returncode})"
            duration_s = time.time() - self._started_at
            self._ending = Ending("launcher", None, None, self._started_at, duration_s, None, message)


def owner_mark(study: str) -> str:
    """Marks the processes of a study and of the tuner that started them, on whatever machine."""
    return f"{study}/{os.getpid()}/{started_at(os.getpid())}/{_place()}"


def end_leftovers(study: str) -> int:
    """End the processes of `study` whose tuner no longer lives; how many there were."""
    orphans = []
    for process in marked(f"{study}/"):
        with contextlib.suppress(psutil.Error, OSError):
            if is_left_behind(process.environ()[MARKER], study):
                orphans.append(process)
    end_all(orphans, grace_s=0.0)
    return len(orphans)


def is_left_behind(mark: str, study: str) -> bool:
    """Whether a process of `study` with this mark has lost its tuner; one of another place can't be judged."""
    parts = mark.removeprefix(f"{study}/").split("/")
    if len(parts) > 3 and parts[2] != _place():
        return False
    try:
        return started_at(int(parts[0])) != parts[1]
    except (psutil.NoSuchProcess, ValueError, IndexError):
        return True


def _place() -> str:
    return place().replace("/", "+")
