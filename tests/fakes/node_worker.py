"""A worker for trials over nodes, started once a rank or once a node: python node_worker.py [NODE] ACTION [--on N] ...

Writes pid-N, host-N (the HOSTNAME it finds), words-N and, with --show NAME, the variable's value to show-N, N being the
rank or node; then, if N is the one that --on names (by default every one is), does ACTION. The others sleep. No torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["AUTOTUNE_RANK_FOLDER"])


def write(name: str, text: str) -> None:
    """A file that whoever waits for it finds whole."""
    temporary = FOLDER / f".{name}"
    temporary.write_text(text)
    temporary.rename(FOLDER / name)


def sleep(number: int) -> None:
    while True:
        time.sleep(0.1)


def daemon(number: int) -> None:
    """Leaves a process behind whose parent is gone, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            write(f"pid-daemon-{number}", str(os.getpid()))
            sleep(number)
        os._exit(0)
    sleep(number)


def leave(number: int) -> None:
    """Ends well."""


def fail(number: int) -> None:
    raise ValueError(f"the fault of {number}")


def fail_in_turn(number: int) -> None:
    """Number 0 fails, and each other one half a second after the one before it."""
    deadline = time.monotonic() + 30
    while number and not (FOLDER / f"failed-{number - 1}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5 * bool(number))
    (FOLDER / f"failed-{number}").touch()
    fail(number)


def fail_after_kill(number: int) -> None:
    """Number 0 fails as soon as number 1 is dead, as a rank does that has lost its peer."""
    while number or not (FOLDER / "pid-1").exists():
        time.sleep(0.02)
    peer = int((FOLDER / "pid-1").read_text())
    while os.path.exists(f"/proc/{peer}"):
        time.sleep(0.005)
    fail(number)


def stop(number: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def meet(number: int) -> None:
    """Number 0 waits for number 1 at the port, which it must get; then it writes the one result."""
    port, host = int(os.environ["MEET_PORT"]), os.environ["MEET_HOST"]
    if number == 0:
        with socket.create_server((host, port)) as server:
            server.settimeout(20)
            server.accept()
        (FOLDER / "result.json").write_text(json.dumps({"step_time_s": 0.5}))
        return
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("node", nargs="?", type=int, default=0)
    parser.add_argument("action")
    parser.add_argument("--on", type=int)
    parser.add_argument("--show")
    arguments = parser.parse_args()
    number = int(os.environ.get("RANK", arguments.node))
    found = {"pid": str(os.getpid()), "host": os.environ.get("HOSTNAME", ""), "words": " ".join(sys.argv[1:])}
    if arguments.show:
        found["show"] = os.environ[arguments.show]
    for name, text in found.items():
        write(f"{name}-{number}", text)
    if arguments.on in (None, number):
        globals()[arguments.action](number)
    else:
        sleep(number)


if __name__ == "__main__":
    main()
