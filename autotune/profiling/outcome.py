"""What a trial gave: its numbers, or the state and the reason of a trial that has none. No torch."""

from __future__ import annotations

import math
import reprlib
import statistics
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from autotune.results.measurement import Clock, Measurement, State

__all__ = ["MOST_BYTES", "NoMeasurement", "brief", "make_measurement", "require_finite_loss", "some"]


_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
"""Of one step: a nanosecond, and thirty years."""

MOST_BYTES = 2**50
"""Of one device: a pebibyte. What is more is no peak of one."""

_SHOWN = 8
_LONG = 10**18


class NoMeasurement(Exception):  # noqa: N818  it is an answer, no error
    """There are no numbers: `state` and `reason` of the trial. Raised by readers, caught by `assess`."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state
        self.reason = reason


def require_finite_loss(loss: float, what: str) -> None:
    """Raises NoMeasurement with the state `non-finite` and the reason `WHAT LOSS` if the loss is no number."""
    if not math.isfinite(loss):
        raise NoMeasurement("non-finite", f"{what} {loss}")


def make_measurement(
    step_times_s: Sequence[float],
    *,
    source: str = "",
    clock: Clock = "wall",
    wall_s: Sequence[float] | None = None,
    peaks: tuple[int, ...] | None,
    bubble_rate: float | None = None,
    loss: float | None,
    torch: str,
    device: str,
) -> Measurement:
    """The numbers of a trial from the times of its measured steps.

    Args:
        source: where the times are from, for the reason; such as `result.json: `.
        wall_s: the times of the steps by the wall clock, if `clock` is another; at least one.
        peaks: bytes of every rank.

    Raises:
        NoMeasurement: a time or a peak is none that can be (`invalid`), or the loss is no number (`non-finite`).
    """
    if loss is not None:
        require_finite_loss(loss, f"{source}the loss is")
    times = list(step_times_s)
    for seconds in (times, times if wall_s is None else wall_s):
        if not seconds or not all(_SHORTEST_S <= time <= _LONGEST_S for time in seconds):
            raise NoMeasurement(
                "invalid", f"{source}step times of {some(seconds)} s; a step takes {_SHORTEST_S:g} to {_LONGEST_S:g} s"
            )
    if peaks is not None and not all(type(peak) is int and 0 < peak <= MOST_BYTES for peak in peaks):
        raise NoMeasurement(
            "invalid",
            f"{source}peaks of {some(peaks)} bytes; a peak is a whole number of bytes from 1 to {MOST_BYTES} (1 PiB)",
        )
    return Measurement(
        clock=clock,
        step_time_s=statistics.median(times),
        step_time_min_s=min(times),
        step_time_max_s=max(times),
        step_time_std_s=statistics.stdev(times) if len(times) > 1 else 0.0,
        step_time_wall_s=statistics.median(times if wall_s is None else wall_s),
        peak_memory_bytes_per_rank=peaks,
        bubble_rate=bubble_rate,
        loss=loss,
        torch=torch,
        device=device,
    )


def brief(value: Any) -> str:
    """A value that something wrote, in a few characters: a number of hundreds of digits by its power of ten."""
    if type(value) is int:
        return str(value) if abs(value) < _LONG else f"{Decimal(value):.6e}"
    return repr(value) if isinstance(value, float) else reprlib.repr(value)


def some(values: Sequence[Any]) -> str:
    """The values, or the first of very many."""
    shown = ", ".join(map(brief, values[:_SHOWN]))
    return f"[{shown}]" if len(values) <= _SHOWN else f"[{shown}, ... {len(values)} in all]"
