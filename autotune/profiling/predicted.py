"""What the results table says of a plan's prediction, beside what was measured. No torch."""

from __future__ import annotations

from autotune.cost.predict import Prediction
from autotune.profiling.profile_plan import Profile
from autotune.results.columns import Column
from autotune.results.measurement import Measurement

__all__ = ["PREDICTED_COLUMNS", "predicted_columns"]

PREDICTED_COLUMNS = (
    Column("predicted_step_time_s", "number", "s", "one optimizer step, as predicted before the plan was run"),
    Column("predicted_peak_memory_bytes", "integer", "bytes", "peak of the heaviest device, as predicted"),
    Column("step_time_error", "number", "", "predicted_step_time_s / step_time_s - 1; empty if not measured"),
    Column("peak_memory_error", "number", "", "predicted_peak_memory_bytes / peak_memory_bytes - 1; empty likewise"),
    Column("predicted_compute_s", "number", "s", "passes of the busiest device; with those below it sums to the step"),
    Column("predicted_bubble_s", "number", "s", "its waiting for other pipeline devices"),
    Column("predicted_tp_s", "number", "s", "its tensor-parallel collectives"),
    Column("predicted_pp_s", "number", "s", "what messages between pipeline devices add to the step"),
    Column("predicted_dp_s", "number", "s", "its gradient reduction and parameter gathering"),
    Column("predicted_optimizer_s", "number", "s", "its optimizer step"),
    Column(
        "predicted_overhead_s", "number", "s", "fixed loss of the machine on every visit of a microbatch to a stage"
    ),
)
"""What `predicted_columns` fills, ready for the table's header."""


def predicted_columns(
    prediction: Prediction | Profile, measured: Measurement | None = None
) -> dict[str, float | int | None]:
    """Values of `PREDICTED_COLUMNS` for one plan.

    Args:
        prediction: from the cost model or from a profile.
        measured: of a run of the same plan; without it the errors are None.
    """
    parts = prediction.breakdown
    peak = measured.peak_memory_bytes if measured is not None else None
    return {
        "predicted_step_time_s": prediction.step_time_s,
        "predicted_peak_memory_bytes": prediction.peak_memory_bytes,
        "step_time_error": None if measured is None else prediction.step_time_s / measured.step_time_s - 1,
        "peak_memory_error": None if peak is None else prediction.peak_memory_bytes / peak - 1,
        "predicted_compute_s": parts.compute_s,
        "predicted_bubble_s": parts.bubble_s,
        "predicted_tp_s": parts.tp_s,
        "predicted_pp_s": parts.pp_s,
        "predicted_dp_s": parts.dp_s,
        "predicted_optimizer_s": parts.optimizer_s,
        "predicted_overhead_s": parts.overhead_s,
    }
