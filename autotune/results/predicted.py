"""What a plan was expected to take, as the results table keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autotune.cost.memory import fits_in
from autotune.results.measurement import Measurement

__all__ = ["Expectation", "Parts", "Predicted"]


class Parts(Protocol):
    """Where a step goes: `autotune.cost.prediction.Breakdown`, in seconds."""

    @property
    def compute_s(self) -> float: ...
    @property
    def bubble_s(self) -> float: ...
    @property
    def tp_s(self) -> float: ...
    @property
    def pp_s(self) -> float: ...
    @property
    def dp_s(self) -> float: ...
    @property
    def optimizer_s(self) -> float: ...
    @property
    def overhead_s(self) -> float: ...


class Expectation(Protocol):
    """What the cost model's predictions and the profiles of plans have in common."""

    @property
    def step_time_s(self) -> float: ...
    @property
    def peak_memory_bytes(self) -> int: ...
    @property
    def breakdown(self) -> Parts: ...


@dataclass(frozen=True)
class Predicted:
    """Step time, where it goes on the device that sets it (the parts sum to it), and peak of the heaviest device."""

    step_time_s: float
    peak_memory_bytes: int
    compute_s: float
    bubble_s: float
    tp_s: float
    pp_s: float
    dp_s: float
    optimizer_s: float
    overhead_s: float

    @classmethod
    def of(cls, expected: Expectation) -> Predicted:
        """The numbers of a prediction or a profile."""
        parts = expected.breakdown
        return cls(
            step_time_s=expected.step_time_s,
            peak_memory_bytes=expected.peak_memory_bytes,
            compute_s=parts.compute_s,
            bubble_s=parts.bubble_s,
            tp_s=parts.tp_s,
            pp_s=parts.pp_s,
            dp_s=parts.dp_s,
            optimizer_s=parts.optimizer_s,
            overhead_s=parts.overhead_s,
        )

    def fits(self, limit_bytes: int | None) -> bool:
        """Whether the expected peak is within a device's memory; True without a limit."""
        return fits_in(limit_bytes, self.peak_memory_bytes)

    def columns(
        self, tokens_per_step: int, limit_bytes: int | None, measured: Measurement | None = None
    ) -> dict[str, float | int | None]:
        """Values of the table's `predicted_...` columns.

        Args:
            tokens_per_step: tokens of one optimizer step of the whole cluster.
            limit_bytes: of one device; None for no limit.
            measured: numbers of a run of the same plan; without it the errors are None.
        """
        peak = None if measured is None else measured.peak_memory_bytes
        return {f"predicted_{name}": value for name, value in vars(self).items()} | {
            "predicted_tokens_per_s": tokens_per_step / self.step_time_s,
            "predicted_step_time_error": None if measured is None else self.step_time_s / measured.step_time_s - 1,
            "predicted_peak_memory_error": self.peak_memory_bytes / peak - 1 if peak else None,
            "predicted_fits": self.fits(limit_bytes),
        }
