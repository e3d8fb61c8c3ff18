"""Complete orders as a graph: chain neighbours of a pass, and its first timing.

A complete order holds every pass of every device (codes as in `backfill`). A pass waits for the pass before it on its
device and, when it is an F or B, for its chain neighbour on the stage before or after. Its own F before its B and its
own B before its W are on the same device, so the order itself keeps them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autotune.schedules.engine.problem import Floats, Ints, Tables

__all__ = [
    "AFTER",
    "AFTER_HOP",
    "BEFORE",
    "BEFORE_HOP",
    "CHANGED",
    "DEVICE",
    "DURATION",
    "GIVE",
    "OLD_START",
    "PLACE",
    "RANK",
    "REGION",
    "ROW",
    "START",
    "TAIL",
    "TAKE",
    "TOPOLOGY",
    "blank_state",
    "chain_rows",
    "time_orders",
]

# Everything the kernels need is packed into four tables, whose rows are numbered here: a call that hands over twenty
# arrays spends more time counting references than working.
# links, int64[3, kinds * S], by (kind, stage): device; code of the chain input, and of the chain reader, minus the own
# code (0 for none).
DEVICE, BEFORE, AFTER = range(3)
# costs, float64[5, kinds * S], by (kind, stage): time; latency of the input and of the reader; activation added at the
# start and released at the end.
DURATION, BEFORE_HOP, AFTER_HOP, TAKE, GIVE = range(5)
# whole, int64[6, codes]: (kind, stage) and place on its device of every code; its rank in a topological order; the code
# of every rank; scratch for a region of ranks and for changed codes.
ROW, PLACE, RANK, TOPOLOGY, REGION, CHANGED = range(6)
# times, float64[3, codes]: longest path to the start of every code, and from its end to the end of the step; scratch
# for starts before they changed.
START, TAIL, OLD_START = range(3)


@njit(cache=True)
def chain_rows(tables: Tables, m: int) -> tuple[Ints, Floats]:
    """`links` and `costs` of a problem."""
    S = len(tables.device)
    rows = tables.kinds[0] * S
    links = np.zeros((3, rows), np.int64)
    costs = np.zeros((5, rows))
    for row in range(rows):
        links[DEVICE, row] = tables.device[row % S]
    for s in range(S):
        costs[DURATION, s] = tables.forward[s]
        costs[TAKE, s] = tables.activation[s]
        if s > 0:
            links[BEFORE, s] = -m
            costs[BEFORE_HOP, s] = tables.forward_hop[s]
        if s < S - 1:
            links[AFTER, s] = m
            costs[AFTER_HOP, s] = tables.forward_hop[s + 1]
        b = S + s
        costs[DURATION, b] = tables.backward[s]
        costs[GIVE, b] = tables.activation[s] - tables.kept[s]
        if s < S - 1:
            links[BEFORE, b] = m
            costs[BEFORE_HOP, b] = tables.backward_hop[s]
        if s > 0:
            links[AFTER, b] = -m
            costs[AFTER_HOP, b] = tables.backward_hop[s - 1]
        if rows > 2 * S:
            costs[DURATION, 2 * S + s] = tables.weight[s]
            costs[GIVE, 2 * S + s] = tables.kept[s]
    return links, costs


@njit(cache=True)
def blank_state(m: int, rows: int) -> tuple[Ints, Floats]:
    """`whole`, with the rows of all codes, and `times`."""
    codes = rows * m
    whole = np.zeros((6, codes), np.int64)
    for x in range(codes):
        whole[ROW, x] = x // m  # dividing in the kernels would take most of their time
    return whole, np.zeros((3, codes))


@njit(cache=True)
def time_orders(order: Ints, links: Ints, costs: Floats, whole: Ints, times: Floats) -> float:
    """Earliest starts of complete orders; the makespan, or -1 when they deadlock.

    Args:
        order: int64[p, passes of a device].
        whole, times: START, PLACE and TOPOLOGY are filled.
    """
    p, n = order.shape
    times[START, :] = -1.0
    waiter = np.full(times.shape[1], -1, np.int64)
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
            clock = times[START, x] + costs[DURATION, whole[ROW, x]]
        while k < n:
            x = int(order[d, k])
            row = whole[ROW, x]
            begin = clock
            if links[BEFORE, row] != 0:
                source = x + links[BEFORE, row]
                if times[START, source] < 0.0:
                    waiter[source] = d
                    break
                begin = max(begin, times[START, source] + costs[DURATION, whole[ROW, source]] + costs[BEFORE_HOP, row])
            times[START, x] = begin
            whole[PLACE, x] = k
            whole[TOPOLOGY, ran] = x
            ran += 1
            clock = begin + costs[DURATION, row]
            k += 1
            if waiter[x] >= 0:
                ready[top] = waiter[x]
                waiter[x] = -1
                top += 1
        position[d] = k
        makespan = max(makespan, clock)
    return makespan if ran == p * n else -1.0
