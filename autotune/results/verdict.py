"""Which row is the best, which the baseline, and how much faster each is: decided here and nowhere else.

Rows compete with their like alone: as soon as one plan of a study was run, those that were run; else those that were
profiled; else those that the cost model predicted. No measured number is ever set against a predicted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.results.columns import Row
from autotune.results.measurement import Fidelity

__all__ = [
    "BASELINE_SCHEDULE",
    "INTERLEAVED_SCHEDULE",
    "fastest",
    "fidelity_of",
    "is_baseline_schedule",
    "is_over_limit",
    "judge",
    "rate",
]

BASELINE_SCHEDULE = "1f1b"
INTERLEAVED_SCHEDULE = "interleaved-1f1b"


def fidelity_of(rows: Sequence[Row]) -> Fidelity:
    """The truest fidelity at which any plan was evaluated: the one whose rows compete."""
    found = {row.fidelity for row in rows} | {"run" for row in rows if row.state == "ok"}
    if "run" in found:
        return "run"
    return "profile" if "profile" in found else "predict" if "predict" in found else "run"


def is_over_limit(row: Row) -> bool:
    """Whether a plan that was only predicted is over the memory limit by its prediction, but not refused."""
    return row.state == "predicted" and row.predicted_fits is False


def rate(row: Row, fidelity: Fidelity) -> float | None:
    """tokens/s with which a row competes at a fidelity; None if it doesn't."""
    if fidelity == "run":
        return row.tokens_per_s if row.state == "ok" else None
    competes = row.state == "predicted" and row.fidelity == fidelity and not is_over_limit(row)
    return row.predicted_tokens_per_s if competes else None


def fastest(
    rows: Sequence[Row], wanted: Callable[[Row], bool] = lambda row: True, fidelity: Fidelity | None = None
) -> Row | None:
    """The row with the highest rate among those `wanted`; the first of equals; None without one.

    Args:
        fidelity: None: the truest of all `rows`.
    """
    fidelity = fidelity or fidelity_of(rows)
    candidates = [row for row in rows if rate(row, fidelity) is not None and wanted(row)]
    return max(candidates, key=lambda row: rate(row, fidelity) or 0.0, default=None)


def is_baseline_schedule(row: Row) -> bool:
    """Whether the plan counts for the 1F1B baseline; plans without pipeline stand under 1f1b too."""
    return row.schedule == BASELINE_SCHEDULE


def judge(rows: Sequence[Row], winner: str | None = None) -> list[Row]:
    """The rows with `speedup_vs_1f1b`, `is_baseline` and `is_best` filled in, in the same order.

    Args:
        winner: fingerprint of the plan that won a final, which is the best whatever the search measured of it.
    """
    fidelity = fidelity_of(rows)
    best, baseline = fastest(rows, fidelity=fidelity), fastest(rows, is_baseline_schedule, fidelity)
    best = next((row for row in rows if winner is not None and row.fingerprint == winner), best)
    of_baseline = None if baseline is None else rate(baseline, fidelity)
    judged = []
    for row in rows:
        own = rate(row, fidelity)
        speedup = own / of_baseline if own and of_baseline else None
        judged.append(replace(row, speedup_vs_1f1b=speedup, is_baseline=row is baseline, is_best=row is best))
    return judged
