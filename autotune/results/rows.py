"""From a plan and how its trial ended to its row."""

from __future__ import annotations

from autotune.results.columns import Row
from autotune.results.measurement import Fidelity, TrialOutcome
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

__all__ = ["plan_of", "row_of"]


def row_of(
    trial: int | None,
    plan: Plan,
    fingerprint: str,
    outcome: TrialOutcome,
    model: ModelSpec,
    training: TrainingSpec,
    fidelity: Fidelity = "run",
) -> Row:
    """The row of one trial. tokens_per_s counts every token of the global batch once, whatever the degrees."""
    measured = outcome.measurement
    row = {
        "trial": trial,
        "state": outcome.state,
        "reason": outcome.reason,
        **plan.to_dict(),
        "layer_split": plan.layer_split,
        "fidelity": fidelity,
        "started": outcome.started,
        "duration_s": outcome.duration_s,
        "fingerprint": fingerprint,
    }
    if measured is not None:
        tokens_per_s = training.global_batch_size * model.sequence_length / measured.step_time_s
        row |= {
            "clock": measured.clock,
            "step_time_s": measured.step_time_s,
            "step_time_min_s": measured.step_time_min_s,
            "step_time_max_s": measured.step_time_max_s,
            "step_time_std_s": measured.step_time_std_s,
            "step_time_wall_s": measured.step_time_wall_s,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / plan.devices,
            "peak_memory_bytes": measured.peak_memory_bytes,
            "peak_memory_bytes_per_rank": measured.peak_memory_bytes_per_rank,
            "bubble_rate": measured.bubble_rate,
            "loss": measured.loss,
            "torch": measured.torch,
            "device": measured.device,
        }
    return Row(**row)  # type: ignore[arg-type]


def plan_of(row: Row) -> Plan:
    """The plan of a row that was run."""
    names = Plan.__dataclass_fields__
    return Plan(**{name: getattr(row, name) for name in names})
