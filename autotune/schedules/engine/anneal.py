"""Annealing of complete orders on their critical path.

A move takes one pass a few places past its neighbours on its device. Most moves are refused by a look at the moved
passes alone: with the longest path up to each pass (its start) and from each pass to the end (its tail), what the new
order can reach is known in a few steps, as in tabu search for job shops (Taillard 1994; Nowicki and Smutnicki 1996).
The others are timed by following only what changes, along a topological order repaired in place (Pearce and Kelly
2006).

The budget is counted in passes looked at, so a result depends on the seed alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autotune.schedules.engine.graph import chain_rows, time_orders
from autotune.schedules.engine.problem import CAP_TOLERANCE, Floats, Ints, Tables

__all__ = ["anneal"]

EPS = 1e-9
ON_PATH = 0.9  # share of the moves that start on a critical path


@njit(cache=True)
def _critical_pairs(
    m: int,
    order: Ints,
    device_of: Ints,
    duration: Floats,
    before: Ints,
    before_hop: Floats,
    start: Floats,
    place: Ints,
    makespan: float,
    pairs: Ints,
) -> int:
    """Walk one critical path from its end; `pairs` gets the codes that start when their device becomes free."""
    p, n = order.shape
    found = 0
    x = -1
    for d in range(p):
        y = order[d, n - 1]
        if start[y] + duration[y // m] >= makespan - EPS:
            x = y
    while x >= 0:
        row = x // m
        k = place[x]
        t = start[x]
        by_chain = False
        if before[row] != 0:
            source = x + before[row]
            by_chain = start[source] + duration[source // m] + before_hop[row] >= t - EPS
        by_device = False
        if k > 0:
            y = order[device_of[row], k - 1]
            by_device = start[y] + duration[y // m] >= t - EPS
        if by_device and (not by_chain or np.random.random() < 0.5):
            pairs[found] = x
            found += 1
            x = order[device_of[row], k - 1]
        elif by_chain:
            x = x + before[row]
        else:
            x = -1
    return found


@njit(cache=True)
def anneal(
    tables: Tables,
    m: int,
    caps: Floats,
    order: Ints,
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
        order: int64[p, kinds * v * m]; not changed.
        floor: orders faster than this are passed over (see `ladder`).
        goal: stop when this makespan is reached (a lower bound).
        hot, cold: first and last temperature, in engine time.
        budget: passes to look at.
    """
    np.random.seed(seed)
    p, n = order.shape
    S = len(tables.device)
    rows = tables.kinds[0] * S
    codes = rows * m
    half = S * m
    order = order.copy()
    duration, before, before_hop, after, after_hop, take, give = chain_rows(tables, m)
    device_of = np.zeros(rows, np.int64)
    for row in range(rows):
        device_of[row] = tables.device[row % S]
    row_of = np.zeros(codes, np.int32)
    for x in range(codes):
        row_of[x] = x // m
    start = np.zeros(codes)
    tail = np.zeros(codes)
    place = np.zeros(codes, np.int64)
    topology = np.zeros(codes, np.int64)
    rank = np.zeros(codes, np.int64)
    current = time_orders(m, order, duration, before, before_hop, start, place, topology)
    best = current
    best_order = order.copy()
    if current < 0:
        return current, best_order
    for r in range(codes):
        rank[topology[r]] = r
    for r in range(codes - 1, -1, -1):
        x = topology[r]
        row = row_of[x]
        rest = 0.0
        if place[x] < n - 1:
            y = order[device_of[row], place[x] + 1]
            rest = duration[row_of[y]] + tail[y]
        if after[row] != 0:
            y = x + after[row]
            rest = max(rest, after_hop[row] + duration[row_of[y]] + tail[y])
        tail[x] = rest
    held = np.zeros((p, n))  # after each place
    for d in range(p):
        level = 0.0
        for k in range(n):
            row = row_of[order[d, k]]
            level += take[row] - give[row]
            held[d, k] = level
    longest = 64
    sequence = np.zeros(longest, np.int64)
    level_of = np.zeros(longest)
    begin_of = np.zeros(longest)
    marked = np.zeros(codes, np.bool_)
    dirty = np.zeros(codes, np.bool_)
    region = np.zeros(codes, np.int64)
    changed = np.zeros(codes, np.int64)
    old_start = np.zeros(codes)
    pairs = np.zeros(codes, np.int64)
    paired = _critical_pairs(m, order, device_of, duration, before, before_hop, start, place, current, pairs)
    far = min(longest - 1, max(4, 3 * n // m))
    at_best = True  # `order` is the best one and not copied yet
    spent = 0
    while spent < budget and best > goal + EPS:
        temperature = hot * (cold / hot) ** (spent / budget)
        spent += 2
        # Which pass moves where.
        if paired > 0 and np.random.random() < ON_PATH:
            x = pairs[np.random.randint(paired)]
            later = np.random.random() < 0.5
            d = device_of[row_of[x]]
            k = place[x]
            if later:
                k -= 1
                x = order[d, k]
        else:
            d = np.random.randint(p)
            k = np.random.randint(n)
            later = np.random.random() < 0.5
            x = order[d, k]
        u = np.random.random()
        if u < 0.45:
            steps = 1
        elif u < 0.85:
            steps = 1 + np.random.randint(4)
        else:
            steps = 1 + np.random.randint(far)
        row = row_of[x]
        cell = x % half
        to = k
        for _ in range(steps):
            j = to + 1 if later else to - 1
            if j < 0 or j >= n:
                break
            y = order[d, j]
            if row_of[y] == row or y % half == cell:
                break
            link = after[row] if later else before[row]
            if link != 0 and y == x + link:
                break
            to = j
        if to == k:
            continue
        low = min(k, to)
        high = max(k, to)
        length = high - low + 1
        spent += length
        if later:
            for j in range(low, high):
                sequence[j - low] = order[d, j + 1]
            sequence[length - 1] = x
        else:
            sequence[0] = x
            for j in range(low, high):
                sequence[j - low + 1] = order[d, j]
        # Does it fit, and can it be fast enough?
        cap = caps[d] * (1.0 + CAP_TOLERANCE)
        level = held[d, low - 1] if low > 0 else 0.0
        legal = True
        for j in range(length):
            row = row_of[sequence[j]]
            level += take[row]
            if level > cap:
                legal = False
                break
            level -= give[row]
            level_of[j] = level
        if not legal:
            continue
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
                legal = False
                break
        if not legal:
            continue
        # Repair the topological order: what `x` (or what it went behind) waits for comes first.
        u_code = sequence[length - 2] if later else x
        v_code = x if later else sequence[1]
        bottom = rank[v_code]
        ceiling = rank[u_code]
        for j in range(length):
            order[d, low + j] = sequence[j]
            place[sequence[j]] = low + j
        cycle = False
        size = ceiling - bottom + 1
        if size > 0:
            spent += size
            marked[u_code] = True
            for r in range(ceiling, bottom - 1, -1):
                y = topology[r]
                region[r - bottom] = y
                if marked[y]:
                    continue
                row = row_of[y]
                if after[row] != 0 and marked[y + after[row]]:
                    marked[y] = True
                else:
                    device = device_of[row]
                    j = place[y] + 1
                    if j < n and marked[order[device, j]]:
                        marked[y] = True
            cycle = marked[v_code]
            if not cycle:
                r = bottom
                for j in range(size):
                    if marked[region[j]]:
                        topology[r] = region[j]
                        rank[region[j]] = r
                        r += 1
                for j in range(size):
                    if not marked[region[j]]:
                        topology[r] = region[j]
                        rank[region[j]] = r
                        r += 1
            for j in range(size):
                marked[region[j]] = False
        # Follow the changed starts.
        many = 0
        makespan = 0.0
        if not cycle:
            waiting = length
            lowest = codes
            highest = 0
            for j in range(length):
                y = sequence[j]
                dirty[y] = True
                lowest = min(lowest, rank[y])
                highest = max(highest, rank[y])
            highest = max(highest, ceiling)
            if high < n - 1:
                dirty[order[d, high + 1]] = True
                waiting += 1
            r = lowest
            while waiting > 0:
                y = topology[r]
                r += 1
                if not dirty[y]:
                    continue
                dirty[y] = False
                waiting -= 1
                spent += 1
                row = row_of[y]
                device = device_of[row]
                begin = 0.0
                j = place[y]
                if j > 0:
                    z = order[device, j - 1]
                    begin = start[z] + duration[row_of[z]]
                if before[row] != 0:
                    z = y + before[row]
                    begin = max(begin, start[z] + duration[row_of[z]] + before_hop[row])
                if begin == start[y]:
                    continue
                changed[many] = y
                old_start[many] = start[y]
                many += 1
                start[y] = begin
                if r - 1 > highest and begin + duration[row] + tail[y] > threshold:
                    legal = False
                    break
                if j < n - 1:
                    z = order[device, j + 1]
                    if not dirty[z]:
                        dirty[z] = True
                        waiting += 1
                if after[row] != 0:
                    z = y + after[row]
                    if not dirty[z]:
                        dirty[z] = True
                        waiting += 1
            spent += (r - lowest) >> 3
            while waiting > 0:
                if dirty[topology[r]]:
                    dirty[topology[r]] = False
                    waiting -= 1
                r += 1
            if legal:
                for device in range(p):
                    y = order[device, n - 1]
                    makespan = max(makespan, start[y] + duration[row_of[y]])
                legal = floor <= makespan <= threshold
        if cycle or not legal:
            for j in range(many - 1, -1, -1):
                start[changed[j]] = old_start[j]
            if not cycle and size > 0:
                for j in range(size):
                    topology[bottom + j] = region[j]
                    rank[region[j]] = bottom + j
            # Undo the rotation.
            if later:
                for j in range(high, low, -1):
                    order[d, j] = order[d, j - 1]
                order[d, low] = x
            else:
                for j in range(low, high):
                    order[d, j] = order[d, j + 1]
                order[d, high] = x
            for j in range(low, high + 1):
                place[order[d, j]] = j
            continue
        # Accept.
        if at_best and makespan > current + EPS:
            # The rotation is undone for the copy only.
            best_order[:] = order
            if later:
                for j in range(high, low, -1):
                    best_order[d, j] = order[d, j - 1]
                best_order[d, low] = x
            else:
                for j in range(low, high):
                    best_order[d, j] = order[d, j + 1]
                best_order[d, high] = x
            at_best = False
        current = makespan
        if current < best - EPS:
            best = current
            at_best = True
        for j in range(length):
            held[d, low + j] = level_of[j]
        waiting = length
        for j in range(length):
            dirty[sequence[j]] = True
        if low > 0:
            dirty[order[d, low - 1]] = True
            waiting += 1
        r = highest
        while waiting > 0:
            y = topology[r]
            r -= 1
            if not dirty[y]:
                continue
            dirty[y] = False
            waiting -= 1
            spent += 1
            row = row_of[y]
            device = device_of[row]
            rest = 0.0
            j = place[y]
            if j < n - 1:
                z = order[device, j + 1]
                rest = duration[row_of[z]] + tail[z]
            if after[row] != 0:
                z = y + after[row]
                rest = max(rest, after_hop[row] + duration[row_of[z]] + tail[z])
            if rest == tail[y]:
                continue
            tail[y] = rest
            if j > 0:
                z = order[device, j - 1]
                if not dirty[z]:
                    dirty[z] = True
                    waiting += 1
            if before[row] != 0:
                z = y + before[row]
                if not dirty[z]:
                    dirty[z] = True
                    waiting += 1
        spent += (highest - r) >> 3
        paired = _critical_pairs(m, order, device_of, duration, before, before_hop, start, place, current, pairs)
        spent += paired
    if at_best:
        best_order[:] = order
    return best, best_order
