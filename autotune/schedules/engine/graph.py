"""Complete orders as a graph: chain neighbours of a pass, and its first timing.

A complete order holds every pass of every device (codes as in `backfill`). A pass waits for the pass before it on its
device and, when it is an F or B, for its chain neighbour on the stage before or after. Its own F before its B and its
own B before its W are on the same device, so the order itself keeps them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autotune.schedules.engine.problem import Floats, Ints, Tables

__all__ = ["chain_rows", "time_orders"]


@njit(cache=True)
def chain_rows(tables: Tables, m: int) -> tuple[Floats, Ints, Floats, Ints, Floats, Floats, Floats]:
    """Per (kind, stage) row of codes, all of length kinds * S.

    Returns:
        duration; before: code of the chain input minus own code, 0 for none; before_hop; after: code of the chain
        reader minus own code, 0 for none; after_hop; take: activation added at the start; give: released at the end.
    """
    S = len(tables.device)
    rows = tables.kinds[0] * S
    duration = np.zeros(rows)
    before = np.zeros(rows, np.int64)
    before_hop = np.zeros(rows)
    after = np.zeros(rows, np.int64)
    after_hop = np.zeros(rows)
    take = np.zeros(rows)
    give = np.zeros(rows)
    for s in range(S):
        duration[s] = tables.forward[s]
        take[s] = tables.activation[s]
        if s > 0:
            before[s] = -m
            before_hop[s] = tables.forward_hop[s]
        if s < S - 1:
            after[s] = m
            after_hop[s] = tables.forward_hop[s + 1]
        b = S + s
        duration[b] = tables.backward[s]
        give[b] = tables.activation[s] - tables.kept[s]
        if s < S - 1:
            before[b] = m
            before_hop[b] = tables.backward_hop[s]
        if s > 0:
            after[b] = -m
            after_hop[b] = tables.backward_hop[s - 1]
        if rows > 2 * S:
            duration[2 * S + s] = tables.weight[s]
            give[2 * S + s] = tables.kept[s]
    return duration, before, before_hop, after, after_hop, take, give


@njit(cache=True)
def time_orders(
    m: int, order: Ints, duration: Floats, before: Ints, before_hop: Floats, start: Floats, place: Ints, topology: Ints
) -> float:
    """Earliest starts of complete orders; the makespan, or -1 when they deadlock.

    Args:
        order: int64[p, passes of a device].
        start, place, topology: filled: start and place in its device's order of every code, and all codes so that each
            comes after all it waits for.
    """
    p, n = order.shape
    start[:] = -1.0
    waiter = np.full(len(start), -1, np.int64)
    position = np.zeros(p, np.int64)
    ready = np.arange(p)
    top = p
    ran = 0
    makespan = 0.0
    while top > 0:
        top -= 1
        d = ready[top]
        k = position[d]
        clock = 0.0
        if k > 0:
            x = int(order[d, k - 1])
            clock = start[x] + duration[x // m]
        while k < n:
            x = int(order[d, k])
            row = x // m
            begin = clock
            if before[row] != 0:
                source = x + before[row]
                if start[source] < 0.0:
                    waiter[source] = d
                    break
                begin = max(begin, start[source] + duration[source // m] + before_hop[row])
            start[x] = begin
            place[x] = k
            topology[ran] = x
            ran += 1
            clock = begin + duration[row]
            k += 1
            if waiter[x] >= 0:
                ready[top] = waiter[x]
                waiter[x] = -1
                top += 1
        position[d] = k
        makespan = max(makespan, clock)
    return makespan if ran == p * n else -1.0
