"""What a trial gave: its numbers, or the state and the reason of a trial that has none. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.results.measurement import Clock, Measurement, State

__all__ = ["NoMeasurement", "make_measurement", "require_finite_loss"]


_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
"""Of one step: a nanosecond, and thirty years."""

_MOST_BYTES = 2**63 - 1
_SHOWN = 8


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
            raise NoMeasurement("invalid", f"{source}step times of {_some(seconds)} s")
    if peaks is not None and not all(type(peak) is int and 0 < peak <= _MOST_BYTES for peak in peaks):
        raise NoMeasurement("invalid", f"{source}peaks of {_some(peaks)} bytes")
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


def _some(values: Sequence[float]) -> str:
    """The values, or the first of very many."""
    shown = ", ".join(map(repr, values[:_SHOWN]))
    return f"[{shown}]" if len(values) <= _SHOWN else f"[{shown}, ... {len(values)} in all]"
