"""Behaves like ssh to another machine: python remote_shell.py HOST COMMAND...

Runs `sh -c` of its joined arguments in a session of its own, with the few variables of a login there and HOST as
HOSTNAME, passes the streams on, and takes its exit code. When it dies, the other side sees its streams close.

* $FAKE_SHELL_PIDS names a folder for files HOST.pid, the pid of the client, and HOST.words, its arguments.
* The host `unreachable` is, `broken` has no command of ours, and for `apart` $FAKE_SHELL_FOLDER lies elsewhere.
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
        for name, text in (("pid", str(os.getpid())), ("words", " ".join(words))):
            with open(os.path.join(pids, f"{host}.{name}"), "w") as file:
                file.write(text)
    if host == "unreachable":
        print("ssh: connect to host unreachable port 22: No route to host", file=sys.stderr)
        return 255
    if host == "broken":
        words = ["exec /nowhere/python"]
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
    apart = os.environ.get("FAKE_SHELL_FOLDER", "").encode() if host == "apart" else b""
    threading.Thread(target=copy, args=(0, there.stdin.fileno(), there.stdin.close, apart), daemon=True).start()
    copy(there.stdout.fileno(), 1, lambda: None)
    return there.wait()


def copy(source: int, target: int, at_end, elsewhere: bytes = b"") -> None:
    try:
        while piece := os.read(source, 65536):
            if elsewhere:
                piece = piece.replace(elsewhere, elsewhere + b"-apart")
            while piece:
                piece = piece[os.write(target, piece) :]
        at_end()
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
