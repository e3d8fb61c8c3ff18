"""The columns of the results table: names, types, units and definitions. The header is fixed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from autotune.results.text import printable
from autotune.space.plan import describe

__all__ = ["COLUMNS", "Column", "ColumnType", "Row"]

ColumnType = Literal["integer", "number", "text", "flag", "integers"]


@dataclass(frozen=True)
class Column:
    """One column. `unit` is empty for names, counts and flags; `meaning` is one line."""

    name: str
    type: ColumnType
    unit: str
    meaning: str


@dataclass(frozen=True)
class Row:
    """One plan and what became of it. None is a number nobody measured; the fields are the columns, in their order.

    `speedup_vs_1f1b`, `is_baseline` and `is_best` depend on the other rows: `autotune.results.verdict.judge` sets them.
    """

    trial: int | None = None
    state: str = ""
    reason: str = ""
    pp: int | None = None
    tp: int | None = None
    dp: int | None = None
    micro_batch_size: int | None = None
    microbatches: int | None = None
    schedule: str = ""
    stages_per_device: int | None = None
    layer_split: tuple[int, ...] | None = None
    recompute: str = ""
    fidelity: str = ""
    clock: str = ""
    step_time_s: float | None = None
    step_time_min_s: float | None = None
    step_time_max_s: float | None = None
    step_time_std_s: float | None = None
    step_time_wall_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_bytes_per_rank: tuple[int, ...] | None = None
    bubble_rate: float | None = None
    loss: float | None = None
    speedup_vs_1f1b: float | None = None
    is_baseline: bool | None = None
    is_best: bool | None = None
    started: str = ""
    duration_s: float | None = None
    torch: str = ""
    device: str = ""
    fingerprint: str = ""
    predicted_step_time_s: float | None = None
    predicted_step_time_error: float | None = None
    predicted_tokens_per_s: float | None = None
    predicted_peak_memory_bytes: int | None = None
    predicted_peak_memory_error: float | None = None
    predicted_fits: bool | None = None
    predicted_compute_s: float | None = None
    predicted_bubble_s: float | None = None
    predicted_tp_s: float | None = None
    predicted_pp_s: float | None = None
    predicted_dp_s: float | None = None
    predicted_optimizer_s: float | None = None
    predicted_overhead_s: float | None = None

    def describe(self) -> str:
        """The plan in one line."""
        return printable(describe(self))

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values, column by column; what is missing is null."""
        values: dict[str, object] = {}
        for column in COLUMNS:
            value = getattr(self, column.name)
            if column.type == "integers" and value is not None:
                value = list(value)
            values[column.name] = None if value == "" else value
        return values


COLUMNS = (
    Column("trial", "integer", "", "number of the trial in the study; empty for plans without one"),
    Column("state", "text", "", "how the plan ended: one of the states above"),
    Column("reason", "text", "", "why the state isn't ok; of an ok plan empty, or what was not checked"),
    Column("pp", "integer", "", "pipeline-parallel degree: devices of one pipeline"),
    Column("tp", "integer", "", "tensor-parallel degree"),
    Column("dp", "integer", "", "data-parallel degree: pp x tp x dp devices in all"),
    Column("micro_batch_size", "integer", "samples", "samples of one microbatch"),
    Column("microbatches", "integer", "", "microbatches of one step and data-parallel replica"),
    Column("schedule", "text", "", "pipeline schedule; a plan without pipeline (pp = 1) stands under 1f1b"),
    Column("stages_per_device", "integer", "", "stages a device holds"),
    Column("layer_split", "integers", "layers", "layers of every stage in model order, as a JSON list"),
    Column("recompute", "text", "", "activation recomputation: none or full"),
    Column("fidelity", "text", "", "how the plan was evaluated: run (all devices), profile or predict"),
    Column("clock", "text", "", "which clock step_time_s is from: wall, or virtual when ranks outnumber cores"),
    Column("step_time_s", "number", "s", "one optimizer step of the slowest rank, median over the measured steps"),
    Column("step_time_min_s", "number", "s", "shortest measured step"),
    Column("step_time_max_s", "number", "s", "longest measured step"),
    Column("step_time_std_s", "number", "s", "sample standard deviation of the measured steps"),
    Column("step_time_wall_s", "number", "s", "median measured step by the wall clock, whatever `clock` says"),
    Column("tokens_per_s", "number", "tokens/s", "global_batch_size x sequence_length / step_time_s, all devices"),
    Column("tokens_per_s_per_device", "number", "tokens/s", "tokens_per_s / (pp x tp x dp)"),
    Column("peak_memory_bytes", "integer", "bytes", "largest peak of any rank"),
    Column("peak_memory_bytes_per_rank", "integers", "bytes", "peak of every rank, as a JSON list"),
    Column(
        "bubble_rate", "number", "", "1 - work of the busiest device / time of the pipeline, from the measured passes"
    ),
    Column("loss", "number", "nats/token", "mean loss per token of the last measured step"),
    Column("speedup_vs_1f1b", "number", "", "rate in tokens/s over the baseline's, both measured or both predicted"),
    Column("is_baseline", "flag", "", "the fastest plan under 1f1b of those that compete"),
    Column(
        "is_best",
        "flag",
        "",
        "the final's winner, or else the fastest plan that competes: ok ones, or the predicted if none was run",
    ),
    Column("started", "text", "", "UTC, ISO 8601"),
    Column("duration_s", "number", "s", "wall time of the whole trial, start-up included"),
    Column("torch", "text", "", "version that ran the trial"),
    Column("device", "text", "", "device that ran the trial"),
    Column(
        "fingerprint", "text", "", "16 hex digits of plan, model, devices and training; equal for the same run only"
    ),
    Column("predicted_step_time_s", "number", "s", "one step, by the cost model; by profiles at fidelity profile"),
    Column("predicted_step_time_error", "number", "", "predicted_step_time_s / step_time_s - 1; empty if not measured"),
    Column("predicted_tokens_per_s", "number", "tokens/s", "global batch x sequence_length / predicted_step_time_s"),
    Column("predicted_peak_memory_bytes", "integer", "bytes", "peak of the heaviest device, likewise"),
    Column(
        "predicted_peak_memory_error",
        "number",
        "",
        "predicted_peak_memory_bytes / peak_memory_bytes - 1; empty if not measured",
    ),
    Column(
        "predicted_fits", "flag", "", "predicted_peak_memory_bytes is within the memory limit; false doesn't compete"
    ),
    Column("predicted_compute_s", "number", "s", "passes of the device that sets the step; these seven sum to it"),
    Column("predicted_bubble_s", "number", "s", "its waiting for passes of other devices: the bubble without messages"),
    Column("predicted_tp_s", "number", "s", "its tensor-parallel collectives"),
    Column("predicted_pp_s", "number", "s", "the rest of its bubble: what messages between pipeline devices add"),
    Column("predicted_dp_s", "number", "s", "its gradient reduction and parameter gathering"),
    Column("predicted_optimizer_s", "number", "s", "its optimizer step"),
    Column("predicted_overhead_s", "number", "s", "fixed loss on every visit of a microbatch to a stage"),
)

assert tuple(column.name for column in COLUMNS) == tuple(field.name for field in fields(Row))
