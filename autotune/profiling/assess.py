"""From how a launch ended and what its ranks wrote to the outcome of the trial."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from autotune.profiling.cause import cause
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.completeness import require_complete
from autotune.profiling.cores import usable_cores
from autotune.profiling.log_reader import logged_steps, read_logs
from autotune.profiling.outcome import NoMeasurement, make_measurement
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.profiling.rank_files import RESULT_FILE, read_report
from autotune.profiling.result_file import read_result, require_no_failure
from autotune.profiling.supervisor import Ending
from autotune.profiling.virtual_clock import pick_clock, replay
from autotune.results.measurement import Measurement, State, TrialOutcome
from autotune.results.text import printable

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
        state, reason = _within_limit(request, measurement, worker)
    except NoMeasurement as problem:
        measurement, state, reason = None, problem.state, problem.reason
    reason = printable(reason)
    if len(reason) > _REASON_CHARACTERS:
        reason = reason[:_REASON_CHARACTERS] + "..."
    started = datetime.fromtimestamp(ending.started_at, UTC).isoformat(timespec="seconds")
    return TrialOutcome(state, reason, measurement, started, ending.duration_s)


def _numbers(
    request: TrialRequest, ending: Ending, folder: Path, cores: float | None, worker: WorkerCommand
) -> Measurement:
    """The numbers of a trial by its reader. Raises NoMeasurement."""
    ranks = range(request.plan.devices)
    found = {rank: report for rank in ranks if (report := read_report(folder, rank)) is not None}
    reports = {rank: report for rank, report in found.items() if _is_of(report, request)}
    if worker.reader.kind == "json":
        if len(reports) == len(ranks) and all(report.state == "ok" for report in reports.values()):
            return _judge_reports(request, [reports[rank] for rank in ranks], cores)
        if not reports and (result := read_result(request, folder / RESULT_FILE)) is not None:
            return result
        if len(reports) < len(found) and ending.kind == "exited" and ending.exit_code == 0:
            rank = next(rank for rank in found if rank not in reports)
            raise NoMeasurement(
                "invalid",
                f"rank-{rank}.json is the report of another request (request_id {found[rank].request_id!r}, "
                f"not {request.id!r}, the id in request.json)",
            )
        raise cause(request, ending, folder, reports, worker.shell)
    # A worker may say how it failed and yet end well: its words go before its numbers.
    require_no_failure(folder / RESULT_FILE)
    failed = {rank: report for rank, report in reports.items() if report.state != "ok"}
    if failed:
        raise cause(request, ending, folder, failed, worker.shell)
    log = worker.fill_log(request, folder)
    # Lines of a log may all be there when the worker fails at last: then nothing says that its numbers are good.
    if ending.kind == "exited" and ending.exit_code == 0:
        return read_logs(request, worker.reader, folder, log)
    why = cause(request, ending, folder, {}, worker.shell)
    if why.state == "timeout":
        raise NoMeasurement("timeout", f"{why.reason}; {logged_steps(request, worker.reader, folder, log)}")
    raise why


def _is_of(report: RankReport, request: TrialRequest) -> bool:
    """Whether a report counts. One that says `ok` must name the request; a failure may come before it could be read."""
    return report.request_id == request.id or (report.state != "ok" and not report.request_id)


def _within_limit(request: TrialRequest, measurement: Measurement, worker: WorkerCommand) -> tuple[State, str]:
    """`ok`, or `oom` for a plan that ran with more memory than its devices may use.

    Raises:
        NoMeasurement: the built-in worker, which measures its memory, did not (`invalid`).
    """
    limit, peak = request.cluster.memory_limit_bytes, measurement.peak_memory_bytes
    if limit is not None and peak is None:
        untold = f"so the memory limit of {limit} bytes was not checked"
        if worker.argv == DEFAULT_WORKER.argv and request.measure_memory:
            raise NoMeasurement("invalid", f"no rank measured its memory, {untold}")
        return "ok", f"the worker tells no memory, {untold}"
    if limit is None or peak is None or peak <= limit:
        return "ok", ""
    peaks = measurement.peak_memory_bytes_per_rank or ()
    who = f"rank {peaks.index(peak)}" if len(peaks) == request.plan.devices else "the worker"
    device = f" on {measurement.device}" if measurement.device else ""
    return "oom", f"{who} peaked at {peak} bytes, {peak - limit} bytes over the limit of {limit}{device} (it ran)"


def _judge_reports(request: TrialRequest, reports: Sequence[RankReport], cores: float | None) -> Measurement:
    """Numbers of a trial all of whose ranks say `ok`. Raises NoMeasurement where they are incomplete or impossible."""
    shared = usable_cores() if cores is None else cores
    try:
        require_complete(request, reports, shared)
        return _measure(request, reports, shared)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # A rank may have written anything: texts for numbers, numbers beyond all bounds.
        raise NoMeasurement("invalid", f"the ranks' results can't be used: {error!r}") from None


def _measure(request: TrialRequest, reports: Sequence[RankReport], cores: float) -> Measurement:
    """Numbers of complete reports. A step takes as long as its slowest rank."""
    clock = pick_clock(request.cluster.device, len(reports), cores, reports)
    wall = [max(report.step_wall_s[k] for report in reports) for k in range(request.measured_steps)]
    replayed = replay(request, reports, clock) if all(report.passes for report in reports) else ()
    peaks = [report.peak_memory_bytes for report in reports]
    return make_measurement(
        [step.step_time_s for step in replayed] if clock == "virtual" else wall,
        clock=clock,
        wall_s=wall,
        peaks=tuple(p for p in peaks if p is not None) if None not in peaks else None,
        bubble_rate=statistics.median(step.bubble_rate for step in replayed) if replayed else None,
        loss=statistics.fmean(report.losses[-1] for report in reports if report.losses),
        torch=reports[0].torch,
        device=reports[0].device,
    )
