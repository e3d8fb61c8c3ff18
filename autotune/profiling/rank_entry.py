"""Runs one rank's command: own log file, dies with its parent, and its end is written down.

The elastic launcher starts this file for every rank as `python -I -S rank_entry.py [--cwd DIR] [--no-hooks] [--node I
D] FOLDER COMMAND...`; it uses the standard library alone, so it costs some milliseconds. It writes

* `FOLDER/rank-N.log`: what the command printed, both streams;
* `FOLDER/rank-N.exit.json`: how it ended. A rank that a signal killed can't report itself, and the first rank to end
  tells the cause from the consequences.

The command finds FOLDER in AUTOTUNE_RANK_FOLDER and, if it is Python, loads `rank_hooks`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import resource

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_HOOKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_hooks")


def main(
    folder: str,
    command: list[str],
    cwd: str | None = None,
    hooks: bool = True,
    node: int = 0,
    devices_per_node: int = 1,
) -> int:
    """Run `command` as the rank that the environment names; its exit code, or 128 + the signal that ended it.

    Args:
        node: that the command starts the ranks of, if it has none itself; their first one stands for it.
    """
    rank = os.environ.get("RANK", str(node * devices_per_node))
    if node:
        os.environ["AUTOTUNE_MAIN"] = f"main-{node}"
    _die_with_parent(os.getppid())
    log = os.open(os.path.join(folder, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["AUTOTUNE_RANK_FOLDER"] = folder
    if hooks:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_HOOKS, os.environ.get("PYTHONPATH"))))
    own_pid = os.getpid()
    # From before there is a child until it has ended, so that no signal comes too early or too late to be passed on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGCHLD))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # ignored, it would never be waited for
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _exec(command, own_pid, cwd)
    status, usage, asked = _wait(child)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    exit_code = 128 + ended_by if ended_by is not None else os.WEXITSTATUS(status)
    _write(
        os.path.join(folder, f"rank-{rank}.exit.json"),
        {
            "rank": int(rank),
            "exit_code": None if ended_by is not None else exit_code,
            "signal": ended_by,
            "ended_at": time.time(),
            "asked": ended_by in asked,
            "interrupted": signal.SIGINT in asked,
            "peak_rss_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        },
    )
    return exit_code


def _wait(child: int) -> tuple[int, resource.struct_rusage, list[int]]:
    """Pass on every signal until the child ends: its status, what it used, and the signals it was sent."""
    asked: list[int] = []
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage, asked
        number = signal.sigwait((*_FORWARDED, signal.SIGCHLD))
        if number != signal.SIGCHLD:
            asked.append(number)
            os.kill(child, number)  # it may have ended, but until it is waited for it is there


def _exec(command: list[str], parent: int, cwd: str | None) -> None:
    """Become `command`; never returns."""
    _die_with_parent(parent)
    try:
        if cwd is not None:
            os.chdir(cwd)
        os.execvp(command[0], command)
    except OSError as error:
        where = "" if cwd is None else f" in {cwd}"
        print(f"cannot start {command[0]!r}{where}: {error.strerror}", flush=True)
        os._exit(127)


def _die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends (Linux), also if it ended just before."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(137)


def _write(path: str, values: dict[str, object]) -> None:
    """Write JSON so that a reader sees the whole file or none. The trial's verdict must not hang on a full disk."""
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(values, file)
        os.replace(temporary, path)


def _parse(arguments: list[str]) -> int:
    """`main` with what the command line says."""
    cwd, hooks, node, devices = None, True, 0, 1
    while arguments[0].startswith("--"):
        option = arguments.pop(0)
        if option == "--cwd":
            cwd = arguments.pop(0)
        elif option == "--node":
            node, devices = int(arguments.pop(0)), int(arguments.pop(0))
        else:
            hooks = False
    return main(arguments[0], arguments[1:], cwd, hooks, node, devices)


if __name__ == "__main__":
    sys.exit(_parse(sys.argv[1:]))
