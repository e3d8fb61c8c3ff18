"""Which row is the best, which the baseline, and how much faster each is: decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.results.columns import Row

__all__ = ["BASELINE_SCHEDULE", "INTERLEAVED_SCHEDULE", "fastest", "judge"]

BASELINE_SCHEDULE = "1f1b"
INTERLEAVED_SCHEDULE = "interleaved-1f1b"


def fastest(rows: Sequence[Row], wanted: Callable[[Row], bool] = lambda row: True) -> Row | None:
    """The `ok` row with the most tokens_per_s among those `wanted`; the first of equals; None without one."""
    candidates = [row for row in rows if row.state == "ok" and row.tokens_per_s is not None and wanted(row)]
    return max(candidates, key=lambda row: row.tokens_per_s or 0.0, default=None)


def is_baseline_schedule(row: Row) -> bool:
    """Whether the plan counts for the 1F1B baseline; plans without pipeline stand under 1f1b too."""
    return row.schedule == BASELINE_SCHEDULE


def judge(rows: Sequence[Row]) -> list[Row]:
    """The rows with `speedup_vs_1f1b`, `is_baseline` and `is_best` filled in, in the same order."""
    best, baseline = fastest(rows), fastest(rows, is_baseline_schedule)
    judged = []
    for row in rows:
        speedup = None
        if row.state == "ok" and row.tokens_per_s and baseline is not None and baseline.tokens_per_s:
            speedup = row.tokens_per_s / baseline.tokens_per_s
        judged.append(replace(row, speedup_vs_1f1b=speedup, is_baseline=row is baseline, is_best=row is best))
    return judged
