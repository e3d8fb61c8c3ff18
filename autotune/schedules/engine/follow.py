"""After a move: follow what changes in starts and tails, along a topological order that is repaired in place.

Passes are visited in topological order and only when something they wait for has changed, so a move costs about as much
as it matters. The repair is the affected-region method of Pearce and Kelly ("A dynamic topological sort algorithm for
directed acyclic graphs", 2006) for the one new edge that can run against the old order.
"""

from __future__ import annotations

from numba import njit

from autotune.schedules.engine.graph import (
    AFTER,
    AFTER_HOP,
    BEFORE,
    BEFORE_HOP,
    CHANGED,
    DEVICE,
    DURATION,
    OLD_START,
    PLACE,
    RANK,
    REGION,
    ROW,
    START,
    TAIL,
    TOPOLOGY,
)
from autotune.schedules.engine.problem import Floats, Ints

__all__ = ["all_tails", "follow_starts", "follow_tails", "repair_topology", "restore_topology"]


@njit(cache=True, inline="always")
def _tail(x: int, order: Ints, links: Ints, costs: Floats, whole: Ints, times: Floats) -> float:
    """The longest path from the end of a pass to the end of the step."""
    row = whole[ROW, x]
    rest = 0.0
    if whole[PLACE, x] < order.shape[1] - 1:
        y = order[links[DEVICE, row], whole[PLACE, x] + 1]
        rest = costs[DURATION, whole[ROW, y]] + times[TAIL, y]
    if links[AFTER, row] != 0:
        y = x + links[AFTER, row]
        rest = max(rest, costs[AFTER_HOP, row] + costs[DURATION, whole[ROW, y]] + times[TAIL, y])
    return rest


@njit(cache=True)
def all_tails(order: Ints, links: Ints, costs: Floats, whole: Ints, times: Floats) -> None:
    """Fill in the tails of all passes."""
    for r in range(whole.shape[1] - 1, -1, -1):
        x = whole[TOPOLOGY, r]
        times[TAIL, x] = _tail(x, order, links, costs, whole, times)


@njit(cache=True)
def repair_topology(order: Ints, links: Ints, whole: Ints, first: int, then: int, marked: Ints) -> bool:
    """Bring `first` and all it waits for before `then`; False, with nothing changed, when `first` waits for `then`.

    Args:
        marked: scratch, all False; left so.
        whole: REGION is filled with the old order between the two, for `restore_topology`.
    """
    bottom, ceiling = whole[RANK, then], whole[RANK, first]
    n = order.shape[1]
    marked[first] = True
    for r in range(ceiling, bottom - 1, -1):
        y = whole[TOPOLOGY, r]
        whole[REGION, r - bottom] = y
        row = whole[ROW, y]
        j = whole[PLACE, y] + 1
        if (links[AFTER, row] != 0 and marked[y + links[AFTER, row]]) or (
            j < n and marked[order[links[DEVICE, row], j]]
        ):
            marked[y] = True
    possible = not marked[then]
    if possible and ceiling >= bottom:
        r = bottom
        for chosen in (True, False):
            for j in range(ceiling - bottom + 1):
                y = whole[REGION, j]
                if marked[y] == chosen:
                    whole[TOPOLOGY, r] = y
                    whole[RANK, y] = r
                    r += 1
    marked[first] = False
    for j in range(ceiling - bottom + 1):
        marked[whole[REGION, j]] = False
    return possible


@njit(cache=True)
def restore_topology(whole: Ints, bottom: int, ceiling: int) -> None:
    """Undo `repair_topology`."""
    for j in range(ceiling - bottom + 1):
        whole[TOPOLOGY, bottom + j] = whole[REGION, j]
        whole[RANK, whole[REGION, j]] = bottom + j


@njit(cache=True)
def follow_starts(
    order: Ints,
    links: Ints,
    costs: Floats,
    whole: Ints,
    times: Floats,
    dirty: Ints,
    d: int,
    low: int,
    high: int,
    ceiling: int,
    threshold: float,
) -> tuple[int, float, int]:
    """New starts after places `low` to `high` of device `d` have changed.

    Args:
        ceiling: passes ranked higher have kept their tails.
        dirty: scratch, all False; left so.
        whole, times: CHANGED and OLD_START are filled with the changed passes and what their starts were.

    Returns:
        Changed passes; the makespan, or a value above `threshold` as soon as that is certain; passes looked at.
    """
    p, n = order.shape
    waiting = 0
    lowest, highest = whole.shape[1], ceiling
    for j in range(low, min(high + 2, n)):
        y = order[d, j]
        dirty[y] = True
        waiting += 1
        lowest = min(lowest, whole[RANK, y])
        if j <= high:
            highest = max(highest, whole[RANK, y])
    moved, looked = 0, 0
    r = lowest
    makespan = 0.0
    while waiting > 0:
        y = whole[TOPOLOGY, r]
        r += 1
        if not dirty[y]:
            continue
        dirty[y] = False
        waiting -= 1
        looked += 1
        row = whole[ROW, y]
        device = links[DEVICE, row]
        begin = 0.0
        j = whole[PLACE, y]
        if j > 0:
            z = order[device, j - 1]
            begin = times[START, z] + costs[DURATION, whole[ROW, z]]
        if links[BEFORE, row] != 0:
            z = y + links[BEFORE, row]
            begin = max(begin, times[START, z] + costs[DURATION, whole[ROW, z]] + costs[BEFORE_HOP, row])
        if begin == times[START, y]:
            continue
        whole[CHANGED, moved] = y
        times[OLD_START, moved] = times[START, y]
        moved += 1
        times[START, y] = begin
        if r - 1 > highest and begin + costs[DURATION, row] + times[TAIL, y] > threshold:
            makespan = begin + costs[DURATION, row] + times[TAIL, y]
            break
        if j < n - 1:
            z = order[device, j + 1]
            waiting += not dirty[z]
            dirty[z] = True
        if links[AFTER, row] != 0:
            z = y + links[AFTER, row]
            waiting += not dirty[z]
            dirty[z] = True
    looked += (r - lowest) >> 3
    while waiting > 0:
        waiting -= dirty[whole[TOPOLOGY, r]]
        dirty[whole[TOPOLOGY, r]] = False
        r += 1
    if makespan == 0.0:
        for device in range(p):
            y = order[device, n - 1]
            makespan = max(makespan, times[START, y] + costs[DURATION, whole[ROW, y]])
    return moved, makespan, looked


@njit(cache=True)
def follow_tails(
    order: Ints,
    links: Ints,
    costs: Floats,
    whole: Ints,
    times: Floats,
    dirty: Ints,
    d: int,
    low: int,
    high: int,
    ceiling: int,
) -> int:
    """New tails after places `low` to `high` of device `d` have changed; passes looked at."""
    waiting, looked = 0, 0
    highest = ceiling
    for j in range(max(low - 1, 0), high + 1):
        y = order[d, j]
        dirty[y] = True
        waiting += 1
        highest = max(highest, whole[RANK, y])
    r = highest
    while waiting > 0:
        y = whole[TOPOLOGY, r]
        r -= 1
        if not dirty[y]:
            continue
        dirty[y] = False
        waiting -= 1
        looked += 1
        rest = _tail(y, order, links, costs, whole, times)
        if rest == times[TAIL, y]:
            continue
        times[TAIL, y] = rest
        row = whole[ROW, y]
        j = whole[PLACE, y]
        if j > 0:
            z = order[links[DEVICE, row], j - 1]
            waiting += not dirty[z]
            dirty[z] = True
        if links[BEFORE, row] != 0:
            z = y + links[BEFORE, row]
            waiting += not dirty[z]
            dirty[z] = True
    return looked + ((highest - r) >> 3)
