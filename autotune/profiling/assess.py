"""From how a launch ended and what its ranks wrote to the outcome of the trial."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from autotune.profiling.cause import cause
from autotune.profiling.command import DEFAULT_WORKER, RESULT_FILE, WorkerCommand
from autotune.profiling.cores import usable_cores
from autotune.profiling.log_reader import logged_steps, read_logs
from autotune.profiling.outcome import NoMeasurement
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.profiling.rank_files import read_report
from autotune.profiling.result_file import read_result
from autotune.profiling.supervisor import Ending
from autotune.profiling.virtual_clock import pick_clock, replay
from autotune.results.measurement import Measurement, State, TrialOutcome

__all__ = ["assess"]

_REASON_CHARACTERS = 5000


def assess(
    request: TrialRequest,
    ending: Ending,
    folder: Path,
    cores: float | None = None,
    worker: WorkerCommand = DEFAULT_WORKER,
) -> TrialOutcome:
    """The outcome of one trial. It is `ok` only if it has a complete result and the plan kept to its memory.

    Args:
        folder: of the trial, with `rank-N.json`, `rank-N.exit.json`, `rank-N.log` and `launcher.log`.
        cores: cores the ranks shared; None asks the machine.
        worker: what ran the plan; tells how its result is read.
    """
    measurement: Measurement | None = None
    try:
        measurement = _numbers(request, ending, folder, cores, worker)
        state, reason = _within_limit(request, measurement)
    except NoMeasurement as problem:
        state, reason = problem.state, problem.reason
    if len(reason) > _REASON_CHARACTERS:
        reason = reason[:_REASON_CHARACTERS] + "..."
    started = datetime.fromtimestamp(ending.started_at, UTC).isoformat(timespec="seconds")
    return TrialOutcome(state, reason, measurement, started, ending.duration_s)


def _numbers(
    request: TrialRequest, ending: Ending, folder: Path, cores: float | None, worker: WorkerCommand
) -> Measurement:
    """The numbers of a trial by its reader. Raises NoMeasurement."""
    ranks = range(request.plan.devices)
    reports = {rank: report for rank in ranks if (report := read_report(folder, rank)) is not None}
    if worker.reader.kind == "json":
        if len(reports) == len(ranks) and all(report.state == "ok" for report in reports.values()):
            return _judge_reports(request, [reports[rank] for rank in ranks], cores)
        if not reports and (result := read_result(request, folder / RESULT_FILE)) is not None:
            return result
        raise cause(request, ending, folder, reports, worker.shell)
    log = worker.fill_log(request, folder)
    # Lines of a log may all be there when the worker fails at last: then nothing says that its numbers are good.
    if ending.kind == "exited" and ending.exit_code == 0:
        return read_logs(request, worker.reader, folder, log)
    why = cause(request, ending, folder, {}, worker.shell)
    if why.state == "timeout":
        raise NoMeasurement("timeout", f"{why.reason}; {logged_steps(request, worker.reader, folder, log)}")
    raise why


def _within_limit(request: TrialRequest, measurement: Measurement) -> tuple[State, str]:
    """`ok`, or `oom` for a plan that ran with more memory than its devices may use."""
    limit, peak = request.cluster.memory_limit_bytes, measurement.peak_memory_bytes
    if limit is None or peak is None or peak <= limit:
        return "ok", ""
    peaks = measurement.peak_memory_bytes_per_rank or ()
    who = f"rank {peaks.index(peak)}" if len(peaks) == request.plan.devices else "the worker"
    device = f" on {measurement.device}" if measurement.device else ""
    return "oom", f"{who} peaked at {peak} bytes, {peak - limit} bytes over the limit of {limit}{device} (it ran)"


def _judge_reports(request: TrialRequest, reports: Sequence[RankReport], cores: float | None) -> Measurement:
    """Numbers of a trial all of whose ranks say `ok`. Raises NoMeasurement where they are incomplete or impossible."""
    for report in reports:
        for loss in report.losses:
            if not math.isfinite(loss):
                raise NoMeasurement("non-finite", f"rank {report.rank} reports a loss of {loss}")
    if problem := _incomplete(request, reports):
        raise NoMeasurement("invalid", problem)
    try:
        return _measure(request, reports, usable_cores() if cores is None else cores)
    except ValueError as error:
        raise NoMeasurement("invalid", f"the ranks' results don't fit the schedule: {error}") from None


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
                return f"non-finite loss: rank {report.rank} reports a loss of {loss}"
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
