"""What is missing or impossible in reports that say `ok`: exit codes and states alone prove nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autotune.profiling.outcome import NoMeasurement, brief, require_finite_loss, some
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.profiling.virtual_clock import pick_clock

__all__ = ["require_complete"]


def require_complete(request: TrialRequest, reports: Sequence[RankReport], cores: float) -> None:
    """Demand everything that the numbers of a trial are made of.

    Args:
        reports: of every rank, that of rank r at index r.
        cores: cores the ranks shared; decides whether the virtual clock needs its figures.

    Raises:
        NoMeasurement: `non-finite` for a loss that is no number, `invalid` for anything else that is missing or can't
            be.
    """
    for report in reports:
        for loss in report.losses:
            require_finite_loss(loss, f"rank {report.rank} reports a loss of")
    for problem in _problems(request, reports, cores):
        raise NoMeasurement("invalid", problem)


def _problems(request: TrialRequest, reports: Sequence[RankReport], cores: float) -> Iterator[str]:
    for rank, report in enumerate(reports):
        if report.rank != rank:
            yield f"rank-{rank}.json is the report of rank {report.rank}"
        yield from _step_problems(request, report)
        yield from _pass_problems(request, report)
    if not any(report.losses for report in reports):
        yield "no rank reports a loss, so nothing shows that the model was trained"
    yield from _partly(reports, lambda report: bool(report.passes), "timed their passes")
    yield from _partly(reports, lambda report: report.peak_memory_bytes is not None, "measured their memory")
    if pick_clock(request.cluster.device, len(reports), cores, reports) == "virtual":
        for report in reports:
            yield from _clock_problems(request, report)


def _partly(reports: Sequence[RankReport], has: Callable[[RankReport], bool], what: str) -> Iterator[str]:
    some = [report.rank for report in reports if has(report)]
    if some and len(some) != len(reports):
        yield f"only ranks {some} {what}"


def _step_problems(request: TrialRequest, report: RankReport) -> Iterator[str]:
    steps, who = request.measured_steps, f"rank {report.rank}"
    if len(report.step_wall_s) != steps:
        yield f"{who} measured {len(report.step_wall_s)} steps, not {steps}"
    elif not all(map(_is_positive, report.step_wall_s)):
        yield f"{who} reports step times {some(report.step_wall_s)}"
    if report.losses and len(report.losses) != steps:
        yield f"{who} reports the losses of {len(report.losses)} steps, not {steps}"
    if report.optimizer_cpu_s and len(report.optimizer_cpu_s) != steps:
        yield f"{who} timed {len(report.optimizer_cpu_s)} optimizer steps, not {steps}"
    elif not all(map(_is_positive, report.optimizer_cpu_s)):
        yield f"{who} reports times outside of its passes {some(report.optimizer_cpu_s)}"
    peak = report.peak_memory_bytes
    if peak is not None and not (type(peak) is int and peak > 0):
        yield f"{who} reports a peak of {brief(peak)} bytes"


def _pass_problems(request: TrialRequest, report: RankReport) -> Iterator[str]:
    """Passes, if a rank timed them, are those of its schedule in every step."""
    if not report.passes:
        return
    who, steps = f"rank {report.rank}", request.measured_steps
    if len(report.passes) != steps:
        yield f"{who} timed the passes of {len(report.passes)} steps, not {steps}"
    wanted: set[tuple[str, int]] = {
        (item.kind, item.stage) for item in request.schedule.order[_device(request, report)]
    }
    for step in report.passes:
        timed = [(entry.kind, entry.stage) for entry in step]
        for kind, stage in sorted(wanted - set(timed)):
            yield f"{who} did not time pass {kind} of stage {stage}"
        for kind, stage in timed:
            if (kind, stage) not in wanted or timed.count((kind, stage)) > 1:
                yield f"{who} timed pass {kind} of stage {stage}, which its schedule does not have, or twice"
        for entry in step:
            if not (_is_positive(entry.cpu_s) and _is_positive(entry.wall_s)):
                yield (
                    f"{who} reports {entry.cpu_s} s of CPU and {entry.wall_s} s of wall time for pass {entry.kind} "
                    f"of stage {entry.stage}"
                )


def _clock_problems(request: TrialRequest, report: RankReport) -> Iterator[str]:
    """What the virtual clock adds to the passes: time outside of them, and what was sent."""
    plan, who = request.plan, f"rank {report.rank}"
    if not report.optimizer_cpu_s:
        yield f"{who} did not time what is outside of its passes, which the virtual clock needs"
    placed = zip(request.schedule.placement, plan.layer_split, strict=True)
    layers = sum(count for device, count in placed if device == _device(request, report))
    # A device without layers may have nothing to send inside its passes.
    for axis, ranks in (("tp", plan.tp if layers else 1), ("dp", plan.dp)):
        if ranks > 1:
            size = (report.collective_bytes or {}).get(axis, 0)
            calls = (report.collective_calls or {}).get(axis, 0)
            if not (_is_positive(size) and _is_positive(calls)):
                yield f"{who} counted {size} bytes in {calls} collectives over {axis} {ranks}; the clock needs both"


def _device(request: TrialRequest, report: RankReport) -> int:
    """The pipeline device of a rank: pp is the outermost axis of the layout."""
    return report.rank // (request.plan.dp * request.plan.tp)


def _is_positive(value: float) -> bool:
    """Whether it can be a time, or another quantity that is more than nothing."""
    return math.isfinite(value) and value > 0
