"""The Pareto front of a study: plans than which none is both faster and smaller."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.results.columns import Row
from autotune.results.verdict import fidelity_of, rate

__all__ = ["pareto_front"]


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in tokens/s without needing more peak memory, or the other way round; fastest first.

    Rows compete as for the best plan: those that ran within their limits; if none was run, the profiled or else the
    predicted ones that fit, by their predictions. A row whose memory nobody measured can't be placed and is left out.
    Of rows that are equal in both, all are on the front.
    """
    fidelity = fidelity_of(rows)
    placed = []
    for row in rows:
        speed = rate(row, fidelity)
        memory = row.peak_memory_bytes if fidelity == "run" else row.predicted_peak_memory_bytes
        if speed is not None and memory is not None:
            placed.append((speed, memory, row))
    placed.sort(key=lambda one: (-one[0], one[1]))
    front: list[tuple[float, int, Row]] = []
    for speed, memory, row in placed:
        if not front or memory < front[-1][1] or (speed, memory) == front[-1][:2]:
            front.append((speed, memory, row))
    return [row for _, _, row in front]
