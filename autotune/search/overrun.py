"""How far a plan is over the memory limit: what makes an out-of-memory a constraint with a grade."""

from __future__ import annotations

from autotune.results.measurement import TrialOutcome

__all__ = ["overrun_bytes", "peak_bytes"]

_UNKNOWN = 1.0
"""Bytes over the limit where there is no limit and no prediction: infeasible, and no more is known."""


def peak_bytes(outcome: TrialOutcome) -> int | None:
    """Peak of the heaviest device, profiled or measured; None if it was not."""
    if outcome.predicted is not None:
        return outcome.predicted.peak_memory_bytes
    return outcome.measurement.peak_memory_bytes if outcome.measurement else None


def overrun_bytes(
    outcome: TrialOutcome, limit_bytes: int | None, predicted_bytes: int | None, worst: float = 0.0
) -> float | None:
    """Bytes over the memory limit, negative below it; None if the trial says nothing of it.

    An allocation that failed leaves no peak. Its plan is over by what the prediction is. Where that is within the
    limit, it is wrong for this plan and can't say by how much: then the plan counts as over by its whole predicted peak
    beyond the larger of the limit and the worst measured overrun, so it looks no better than a plan that was measured.

    Args:
        limit_bytes: of a device; None for no limit.
        predicted_bytes: peak of the plan's heaviest device by the cost model; None without a prediction.
        worst: largest overrun that was measured in the study, in bytes.
    """
    peak = peak_bytes(outcome)
    if peak is not None and limit_bytes is not None and (outcome.state != "oom" or peak > limit_bytes):
        return float(peak - limit_bytes)
    if outcome.state != "oom":
        return None
    expected = predicted_bytes or 0
    if limit_bytes is None:
        return float(expected) or _UNKNOWN
    if expected > limit_bytes:
        return float(expected - limit_bytes)
    return max(float(limit_bytes), worst) + expected
