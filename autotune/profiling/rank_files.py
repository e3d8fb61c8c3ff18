"""What the ranks of a trial left in its folder: reports, exits, failures, logs and stacks."""

from __future__ import annotations

import contextlib
import math
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from autotune.profiling.protocol import RankReport
from autotune.profiling.untrusted_json import read_json, read_object
from autotune.results.text import printable

__all__ = [
    "MAIN",
    "NODES_FILE",
    "RESULT_FILE",
    "RankExit",
    "RankFailure",
    "RankNode",
    "drop_results",
    "last_lines",
    "last_of",
    "read_exit",
    "read_failures",
    "read_nodes",
    "read_report",
    "where_it_stands",
]

NODES_FILE = "nodes.json"
"""Of a trial that spans nodes: which ranks ran where, and what each node's clock was ahead of the tuner's."""

RESULT_FILE = "result.json"
"""The one result of a worker whose ranks write no reports."""

MAIN = -1
"""Rank of a process that has none, such as a launcher or a worker that starts its own ranks; MAIN - i on node i."""

_TAIL_BYTES = 16384
_LINE_CHARACTERS = 2000
# What a rank's files may be unlike, if something else than our code wrote them.
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
_STACKS_BYTES = 1 << 20
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True)
class RankExit:
    """How the command of one rank ended, as its `rank_entry` saw it.

    Attributes:
        ended_at: UNIX time.
        asked: the signal that ended it came by way of its `rank_entry`, as a launcher sends it; False: straight from
            somebody else.
        interrupted: it was sent SIGINT by that way. A Python that is still starting ends with exit code 1 by it.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    ended_at: float
    peak_rss_bytes: int
    asked: bool = True
    interrupted: bool = False

    @property
    def ended_by(self) -> int | None:
        """The signal that ended it; None if it ended by itself."""
        return signal.SIGINT if self.signal is None and self.exit_code != 0 and self.interrupted else self.signal


@dataclass(frozen=True)
class RankNode:
    """The node that a rank ran on, and how many seconds its clock is ahead of the tuner's."""

    name: str
    clock_offset_s: float


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed, in its own words: by its report, or by the hooks of its Python.

    Attributes:
        state: `oom`, `failed` or `launcher`, by the type of the error.
        at: UNIX time; None if the rank doesn't tell.
    """

    rank: int
    state: str
    error: str
    at: float | None
    device: str


def drop_results(folder: Path) -> None:
    """Delete what an earlier launch wrote, so that nothing of it passes for this one's. Raises OSError."""
    for pattern in ("rank-*", "main*", "node-*.log", NODES_FILE, "launcher.log", RESULT_FILE):
        for path in folder.glob(pattern):
            if path.is_symlink() or not path.is_dir():
                path.unlink()


def read_report(folder: Path, rank: int) -> RankReport | None:
    """The report of a rank; None if there is none or it is damaged: half a file is no result."""
    with contextlib.suppress(*_DAMAGED):
        report = RankReport.from_dict(read_object(folder / f"rank-{rank}.json"))
        texts = (report.state, report.request_id, report.error, report.torch, report.device)
        told_when = report.failed_at is None or math.isfinite(report.failed_at)
        if all(isinstance(text, str) for text in texts) and type(report.rank) is int and told_when:
            return report
    return None


def read_exit(folder: Path, rank: int) -> RankExit | None:
    """How a rank's command ended; None if nobody saw it."""
    with contextlib.suppress(*_DAMAGED):
        end = RankExit(**read_object(folder / f"rank-{rank}.exit.json"))
        codes = (end.exit_code, end.signal)
        if all(code is None or type(code) is int for code in codes) and math.isfinite(end.ended_at):
            return end
    return None


def read_failures(folder: Path, reports: dict[int, RankReport]) -> list[RankFailure]:
    """Every failure that a rank wrote down itself. A report goes before what its Python's hooks saw later."""
    told = {
        rank: RankFailure(rank, report.state, report.error, report.failed_at, report.device)
        for rank, report in reports.items()
        if report.state != "ok"
    }
    for path in [*folder.glob("rank-*.failure.json"), *folder.glob("main*.failure.json")]:
        with contextlib.suppress(*_DAMAGED):
            values = read_object(path)
            kind, _, number = path.name.removesuffix(".failure.json").partition("-")
            rank = MAIN - int(number or 0) if kind == "main" else int(number)
            state, error, device = (str(values[key]) for key in ("state", "error", "device"))
            at = float(values["failed_at"])
            if math.isfinite(at):
                told.setdefault(rank, RankFailure(rank, state, error, at, device))
    return list(told.values())


def read_nodes(folder: Path) -> dict[int, RankNode]:
    """Where every rank ran; empty if all ran on the tuner's machine."""
    nodes: dict[int, RankNode] = {}
    with contextlib.suppress(*_DAMAGED):
        for index, values in enumerate(read_json(folder / NODES_FILE)):
            node = RankNode(values["name"], float(values["clock_offset_s"]))
            nodes |= {int(rank): node for rank in (MAIN - index, *values["ranks"])}
    return nodes


def last_lines(path: Path, lines: int = 8) -> str:
    """The last non-empty lines of a log, whatever its size, without colour codes; empty if there are none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return last_of(text, lines)


def last_of(text: str, lines: int = 8) -> str:
    """The last non-empty lines of a text, each of at most 500 characters, fit to be shown."""
    found = [line for line in text.splitlines() if line.strip()][-lines:]
    shown = [printable(line[:_LINE_CHARACTERS]).rstrip()[:500] for line in found]
    return "\n".join(line for line in shown if line)


def where_it_stands(folder: Path, name: str) -> str | None:
    """The innermost frame of the main thread in `NAME.stacks`: `step (training.py:120)`; None if there is none."""
    try:
        with open(folder / f"{name}.stacks", encoding="utf-8", errors="replace") as file:
            text = file.read(_STACKS_BYTES)
    except OSError:
        return None
    # faulthandler lists the main thread last, each thread with its innermost frame first
    _, _, main = text.rpartition("(most recent call first):")
    frame = _FRAME.search(main)
    return f"{frame['name']} ({Path(frame['file']).name}:{frame['line']})" if frame else None
