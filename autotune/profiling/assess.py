"""From how a launch ended and what its ranks wrote to the outcome of the trial."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autotune.profiling.cores import usable_cores
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.profiling.supervisor import Ending
from autotune.profiling.virtual_clock import pick_clock, replay
from autotune.results.measurement import Measurement, State, TrialOutcome

__all__ = ["RankExit", "assess", "last_lines"]

_TAIL_BYTES = 16384
_REASON_CHARACTERS = 5000
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class RankExit:
    """How the command of one rank ended, as its `rank_entry` saw it. `ended_at` is UNIX time."""

    rank: int
    exit_code: int | None
    signal: int | None
    ended_at: float
    peak_rss_bytes: int


def assess(request: TrialRequest, ending: Ending, folder: Path, cores: float | None = None) -> TrialOutcome:
    """The outcome of one trial. It is `ok` only if every rank wrote a complete result and the plan kept to its memory.

    Args:
        folder: of the trial, with `rank-N.json`, `rank-N.exit.json`, `rank-N.log` and `launcher.log`.
        cores: cores the ranks shared; None asks the machine.
    """
    ranks = request.plan.devices
    reports = {rank: report for rank in range(ranks) if (report := _read_report(folder, rank)) is not None}
    exits = {rank: end for rank in range(ranks) if (end := _read_exit(folder, rank)) is not None}
    complete = len(reports) == ranks and all(report.state == "ok" for report in reports.values())
    if complete:
        state, reason, measurement = _judge_reports(request, [reports[r] for r in range(ranks)], cores)
    else:
        measurement = None
        state, reason = _cause(request, ending, reports, exits, folder)
    if len(reason) > _REASON_CHARACTERS:
        reason = reason[:_REASON_CHARACTERS] + "..."
    started = datetime.fromtimestamp(ending.started_at, UTC).isoformat(timespec="seconds")
    return TrialOutcome(state, reason, measurement, started, ending.duration_s)


def last_lines(path: Path, lines: int = 8) -> str:
    """The last non-empty lines of a log, whatever its size, without colour codes; empty if there are none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return _last_of(text, lines)


def _last_of(text: str, lines: int = 8) -> str:
    text = _ESCAPES.sub("", text).replace("\x00", "")
    return "\n".join([line.rstrip()[:500] for line in text.splitlines() if line.strip()][-lines:])


def _judge_reports(
    request: TrialRequest, reports: Sequence[RankReport], cores: float | None
) -> tuple[State, str, Measurement | None]:
    """State, reason and numbers of a trial all of whose ranks say `ok`."""
    if problem := _incomplete(request, reports):
        return "invalid", problem, None
    try:
        measurement = _measure(request, reports, usable_cores() if cores is None else cores)
    except ValueError as error:
        return "invalid", f"the ranks' results don't fit the schedule: {error}", None
    limit, peak = request.cluster.memory_limit_bytes, measurement.peak_memory_bytes
    if limit is not None and peak is not None and peak > limit:
        rank = (measurement.peak_memory_bytes_per_rank or ()).index(peak)
        reason = f"rank {rank} peaked at {peak} bytes, {peak - limit} bytes over the limit of {limit} (it ran)"
        return "oom", reason, measurement
    return "ok", "", measurement


def _incomplete(request: TrialRequest, reports: Sequence[RankReport]) -> str | None:
    """What is missing or impossible in reports that say `ok`, or None."""
    steps = request.measured_steps
    for report in reports:
        if report.rank != reports.index(report):
            return f"rank-{reports.index(report)}.json is the report of rank {report.rank}"
        if len(report.step_wall_s) != steps:
            return f"rank {report.rank} measured {len(report.step_wall_s)} steps, not {steps}"
        if not all(math.isfinite(value) and value > 0 for value in report.step_wall_s):
            return f"rank {report.rank} reports step times {list(report.step_wall_s)}"
        if report.passes and len(report.passes) != steps:
            return f"rank {report.rank} timed the passes of {len(report.passes)} steps, not {steps}"
        if report.optimizer_cpu_s and len(report.optimizer_cpu_s) != steps:
            return f"rank {report.rank} timed {len(report.optimizer_cpu_s)} optimizer steps, not {steps}"
        for loss in report.losses:
            if not math.isfinite(loss):
                return f"rank {report.rank} reports a loss of {loss}"
    if not any(report.losses for report in reports):
        return "no rank reports a loss, so nothing shows that the model was trained"
    timed = [report.rank for report in reports if report.passes]
    if timed and len(timed) != len(reports):
        return f"only ranks {timed} timed their passes"
    metered = [report.rank for report in reports if report.peak_memory_bytes is not None]
    if request.measure_memory and metered and len(metered) != len(reports):
        return f"only ranks {metered} measured their memory"
    return None


def _measure(request: TrialRequest, reports: Sequence[RankReport], cores: float) -> Measurement:
    """Numbers of complete reports. A step takes as long as its slowest rank."""
    clock = pick_clock(request.cluster.device, len(reports), cores, reports)
    wall = [max(report.step_wall_s[k] for report in reports) for k in range(request.measured_steps)]
    replayed = replay(request, reports, clock) if all(report.passes for report in reports) else ()
    steps = [step.step_time_s for step in replayed] if clock == "virtual" else wall
    peaks = [report.peak_memory_bytes for report in reports]
    losses = [report.losses for report in reports if report.losses]
    return Measurement(
        clock=clock,
        step_time_s=statistics.median(steps),
        step_time_min_s=min(steps),
        step_time_max_s=max(steps),
        step_time_std_s=statistics.stdev(steps) if len(steps) > 1 else 0.0,
        step_time_wall_s=statistics.median(wall),
        peak_memory_bytes_per_rank=tuple(p for p in peaks if p is not None) if None not in peaks else None,
        bubble_rate=statistics.median(step.bubble_rate for step in replayed) if replayed else None,
        loss=statistics.fmean(values[-1] for values in losses),
        torch=reports[0].torch,
        device=reports[0].device,
    )


def _cause(
    request: TrialRequest,
    ending: Ending,
    reports: dict[int, RankReport],
    exits: dict[int, RankExit],
    folder: Path,
) -> tuple[State, str]:
    """Why a trial has no complete result. The first rank to fail is the cause; the others only lost their peer."""
    first = _first_failure(reports, exits)
    if first is not None:
        rank, by_report = first
        if by_report:
            report = reports[rank]
            state: State = "oom" if report.state == "oom" else "failed"
            what = "ran out of memory" if state == "oom" else "failed first"
            detail = _last_of(report.error) or last_lines(folder / f"rank-{rank}.log")
            return state, f"rank {rank} {what}: {detail}"
        return _silent_death(exits[rank], ending, folder)
    if ending.kind == "timeout":
        return "timeout", _with_lines(
            f"no complete result within {ending.duration_s:.0f} s; {_missing(request, reports)}",
            folder,
            next((r for r in range(request.plan.devices) if r not in reports), 0),
        )
    if ending.kind == "launcher":
        return "failed", ending.message
    if ending.signal is not None:
        return "failed", f"the launcher was killed by {_signal_name(ending.signal)}"
    if exits or ending.exit_code == 0:
        missing = next((r for r in range(request.plan.devices) if r not in reports), 0)
        return "invalid", _with_lines(
            f"the worker ended with exit code {ending.exit_code} but {_missing(request, reports)}", folder, missing
        )
    return "failed", f"the launcher failed with exit code {ending.exit_code}: {last_lines(folder / 'launcher.log')}"


def _first_failure(reports: dict[int, RankReport], exits: dict[int, RankExit]) -> tuple[int, bool] | None:
    """(rank, whether its own report tells) of the earliest failure."""
    failures: list[tuple[float, int, bool]] = []
    for rank, report in reports.items():
        if report.state != "ok":
            at = report.failed_at
            if at is None:
                at = exits[rank].ended_at if rank in exits else math.inf
            failures.append((at, rank, True))
    for rank, end in exits.items():
        # SIGTERM is how a launcher ends the ranks that outlive a failed one.
        if rank not in reports and end.exit_code != 0 and end.signal != signal.SIGTERM:
            failures.append((end.ended_at, rank, False))
    if not failures:
        return None
    _, rank, by_report = min(failures)
    return rank, by_report


def _silent_death(end: RankExit, ending: Ending, folder: Path) -> tuple[State, str]:
    """A rank that ended without a report: by a signal or with an exit code."""
    lines = last_lines(folder / f"rank-{end.rank}.log")
    if end.signal is None:
        return "failed", f"rank {end.rank} failed first, with exit code {end.exit_code} and no report: {lines}"
    how = f"rank {end.rank} was killed by {_signal_name(end.signal)} at {end.peak_rss_bytes} resident bytes"
    if end.signal == signal.SIGKILL and ending.host_oom_kills:
        return "oom", f"{how}: the kernel's out-of-memory killer ended {ending.host_oom_kills} process(es) meanwhile"
    if end.signal == signal.SIGKILL:
        return "failed", f"{how}, not by its launcher; the machine's memory or a batch system may be the cause"
    return "failed", f"{how}: {lines}"


def _missing(request: TrialRequest, reports: dict[int, RankReport]) -> str:
    missing = [str(rank) for rank in range(request.plan.devices) if rank not in reports]
    return f"no result of rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"


def _with_lines(text: str, folder: Path, rank: int) -> str:
    lines = last_lines(folder / f"rank-{rank}.log")
    return f"{text}; last lines of rank {rank}: {lines}" if lines else text


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _read_report(folder: Path, rank: int) -> RankReport | None:
    """The report of a rank; None if there is none or it is damaged: half a file is no result."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return RankReport.from_dict(json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")))
    return None


def _read_exit(folder: Path, rank: int) -> RankExit | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RankExit(**json.loads((folder / f"rank-{rank}.exit.json").read_text(encoding="utf-8")))
    return None
