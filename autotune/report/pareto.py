"""The Pareto front in words."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.report.numbers import bytes_text, count_text
from autotune.results.columns import Row

__all__ = ["pareto_lines", "pareto_sentence"]


def pareto_sentence(front: Sequence[Row]) -> str:
    """What a front offers, in one sentence."""
    if not front:
        return "no plan of this study is known to run within its limits, with its peak memory"
    if len(front) == 1:
        return f"one plan is both the fastest and the smallest: {_point(front[0])}"
    return (
        f"{len(front)} plans than which none is both faster and smaller: from {_point(front[0])} to {_point(front[-1])}"
    )


def pareto_lines(front: Sequence[Row]) -> list[str]:
    """The sentence, and a line for every plan."""
    return [pareto_sentence(front), *(f"  {row.describe()}: {_point(row)}" for row in front)]


def _point(row: Row) -> str:
    measured = row.state == "ok"
    speed = row.tokens_per_s if measured else row.predicted_tokens_per_s
    memory = row.peak_memory_bytes if measured else row.predicted_peak_memory_bytes
    return f"{count_text(speed)} tokens/s with {bytes_text(memory)}{'' if measured else ' (predicted)'}"
