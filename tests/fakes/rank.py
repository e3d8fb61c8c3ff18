"""A rank that uses nothing of the package: does as its first argument says, once or for every rank. No torch.

python rank.py ACTION [--rank N]    (only rank N does it; the others wait)
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["AUTOTUNE_RANK_FOLDER"])


class OutOfMemoryError(RuntimeError):
    """Named and placed as torch's own."""


OutOfMemoryError.__module__ = "torch"


def out_of_memory() -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def speak_of_memory() -> None:
    raise ValueError("torch.OutOfMemoryError: CUDA out of memory, says the manual")


def allocate() -> None:
    bytearray(1 << 60)


def forever_in_here() -> None:
    while True:
        time.sleep(0.1)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    forever_in_here()


def chatter() -> None:
    for _ in range(40):
        print("still alive", flush=True)
        time.sleep(0.1)


def beat() -> None:
    from autotune.profiling.heartbeat import beat

    for _ in range(40):
        beat()
        time.sleep(0.1)


def helper() -> None:
    """A child of the rank fails, the rank itself doesn't."""
    import subprocess

    subprocess.run([sys.executable, "-c", "raise MemoryError"], check=False)


def take_port() -> None:
    """Fails in its first launch only, as a rank does whose port another process took."""
    port = int(sys.argv[sys.argv.index("--port") + 1])
    (FOLDER / "port").write_text(str(port))
    if not (FOLDER / "launch-1").exists():
        DistNetworkError = type("DistNetworkError", (RuntimeError,), {"__module__": "torch.distributed"})
        raise DistNetworkError(f"The server socket has failed to listen on port {port}: EADDRINUSE")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    (FOLDER / "result.json").write_text('{"step_time_s": 0.5}')


def main() -> None:
    wanted = sys.argv[sys.argv.index("--rank") + 1] if "--rank" in sys.argv else None
    if wanted is not None and os.environ.get("RANK", "0") != wanted:
        forever_in_here()
    globals()[sys.argv[1]]()


if __name__ == "__main__":
    main()
