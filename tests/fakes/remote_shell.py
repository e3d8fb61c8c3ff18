"""Behaves like ssh to another machine: python remote_shell.py HOST COMMAND...

Runs `sh -c` of its joined arguments in a session of its own, with the few variables of a login there and HOST as
HOSTNAME, passes the streams on, and takes its exit code. When it dies, however, the other side sees its streams close.
The pid of every such client is written to $FAKE_SHELL_PIDS/HOST.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

KEPT = ("PATH", "HOME", "USER", "LANG")


def main() -> int:
    host, words = sys.argv[1], sys.argv[2:]
    if pids := os.environ.get("FAKE_SHELL_PIDS"):
        with open(os.path.join(pids, host), "w") as file:
            file.write(str(os.getpid()))
    if host == "unreachable":
        print("ssh: connect to host unreachable port 22: No route to host", file=sys.stderr)
        return 255
    environ = {name: os.environ[name] for name in KEPT if name in os.environ} | {"HOSTNAME": host}
    print(f"Welcome to {host}!", flush=True)  # as a careless login script does
    there = subprocess.Popen(
        ["/bin/sh", "-c", " ".join(words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        cwd="/",
        start_new_session=True,
    )
    assert there.stdin is not None
    assert there.stdout is not None
    threading.Thread(target=copy, args=(0, there.stdin.fileno(), there.stdin.close), daemon=True).start()
    copy(there.stdout.fileno(), 1, lambda: None)
    return there.wait()


def copy(source: int, target: int, at_end) -> None:
    try:
        while piece := os.read(source, 65536):
            os.write(target, piece)
        at_end()
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
