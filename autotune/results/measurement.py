"""What one trial gave: its state and, if it ran, its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from autotune.results.predicted import Predicted

__all__ = ["Clock", "Fidelity", "Measurement", "State", "TrialOutcome"]

State = Literal[
    "ok",
    "refused",
    "predicted",
    "oom",
    "timeout",
    "hang",
    "killed",
    "failed",
    "no-result",
    "non-finite",
    "launcher",
    "invalid",
]
Fidelity = Literal["predict", "profile", "run"]
Clock = Literal["wall", "virtual"]


@dataclass(frozen=True)
class Measurement:
    """Numbers of a plan that ran to the end on all its ranks. One definition of each, see docs/results.md.

    Attributes:
        step_time_s: one optimizer step, slowest rank, median over the measured steps; min, max, std beside it.
        step_time_wall_s: the same by the wall clock, whatever `clock` says.
        peak_memory_bytes_per_rank: forward, backward and optimizer step with the optimizer state allocated.
        bubble_rate: idle share of the busiest device's timeline, from the measured passes.
        loss: mean loss per token of the last measured step.
    """

    clock: Clock
    step_time_s: float
    step_time_min_s: float
    step_time_max_s: float
    step_time_std_s: float
    step_time_wall_s: float
    peak_memory_bytes_per_rank: tuple[int, ...] | None
    bubble_rate: float | None
    loss: float | None
    torch: str
    device: str

    @property
    def peak_memory_bytes(self) -> int | None:
        """The largest peak over all ranks; None if it was not measured."""
        return max(self.peak_memory_bytes_per_rank) if self.peak_memory_bytes_per_rank else None


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended. `measurement` is there when, and only when, the state is `ok`, `oom` (over the limit but it
    ran) or `predicted`; `reason` says why for every other state, and of `ok` what could not be checked, if anything.

    Attributes:
        started: UTC time in ISO 8601.
        predicted: what a trial of fidelity `profile` found; its `measurement` holds the same as of a run.
    """

    state: State
    reason: str
    measurement: Measurement | None
    started: str
    duration_s: float
    predicted: Predicted | None = None
