"""What the `schedule` commands take: pass times and latencies in range, pipelines and drawings of a size that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.schedules.simulate import Timeline

__all__ = [
    "LARGEST_TIME",
    "MAX_DRAWN_CELLS",
    "MAX_PASSES",
    "MAX_RATIO",
    "SMALLEST_TIME",
    "check_drawing",
    "check_limit",
    "check_search",
    "check_size",
    "check_times",
    "parse_pass_times",
]

# Sums over millions of passes stay far from where floats overflow or vanish, whatever unit the times are in.
SMALLEST_TIME = 1e-9
LARGEST_TIME = 1e12
# Beyond this the short times are rounding errors of the long ones, and comparisons of schedules mean nothing.
MAX_RATIO = 1e9
# About a minute and 2 GB of memory; 256 devices of two stages with 1024 microbatches stay below.
MAX_PASSES = 2_000_000
# About 1 GB of memory; a schedule of even passes at the limit above has about 6 million.
MAX_DRAWN_CELLS = 10_000_000


def parse_pass_times(text: str) -> tuple[float, float, float]:
    """`1,1.5,0.6` as the times of F, B and W.

    Raises:
        UserError: not three numbers from 0 up, all of them 0, or one too small or too large to calculate with.
    """
    try:
        times = tuple(float(part) for part in text.split(","))
    except ValueError:
        times = ()
    if len(times) != 3 or not all(0 <= time < float("inf") for time in times) or sum(times) == 0:
        raise UserError(f"--pass-times must be three numbers F,B,W from 0 up, such as 1,1,1, not {text!r}")
    for time in times:
        _check_time("--pass-times", time)
    return times[0], times[1], times[2]


def check_times(times: tuple[float, float, float], comm: float) -> None:
    """Refuse a latency that can't be calculated with, and times that are too unequal.

    Raises:
        UserError: the latency is no number from 0 up, too small or too large; or one is a billion times another.
    """
    if not 0 <= comm < float("inf"):
        raise UserError(f"--comm must be a number from 0 up, not {comm}")
    _check_time("--comm", comm)
    given = [time for time in (*times, comm) if time]
    if max(given) > MAX_RATIO * min(given):
        raise UserError(
            f"--pass-times and --comm range from {min(given):g} to {max(given):g}: none may be more than "
            f"{MAX_RATIO:g} times another, unless it is 0"
        )


def _check_time(option: str, time: float) -> None:
    if time and not SMALLEST_TIME <= time <= LARGEST_TIME:
        raise UserError(
            f"{option} holds {time:g}: a time must be 0 or from {SMALLEST_TIME:g} to {LARGEST_TIME:g}; "
            "choose another unit"
        )


def check_limit(limit: float | tuple[float, ...] | None) -> None:
    """Refuse a memory limit that is no number.

    Raises:
        UserError: one is not above 0, or infinite.
    """
    for value in () if limit is None else limit if isinstance(limit, tuple) else (limit,):
        if not 0 < value < float("inf"):
            raise UserError(f"--memory-limit must be a number above 0 (leave it out for no limit), not {value:g}")


def check_search(stages_per_device: int | None, slowdown: float | None, prove: float | None) -> None:
    """Refuse what no search of `schedule best` can be told.

    Args:
        slowdown: in percent, as it is given.

    Raises:
        UserError: no stage per device, a slowdown below 0, or no time to prove in.
    """
    if stages_per_device is not None and stages_per_device < 1:
        raise UserError(f"--stages-per-device must be at least 1, not {stages_per_device}")
    if slowdown is not None and not 0 <= slowdown < float("inf"):
        raise UserError(f"--slowdown must be 0 or more percent (5 for 5 %), not {slowdown:g}")
    if prove is not None and not 0 < prove < float("inf"):
        raise UserError(f"--prove must be a number of seconds above 0, not {prove:g}")


def check_size(devices: int, microbatches: int, stages_per_device: int, split_backward: bool = True) -> None:
    """Refuse a pipeline that would take longer than anyone waits.

    Raises:
        UserError: a step has more than `MAX_PASSES` passes.
    """
    kinds = 3 if split_backward else 2
    passes = kinds * devices * stages_per_device * microbatches
    if passes > MAX_PASSES:
        raise UserError(
            f"{devices} devices with {stages_per_device} stages each and {microbatches} microbatches make {passes:,} "
            f"passes, more than the {MAX_PASSES:,} that can be scheduled here; give fewer devices or microbatches"
        )


def check_drawing(timeline: Timeline) -> None:
    """Refuse a terminal drawing that no terminal could show: it gives the shortest pass at least 3 columns.

    Raises:
        UserError: it has more than `MAX_DRAWN_CELLS` characters.
    """
    lengths = (
        end - start
        for starts, ends in zip(timeline.start, timeline.end, strict=True)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    )
    columns = 3 * timeline.makespan / min(lengths, default=1.0)
    if columns * timeline.schedule.devices > MAX_DRAWN_CELLS:
        raise UserError(
            f"the text drawing would be {columns:.3g} columns wide for each of {timeline.schedule.devices} devices, "
            f"{MAX_DRAWN_CELLS:,} characters are the most: passes this many or this unequal are shown by "
            "--format svg, json, csv or chrome"
        )
