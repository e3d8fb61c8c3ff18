"""The supervisor of one node's part of a launch: `python -m autotune.profiling.node NODE FD`, FD holding the header.

Started by `autotune.profiling.node_start`. Standard input is its lifeline, as that of the supervisor on the tuner's
machine: when the other end closes it, or says nothing for `SILENCE_S`, it ends its part and itself. What is said over
both streams is in `autotune.profiling.node_words`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.profiling.node_words import SILENCE_S, Lines, fill_tokens, line_of
from autotune.profiling.part import LocalPart, post_file
from autotune.profiling.process_tree import become_subreaper, end_all, processes_by_mark

__all__ = ["free_port", "main"]

_POLL_S = 0.05
_SHORT_GRACE_S = 0.5  # for SIGTERM, when the other end has been silent for long already


class _Head:
    """This node's end of the line to the head."""

    def __init__(self, node: int) -> None:
        self.silent = False
        self.progress = 0
        self._node = node
        self._lines = Lines()
        self._heard_at = time.monotonic()
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def tell(self, event: str, **values: Any) -> None:
        """Say something. Nobody may be there any more."""
        with contextlib.suppress(OSError):
            os.write(1, line_of({"node": self._node, "event": event, **values}))

    def wait_for(self, what: str) -> dict[str, Any] | None:
        """The next message of that kind; None for the end. Others wait until it has come."""
        others: list[dict[str, Any] | None] = []
        while self._hear():
            while not self._messages.empty():
                message = self._messages.get()
                if message is not None and message["do"] == what:
                    for other in others:
                        self._messages.put(other)
                    return message
                others.append(message)
        return None

    def listen(self) -> None:
        """Answer beats from now on, whatever this thread is waiting for: a file system may take its time."""

        def forever() -> None:
            while self._hear():
                pass
            self._messages.put(None)

        threading.Thread(target=forever, daemon=True).start()

    def message(self, wait_s: float) -> dict[str, Any] | None:
        """The next message within `wait_s`: an empty one if there is none, None for the end."""
        try:
            return self._messages.get(timeout=wait_s)
        except queue.Empty:
            return {}

    def _hear(self) -> bool:
        """Wait for what the head says and answer its beats; False at the end of the line."""
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if not readable:
            self.silent = time.monotonic() - self._heard_at > SILENCE_S
            return not self.silent
        piece = os.read(0, 65536)
        if not piece:
            return False
        self._heard_at = time.monotonic()
        for line in self._lines.feed(piece):
            message = json.loads(line)
            if message["do"] == "beat":
                self.tell("beat", n=message["n"], at=time.time(), progress=self.progress)
            else:
                self._messages.put(message)
        return True


def main() -> None:
    """Does what the header says: run a part, prove that the folder is shared, or end what a dead tuner left."""
    node = int(sys.argv[1])
    with os.fdopen(int(sys.argv[2]), encoding="utf-8") as file:
        header = json.load(file)
    become_subreaper()
    head = _Head(node)
    if header["mode"] == "run":
        _run(node, header, head)
    elif header["mode"] == "probe":
        _probe(node, header, head)
    else:
        head.tell("swept", count=_sweep(header["marks"]))
    os._exit(0)  # a broken pipe at interpreter shutdown would only print noise


def _run(node: int, header: dict[str, Any], head: _Head) -> None:
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    head.tell("ready", host=socket.gethostname(), port=free_port() if node == 0 else None)
    if (start := head.wait_for("start")) is None:
        return
    ranks, folder = (
        {f"rank-{rank}" for rank in header["ranks"][node]} | {f"main-{node}" if node else "main"},
        header["folder"],
    )
    names, texts = zip(*os.environ.items(), strict=True)
    environ = dict(zip(names, fill_tokens(texts, node, start["port"]), strict=True))
    command = fill_tokens(header["command"], node, start["port"])
    part = LocalPart(command, folder, log=2, is_ours=ranks.__contains__, environ=environ)
    if (loss := part.start()) is not None:
        head.tell("refused", message=loss.message)
        return
    head.listen()
    failed = False
    while not part.ended() and not stopped:
        message = head.message(_POLL_S)
        if message is None:
            break
        _obey(message, part, head, folder)
        head.progress = part.progress()
        if not failed and part.a_rank_failed():
            failed = True
            head.tell("rank-failed")
    ended_at = time.time()
    part.end(_SHORT_GRACE_S if head.silent else header["grace_s"])
    head.tell("ended", exit_code=part.exit_code, signal=part.signal, at=ended_at, oom_kills=part.oom_kills)


def _obey(message: dict[str, Any], part: LocalPart, head: _Head, folder: str) -> None:
    match message.get("do"):
        case "stacks":
            head.tell("stopped", ranks=part.save_stacks())
        case "progress":
            part.restart_watch()
        case "write":
            post_file(folder, message["name"], message["text"])


def _probe(node: int, header: dict[str, Any], head: _Head) -> None:
    """Read what the head wrote into the folder, write there itself, and tell what runs here in the study's name."""
    folder, token = Path(header["folder"]), header["token"]
    seen, message = False, ""
    try:
        seen = (folder / f"{token}.head").read_text(encoding="utf-8") == token
        (folder / f"{token}.{node}").write_text(f"{token} {node}", encoding="utf-8")
    except OSError as error:
        message = f"{error.strerror}: {error.filename}"
    left = [mark for mark in processes_by_mark() if mark.startswith(header["study"])]
    head.tell("probed", host=socket.gethostname(), seen=seen, message=message, left=left)
    head.wait_for("end")  # until the clocks have been compared


def _sweep(marks: list[str]) -> int:
    """End the processes of these launches."""
    # Whole segments: the part of node 1 isn't that of node 10.
    by_mark = processes_by_mark().items()
    found = [
        p for own, processes in by_mark if any(f"{own}/".startswith(f"{mark}/") for mark in marks) for p in processes
    ]
    end_all(found, grace_s=0.0)
    return len(found)


def free_port() -> int:
    """A port that nobody listens on; another process may take it before the ranks do (state `launcher`)."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
