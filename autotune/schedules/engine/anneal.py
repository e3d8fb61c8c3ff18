"""Annealing of complete orders on their critical path.

A move takes one pass a few places past its neighbours on its device. Most moves are refused by a look at the moved
passes alone: with the longest path up to each pass (its start) and from each pass to the end (its tail), what the new
order can reach is known in a few steps, as in tabu search for job shops (Taillard 1994; Nowicki and Smutnicki 1996).
The others are timed by following only what changes (see `follow`).

The budget is counted in passes looked at, so a result depends on the seed alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autotune.schedules.engine.follow import all_tails, follow_starts, follow_tails, repair_topology, restore_topology
from autotune.schedules.engine.graph import (
    AFTER,
    AFTER_HOP,
    BEFORE,
    BEFORE_HOP,
    CHANGED,
    DEVICE,
    DURATION,
    GIVE,
    OLD_START,
    PLACE,
    RANK,
    ROW,
    START,
    TAIL,
    TAKE,
    TOPOLOGY,
    blank_state,
    chain_rows,
    time_orders,
)
from autotune.schedules.engine.problem import CAP_TOLERANCE, Floats, Ints, Tables

__all__ = ["anneal"]

EPS = 1e-9
ON_PATH = 0.9  # share of the moves that start on a critical path
LONGEST_MOVE = 64


@njit(cache=True)
def _critical_passes(
    order: Ints, links: Ints, costs: Floats, whole: Ints, times: Floats, makespan: float, found: Ints
) -> int:
    """Walk one critical path from its end; `found` gets the passes that start when their device becomes free."""
    p, n = order.shape
    many = 0
    x = -1
    for d in range(p):
        y = order[d, n - 1]
        if times[START, y] + costs[DURATION, whole[ROW, y]] >= makespan - EPS:
            x = y
    while x >= 0:
        row = whole[ROW, x]
        k = whole[PLACE, x]
        t = times[START, x]
        by_chain = False
        if links[BEFORE, row] != 0:
            source = x + links[BEFORE, row]
            by_chain = times[START, source] + costs[DURATION, whole[ROW, source]] + costs[BEFORE_HOP, row] >= t - EPS
        by_device = False
        if k > 0:
            y = order[links[DEVICE, row], k - 1]
            by_device = times[START, y] + costs[DURATION, whole[ROW, y]] >= t - EPS
        if by_device and (not by_chain or np.random.random() < 0.5):
            found[many] = x
            many += 1
            x = order[links[DEVICE, row], k - 1]
        elif by_chain:
            x = x + links[BEFORE, row]
        else:
            x = -1
    return many


@njit(cache=True)
def _next_move(
    m: int,
    half: int,
    order: Ints,
    links: Ints,
    costs: Floats,
    whole: Ints,
    times: Floats,
    held: Floats,
    caps: Floats,
    critical: Ints,
    many: int,
    current: float,
    hot: float,
    cold: float,
    spent: int,
    budget: int,
    sequence: Ints,
    level_of: Floats,
    begin_of: Floats,
) -> tuple[int, int, int, bool, float, int]:
    """Draw moves until one fits its cap and may be accepted, or the budget is spent.

    One long function, because almost all the time of the annealing is spent here: calls would cost more than the steps.

    Args:
        half: codes of one kind (S m).
        sequence, level_of: filled with the moved passes in their new order, and the activation held after each.
        begin_of: scratch.

    Returns:
        Device, first and last place, whether the first pass goes last (else the last one goes first), the largest
        makespan to accept, passes looked at; the device is -1 when the budget is spent.
    """
    p, n = order.shape
    row_of, place = whole[ROW], whole[PLACE]
    device_of, before, after = links[DEVICE], links[BEFORE], links[AFTER]
    duration, before_hop, after_hop = costs[DURATION], costs[BEFORE_HOP], costs[AFTER_HOP]
    take, give = costs[TAKE], costs[GIVE]
    start, tail = times[START], times[TAIL]
    far = min(LONGEST_MOVE, max(4, 3 * n // m))
    while spent < budget:
        spent += 2
        # A pass, mostly on the critical path, that goes some places earlier, or its neighbour later.
        if many > 0 and np.random.random() < ON_PATH:
            x = critical[np.random.randint(many)]
            d = device_of[row_of[x]]
            k = place[x]
            later = np.random.random() < 0.5
            if later:
                k -= 1
        else:
            d = np.random.randint(p)
            k = np.random.randint(n)
            later = np.random.random() < 0.5
        u = np.random.random()
        steps = 1
        if u >= 0.85:
            steps = 1 + np.random.randint(far)
        elif u >= 0.45:
            steps = 1 + np.random.randint(4)
        # Not past its own kind and stage, its own F, B and W, or its chain neighbour.
        x = order[d, k]
        row = row_of[x]
        link = after[row] if later else before[row]
        own = x % half
        to = k
        for _ in range(steps):
            j = to + 1 if later else to - 1
            if j < 0 or j >= n:
                break
            y = order[d, j]
            if row_of[y] == row or y % half == own or (link != 0 and y == x + link):
                break
            to = j
        if to == k:
            continue
        low, high = min(k, to), max(k, to)
        length = high - low + 1
        spent += length
        if later:
            for j in range(length - 1):
                sequence[j] = order[d, low + j + 1]
            sequence[length - 1] = x
        else:
            sequence[0] = x
            for j in range(length - 1):
                sequence[j + 1] = order[d, low + j]
        # Within the cap?
        cap = caps[d] * (1.0 + CAP_TOLERANCE)
        level = held[d, low - 1] if low > 0 else 0.0
        good = True
        for j in range(length):
            row = row_of[sequence[j]]
            level += take[row]
            if level > cap:
                good = False
                break
            level -= give[row]
            level_of[j] = level
        if not good:
            continue
        # Paths through the moved passes, with starts and tails around them as they are.
        temperature = hot * (cold / hot) ** (spent / budget)
        threshold = current - temperature * np.log(1.0 - np.random.random()) + EPS
        clock = 0.0
        if low > 0:
            y = order[d, low - 1]
            clock = start[y] + duration[row_of[y]]
        for j in range(length):
            y = sequence[j]
            row = row_of[y]
            if before[row] != 0:
                source = y + before[row]
                clock = max(clock, start[source] + duration[row_of[source]] + before_hop[row])
            begin_of[j] = clock
            clock += duration[row]
        rest = 0.0
        if high < n - 1:
            y = order[d, high + 1]
            rest = duration[row_of[y]] + tail[y]
        for j in range(length - 1, -1, -1):
            y = sequence[j]
            row = row_of[y]
            if after[row] != 0:
                z = y + after[row]
                rest = max(rest, after_hop[row] + duration[row_of[z]] + tail[z])
            rest += duration[row]
            if begin_of[j] + rest > threshold:
                good = False
                break
        if good:
            return d, low, high, later, threshold, spent
    return -1, 0, 0, False, 0.0, spent


@njit(cache=True)
def _rotate(order: Ints, whole: Ints, d: int, low: int, high: int, later: bool) -> None:
    """Move the pass at `low` to `high` (later) or the one at `high` to `low`; the others close up."""
    if later:
        x = order[d, low]
        for j in range(low, high):
            order[d, j] = order[d, j + 1]
        order[d, high] = x
    else:
        x = order[d, high]
        for j in range(high, low, -1):
            order[d, j] = order[d, j - 1]
        order[d, low] = x
    for j in range(low, high + 1):
        whole[PLACE, order[d, j]] = j


@njit(cache=True)
def _held_after(order: Ints, costs: Floats, whole: Ints) -> Floats:
    """Activation each device holds after each place of its order."""
    p, n = order.shape
    held = np.zeros((p, n))
    for d in range(p):
        level = 0.0
        for k in range(n):
            row = whole[ROW, order[d, k]]
            level += costs[TAKE, row] - costs[GIVE, row]
            held[d, k] = level
    return held


@njit(cache=True)
def anneal(
    tables: Tables,
    m: int,
    caps: Floats,
    orders: Ints,
    floor: float,
    goal: float,
    hot: float,
    cold: float,
    budget: int,
    seed: int,
) -> tuple[float, Ints]:
    """Improve complete orders that fit their caps; (best makespan in engine time, best orders).

    Kept throughout: microbatches of one stage and kind in order, F before B before W, caps, no deadlock.

    Args:
        orders: int64[p, kinds * v * m]; not changed.
        floor: orders faster than this are passed over (see `ladder`).
        goal: stop when this makespan is reached (a lower bound).
        hot, cold: first and last temperature, in engine time.
        budget: passes to look at.
    """
    np.random.seed(seed)
    order = orders.copy()
    S = len(tables.device)
    rows = tables.kinds[0] * S
    codes, half = rows * m, S * m
    links, costs = chain_rows(tables, m)
    whole, times = blank_state(m, rows)
    current = time_orders(order, links, costs, whole, times)
    best, best_order = current, order.copy()
    if current < 0:
        return current, best_order
    for r in range(codes):
        whole[RANK, whole[TOPOLOGY, r]] = r
    all_tails(order, links, costs, whole, times)
    held = _held_after(order, costs, whole)
    sequence = np.zeros(LONGEST_MOVE + 1, np.int64)
    level_of, begin_of = np.zeros(LONGEST_MOVE + 1), np.zeros(LONGEST_MOVE + 1)
    dirty = np.zeros(codes, np.bool_)
    critical = np.zeros(codes, np.int64)
    many = _critical_passes(order, links, costs, whole, times, current, critical)
    at_best = True  # `order` is as good as the best and not copied yet
    spent = 0
    while spent < budget and best > goal + EPS:
        d, low, high, later, threshold, spent = _next_move(
            m,
            half,
            order,
            links,
            costs,
            whole,
            times,
            held,
            caps,
            critical,
            many,
            current,
            hot,
            cold,
            spent,
            budget,
            sequence,
            level_of,
            begin_of,
        )
        if d < 0:
            break
        length = high - low + 1
        _rotate(order, whole, d, low, high, later)
        # What the moved pass (or those it went behind) waits for must come before what now waits for them.
        first = sequence[length - 2] if later else sequence[0]
        then = sequence[length - 1] if later else sequence[1]
        bottom, ceiling = whole[RANK, then], whole[RANK, first]
        spent += max(0, ceiling - bottom)
        possible = repair_topology(order, links, whole, first, then, dirty)
        moved, makespan = 0, 0.0
        if possible:
            moved, makespan, looked = follow_starts(
                order, links, costs, whole, times, dirty, d, low, high, ceiling, threshold
            )
            spent += looked
        if not possible or makespan < floor or makespan > threshold:
            for j in range(moved - 1, -1, -1):
                times[START, whole[CHANGED, j]] = times[OLD_START, j]
            if possible:
                restore_topology(whole, bottom, ceiling)
            _rotate(order, whole, d, low, high, not later)
            continue
        if at_best and makespan > current + EPS:
            best_order[:] = order
            _rotate(best_order, whole, d, low, high, not later)
            for j in range(low, high + 1):
                whole[PLACE, order[d, j]] = j
            at_best = False
        current = makespan
        if current < best - EPS:
            best = current
            at_best = True
        for j in range(low, high + 1):
            held[d, j] = level_of[j - low]
        spent += follow_tails(order, links, costs, whole, times, dirty, d, low, high, ceiling)
        many = _critical_passes(order, links, costs, whole, times, current, critical)
        spent += many
    if at_best:
        best_order[:] = order
    return best, best_order
