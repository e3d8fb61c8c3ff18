"""From a plan and how its trial ended to its row."""

from __future__ import annotations

from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.measurement import Fidelity, State, TrialOutcome
from autotune.results.predicted import Predicted
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

__all__ = ["plan_of", "row_of", "row_without_trial", "tokens_per_step"]


def tokens_per_step(model: ModelSpec, training: TrainingSpec) -> int:
    """Tokens of one optimizer step: every token of the global batch once, whatever the degrees."""
    return training.global_batch_size * model.sequence_length


def row_of(
    trial: int,
    plan: Plan,
    fingerprint: str,
    outcome: TrialOutcome,
    model: ModelSpec,
    training: TrainingSpec,
    fidelity: Fidelity = "run",
    predicted: Predicted | None = None,
    limit_bytes: int | None = None,
) -> Row:
    """The row of one trial. A trial of fidelity `profile` fills the predicted columns alone: nothing was run.

    Args:
        predicted: what the cost model said before; a profile's own numbers take its place.
        limit_bytes: memory of a device; None for no limit.
    """
    measured = outcome.measurement
    tokens = tokens_per_step(model, training)
    row: dict[str, object] = {
        "trial": trial,
        "state": outcome.state,
        "reason": outcome.reason,
        **_plan_values(plan),
        "fidelity": fidelity,
        "started": outcome.started,
        "duration_s": outcome.duration_s,
        "fingerprint": fingerprint,
    }
    if measured is not None:
        row |= {"torch": measured.torch, "device": measured.device}
    if fidelity != "run":
        measured = None
    if measured is not None:
        tokens_per_s = tokens / measured.step_time_s
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
        }
    if (expected := outcome.predicted or predicted) is not None:
        row |= expected.columns(tokens, limit_bytes, measured)
    return Row(**row)  # type: ignore[arg-type]


def row_without_trial(
    plan: Plan,
    fingerprint: str,
    state: State,
    reason: str,
    predicted: Predicted | None,
    tokens: int,
    limit_bytes: int | None,
) -> Row:
    """The row of a plan that had no trial: predicted, or refused by the estimate of its memory.

    Args:
        predicted: by the cost model; None when it has no figures for the device.
        tokens: of one optimizer step.
        limit_bytes: memory of a device; None for no limit.
    """
    numbers = {} if predicted is None else predicted.columns(tokens, limit_bytes)
    return Row(
        state=state,
        reason=reason,
        fidelity="predict",
        fingerprint=fingerprint,
        **_plan_values(plan),  # type: ignore[arg-type]
        **numbers,  # type: ignore[arg-type]
    )


def _plan_values(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def plan_of(row: Row) -> Plan:
    """The plan of a row.

    Raises:
        UserError: a rule of the space refused it, so that it is no whole plan.
    """
    if row.layer_split is None:
        raise UserError(f"{row.describe()} is no plan that can run: {row.reason or row.state}")
    names = Plan.__dataclass_fields__
    return Plan(**{name: getattr(row, name) for name in names})
