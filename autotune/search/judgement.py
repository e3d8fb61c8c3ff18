"""Trials judged again by the memory limit as it is now: what they measured doesn't depend on it."""

from __future__ import annotations

from dataclasses import replace

from autotune.results.measurement import TrialOutcome

__all__ = ["judged_by"]


def judged_by(outcome: TrialOutcome, limit_bytes: int | None, refuses: bool = True) -> TrialOutcome:
    """The outcome under a limit, and under whether estimates refuse plans; the same object if nothing changes.

    A plan that ran is `ok` within the limit and `oom` beyond it. One whose allocation failed stays `oom`: the limit had
    no part in it.
    """
    measured = outcome.measurement
    if outcome.state not in ("ok", "oom") or measured is None or (peak := measured.peak_memory_bytes) is None:
        return _profile_judged_by(outcome, limit_bytes, refuses)
    over = limit_bytes is not None and peak > limit_bytes
    if over == (outcome.state == "oom"):
        return outcome
    if not over:
        return replace(outcome, state="ok", reason="")
    assert limit_bytes is not None
    where = f" on {measured.device}" if measured.device else ""
    reason = f"peaked at {peak} bytes, {peak - limit_bytes} bytes over the limit of {limit_bytes}{where} (it ran)"
    return replace(outcome, state="oom", reason=reason)


def _profile_judged_by(outcome: TrialOutcome, limit_bytes: int | None, refuses: bool) -> TrialOutcome:
    """A profile that was refused by its memory is one like others if the limit was raised or estimates don't refuse."""
    told = outcome.predicted
    if outcome.state != "refused" or told is None:
        return outcome
    if limit_bytes is None or told.peak_memory_bytes <= limit_bytes:
        return replace(outcome, state="predicted", reason="")
    if refuses:
        return outcome
    return replace(outcome, state="predicted", reason=f"kept by --no-refuse-by-estimate: {outcome.reason}")
