"""Why a trial has no complete result: by exit statuses and what the ranks wrote down, never by words in a log."""

from __future__ import annotations

import contextlib
import math
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from autotune.profiling.outcome import NoMeasurement
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.profiling.rank_files import (
    MAIN,
    RankExit,
    RankFailure,
    RankNode,
    last_lines,
    last_of,
    read_exit,
    read_failures,
    read_nodes,
    where_it_stands,
)
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import State

__all__ = ["cause"]

_FRAMES_SHOWN = 4
# Signals that no rank gets because another one failed. SIGABRT isn't one: communication libraries abort.
_NO_CONSEQUENCE = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGINT)
_NOTICED_LATE_S = 1.0
_PYTHON_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class _Trial:
    """Everything known of a trial without a result. Times that ranks wrote down are by the clocks of their nodes."""

    request: TrialRequest
    ending: Ending
    folder: Path
    reports: dict[int, RankReport]
    exits: dict[int, RankExit]
    shell: bool
    nodes: dict[int, RankNode]

    def who(self, rank: int) -> str:
        """`rank 3`, and its node if there are several."""
        node, name = self.nodes.get(rank), "the worker" if rank <= MAIN else f"rank {rank}"
        return name if node is None else f"{name} on node {node.name}"

    def at(self, rank: int, time: float) -> float:
        """By the tuner's clock."""
        node = self.nodes.get(rank)
        return time if node is None else time - node.clock_offset_s


def cause(
    request: TrialRequest, ending: Ending, folder: Path, reports: dict[int, RankReport], shell: bool = False
) -> NoMeasurement:
    """State and reason. The first rank to fail is the cause; the others only lost their peer.

    Args:
        reports: the ranks' reports that are whole.
        shell: a shell ran the worker, so an exit code of 128 + n is the signal n.
    """
    exits = {rank: end for rank in range(request.plan.devices) if (end := read_exit(folder, rank)) is not None}
    trial = _Trial(request, ending, folder, reports, exits, shell, read_nodes(folder))
    first = _first_failure(trial)
    if isinstance(first, RankFailure):
        return NoMeasurement(*_reported(trial, first))
    if first is not None:
        return NoMeasurement(*_silent_death(trial, first))
    if ending.kind == "hang":
        return NoMeasurement("hang", _with_places(trial, ending.message))
    if ending.kind == "timeout":
        text = f"no complete result within {ending.duration_s:.0f} s; {_missing(trial)}"
        return NoMeasurement("timeout", _with_lines(trial, _with_places(trial, text)))
    if ending.kind == "launcher":
        return NoMeasurement("launcher", ending.message)
    if ending.signal is not None:
        return NoMeasurement("launcher", f"the launcher was killed by {_signal_name(ending.signal)}")
    if exits and ending.exit_code != 0 and all(end.signal == signal.SIGTERM for end in exits.values()):
        text = f"the launch was ended from outside by SIGTERM (exit code {ending.exit_code})"
        return NoMeasurement("launcher", text)
    if exits or ending.exit_code == 0:
        text = f"the worker ended with exit code {ending.exit_code} but {_missing(trial)}"
        return NoMeasurement("no-result", _with_lines(trial, text))
    logs = [folder / "launcher.log", *sorted(folder.glob("node-*.log"))]
    lines = next((found for log in logs if (found := last_lines(log))), "")
    return NoMeasurement(
        "launcher", f"no rank was started: the launcher ended with exit code {ending.exit_code}{_told(lines)}"
    )


def _first_failure(trial: _Trial) -> RankFailure | RankExit | None:
    """The earliest failure, by the rank's own words if there are any."""
    failures: list[tuple[float, int, RankFailure | RankExit]] = []
    told = read_failures(trial.folder, trial.reports)
    for failure in told:
        at = failure.at
        if at is None:
            at = trial.exits[failure.rank].ended_at if failure.rank in trial.exits else math.inf
        failures.append((trial.at(failure.rank, at), failure.rank, failure))
    spoke = {failure.rank for failure in told} | set(trial.reports)
    for rank, end in trial.exits.items():
        if rank not in spoke and end.exit_code != 0 and not _ended_by_us(end, trial):
            # Its peers may have written down that they lost it before its end was noticed.
            late_s = _NOTICED_LATE_S if end.ended_by in _NO_CONSEQUENCE else 0.0
            failures.append((trial.at(rank, end.ended_at) - late_s, rank, end))
    if trial.ending.kind == "launcher" and (lost_at := trial.ending.cut_at) is not None:
        failures = [failure for failure in failures if failure[0] < lost_at]  # the others had lost a node
    return min(failures, key=lambda failure: failure[:2])[2] if failures else None


def _ended_by_us(end: RankExit, trial: _Trial) -> bool:
    """SIGTERM is how a launcher ends the ranks that outlive a failed one; the supervisor kills those that are deaf."""
    cut_at = trial.ending.cut_at
    after_the_cut = cut_at is not None and trial.at(end.rank, end.ended_at) >= cut_at
    if end.signal == signal.SIGTERM:
        return end.asked or after_the_cut
    return end.signal == signal.SIGKILL and after_the_cut


def _reported(trial: _Trial, failure: RankFailure) -> tuple[State, str]:
    who = trial.who(failure.rank)
    detail = last_of(failure.error) or last_lines(trial.folder / f"rank-{max(0, failure.rank)}.log")
    if failure.state == "oom":
        device = f" on {failure.device}" if failure.device else ""
        return "oom", f"{who}{device} ran out of memory{_told(detail)}"
    if failure.state == "launcher":
        return "launcher", f"{who} failed for no fault of the plan{_told(detail)}"
    return "failed", f"{who} failed first{_told(detail)}"


def _silent_death(trial: _Trial, end: RankExit) -> tuple[State, str]:
    """A rank that ended without a word: by a signal or with an exit code."""
    lines = last_lines(trial.folder / f"rank-{end.rank}.log")
    number = end.ended_by
    if number is None and trial.shell and end.exit_code is not None and 128 < end.exit_code < 160:
        number = end.exit_code - 128
    if number == signal.SIGTERM and end.signal == number:
        return "launcher", f"{trial.who(end.rank)} was ended from outside by SIGTERM"
    if number is None:
        how = f"{trial.who(end.rank)} failed first, with exit code {end.exit_code} and no report"
        return "failed", f"{how}{_told(lines)}"
    how = f"{trial.who(end.rank)} was killed by {_signal_name(number)} at {end.peak_rss_bytes} resident bytes"
    if number == signal.SIGKILL and (kills := trial.ending.host_oom_kills):
        return "oom", f"{how}: the kernel's out-of-memory killer ended {kills} process(es) meanwhile"
    if number == signal.SIGKILL:
        return "killed", f"{how}, not by its launcher; the machine's memory or a batch system may be the cause"
    return "killed", f"{how}{_told(lines)}"


def _told(lines: str) -> str:
    """How a sentence about a failure goes on. Of a Python traceback the error comes first: often one line is shown."""
    if not lines:
        return "; it printed nothing"
    found = lines.splitlines()
    if not any(line.lstrip().startswith(('File "', "Traceback (")) for line in found):
        return f": {lines}"
    error = next((line for line in reversed(found) if _PYTHON_ERROR.match(line)), found[-1])
    return f": {error}\n{lines}"


def _missing_ranks(trial: _Trial) -> list[int]:
    return [rank for rank in range(trial.request.plan.devices) if rank not in trial.reports]


def _missing(trial: _Trial) -> str:
    missing = _missing_ranks(trial)
    return f"no result of rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _with_lines(trial: _Trial, text: str) -> str:
    rank = next(iter(_missing_ranks(trial)), 0)
    lines = last_lines(trial.folder / f"rank-{rank}.log")
    return f"{text}; last lines of rank {rank}: {lines}" if lines else text


def _with_places(trial: _Trial, text: str) -> str:
    """Where the ranks stood when they were ended, if their stacks were saved."""
    names = [f"rank-{rank}" for rank in range(trial.request.plan.devices)]
    names += ["main", *sorted(path.stem for path in trial.folder.glob("main-*.stacks"))]
    places = [(name, place) for name in names if (place := where_it_stands(trial.folder, name)) is not None]
    if not places:
        return text
    shown = "; ".join(f"{name.replace('-', ' ')} in {place}" for name, place in places[:_FRAMES_SHOWN])
    more = f" and {len(places) - _FRAMES_SHOWN} more" if len(places) > _FRAMES_SHOWN else ""
    return f"{text}; {shown}{more} (stacks: {places[0][0]}.stacks)"


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
