"""From target times to a complete order: the kernel that simulates one candidate.

A pass is one integer, its code: (kind * S + stage) * m + microbatch with kinds F, B, W = 0, 1, 2.

Only the order of F and B decides whether a schedule fits its memory: a B frees what its W does not need, and the W may
follow at once, so an order fits exactly when on every prefix of every device the activation of the F that have run
minus that of the B that have run is within the cap. `order_by_targets` makes such an order by sorting, `simulate` runs
it and fills the gaps without ever leaving that condition, so it can't get stuck.

A policy is five numbers (float64[5], indices POLICY_*): what fills a gap first, how far a filling B or F and a filling
W may overrun the gap (as a share of its own time), how many W may wait, how many entries of the order are looked at.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autotune.schedules.engine.problem import CAP_TOLERANCE, Floats, Ints, Tables

__all__ = [
    "FILL_BFW",
    "FILL_BWF",
    "FILL_NONE",
    "FILL_WBF",
    "NEVER",
    "POLICY_FILL",
    "POLICY_LOOK",
    "POLICY_OVERRUN",
    "POLICY_OVERRUN_W",
    "POLICY_WAITING",
    "evaluate",
    "order_by_targets",
    "simulate",
]

NEVER = 1e18
EPS = 1e-9

POLICY_FILL, POLICY_OVERRUN, POLICY_OVERRUN_W, POLICY_WAITING, POLICY_LOOK = range(5)
FILL_NONE, FILL_BWF, FILL_BFW, FILL_WBF = range(4)

PERIOD_STEPS = 160  # 1.02^40 * 1.1^120: more than enough to serialise any pipeline


@njit(cache=True)
def order_by_targets(
    tables: Tables, m: int, caps: Floats, offset: Floats, period: float, spread: float, group: int, order: Ints
) -> bool:
    """Sort the F and B of every device by target time; False as soon as a prefix exceeds its cap.

    Microbatch i of the pass at position x of the chain (F of stage 0..S-1, then B of stage S-1..0) aims at
    offset[x] + (i // group) * group * period + (i % group) * spread.

    Args:
        offset: targets of microbatch 0: F of every stage, then B of every stage; float64[2 S].
        order: filled with codes; int64[p, 2 v m].
    """
    p, v = tables.stages_of.shape
    S = p * v
    half = S * m
    following = np.zeros(2 * v, np.int64)
    aim = np.zeros(2 * v)
    for d in range(p):
        for j in range(2 * v):
            following[j] = 0
            s = tables.stages_of[d, j % v]
            aim[j] = offset[s] if j < v else offset[S + s]
        held = 0.0
        cap = caps[d] * (1.0 + CAP_TOLERANCE)
        for k in range(2 * v * m):
            first = 0
            for j in range(1, 2 * v):
                if aim[j] < aim[first]:
                    first = j
            s = tables.stages_of[d, first % v]
            i = following[first]
            order[d, k] = (half if first >= v else 0) + s * m + i
            i += 1
            following[first] = i
            if i >= m:
                aim[first] = NEVER
            else:
                base = offset[s] if first < v else offset[S + s]
                aim[first] = base + (i // group) * group * period + (i % group) * spread
            if first < v:
                held += tables.activation[s]
                if held > cap:
                    return False
            else:
                held -= tables.activation[s]
    return True


@njit(cache=True, inline="always")
def _arrival(S: int, m: int, row: int, forward_hop: Floats, backward_hop: Floats, end: Floats, code: int) -> float:
    """When the inputs of an F or B (row = kind * S + stage) are on its device; NEVER while one of them has not run."""
    half = S * m
    if row < S:
        s = row
        if s == 0:
            return 0.0
        done = end[code - m]
        return NEVER if done < 0.0 else done + forward_hop[s]
    own = end[code - half]
    if own < 0.0:
        return NEVER
    s = row - S
    if s == S - 1:
        return own
    done = end[code + m]
    return NEVER if done < 0.0 else max(own, done + backward_hop[s])


@njit(cache=True)
def simulate(
    tables: Tables, m: int, caps: Floats, order: Ints, policy: Floats, record: bool, complete: Ints, end: Floats
) -> float:
    """Run an order of F and B that fits its caps, place the W, fill gaps; the makespan in engine time.

    Args:
        order: codes of F and B; int64[p, 2 v m].
        record: whether to write the resulting complete orders to `complete`, int64[p, kinds * v * m].
        end: scratch; float64[2 S m], filled with the ends of F and B.
    """
    # Fields are read once: in the loop each access would count references.
    (
        device,
        _,
        slot,
        forward_time,
        backward_time,
        weight_time,
        forward_hop,
        backward_hop,
        activation,
        left_over,
        kinds,
    ) = tables
    p, v = tables.stages_of.shape
    S = p * v
    half = S * m
    n = 2 * v * m
    split = kinds[0] == 3
    fill = int(policy[POLICY_FILL])
    overrun = policy[POLICY_OVERRUN]
    overrun_w = policy[POLICY_OVERRUN_W]
    most_waiting = policy[POLICY_WAITING]
    look = int(policy[POLICY_LOOK])
    row_of = np.empty(2 * half, np.int32)  # dividing codes by m would take a fifth of the time
    for row in range(2 * S):
        for x in range(row * m, row * m + m):
            row_of[x] = row
            end[x] = -1.0
    free = np.zeros(p)  # when the device ends its pass
    wake = np.zeros(p)  # when it decides next
    head = np.zeros(p, np.int64)
    done = np.zeros((p, n), np.bool_)
    opened = np.zeros(p)  # activation of F without their B
    kept = np.zeros(p)  # activation of B without their W
    queue = np.zeros((p, v * m if split else 1), np.int64)
    first_w = np.zeros(p, np.int64)
    last_w = np.zeros(p, np.int64)
    recorded = np.zeros(p, np.int64)
    left = p * n + (p * v * m if split else 0)
    makespan = 0.0
    while left > 0:
        d = 0
        t = wake[0]
        for e in range(1, p):
            if wake[e] < t:
                t = wake[e]
                d = e
        if t >= NEVER:
            return NEVER
        cap = caps[d] * (1.0 + CAP_TOLERANCE)
        k0 = head[d]
        while k0 < n and done[d, k0]:
            k0 += 1
        head[d] = k0
        waiting = last_w[d] - first_w[d]
        choice = -1  # a place in the order, or -2 for the oldest W
        sleep = NEVER
        if k0 >= n:
            if waiting == 0:
                wake[d] = NEVER
                continue
            choice = -2
        else:
            code = order[d, k0]
            ready = _arrival(S, m, row_of[code], forward_hop, backward_hop, end, code)
            blocked = code < half and opened[d] + kept[d] + activation[row_of[code]] > cap
            time_w = weight_time[row_of[queue[d, first_w[d]]]] if waiting > 0 else 0.0
            if waiting > most_waiting:
                choice = -2
            elif ready <= t + EPS and not blocked:
                choice = k0
            elif blocked and waiting > 0 and ready <= t + time_w + EPS:
                choice = -2
            else:
                gap = ready - t
                if not blocked:
                    sleep = ready
                fit_b = -1
                fit_f = -1
                if fill != FILL_NONE:
                    # An F may be taken early if every prefix up to its place still fits with it: then the rest of the
                    # order stays feasible.
                    prefix = opened[d]
                    most = prefix
                    seen = 0
                    for k in range(k0, min(n, k0 + look)):
                        if done[d, k]:
                            continue
                        y = order[d, k]
                        forward = y < half
                        s = row_of[y] if forward else row_of[y] - S
                        bit = 1 << (slot[s] if forward else v + slot[s])
                        if k > k0 and seen & bit == 0:
                            arrives = _arrival(S, m, row_of[y], forward_hop, backward_hop, end, y)
                            legal = not forward or most + activation[s] <= cap
                            if arrives <= t + EPS:
                                time = forward_time[s] if forward else backward_time[s]
                                if time * (1.0 - overrun) <= gap + EPS:
                                    if not forward:
                                        if fit_b < 0:
                                            fit_b = k
                                    elif fit_f < 0 and legal and opened[d] + kept[d] + activation[s] <= cap:
                                        fit_f = k
                            elif arrives < sleep and legal:
                                sleep = arrives
                        seen |= bit
                        if forward:
                            prefix += activation[s]
                            most = max(most, prefix)
                        else:
                            prefix -= activation[s]
                fit_w = waiting > 0 and time_w * (1.0 - overrun_w) <= gap + EPS
                if fill == FILL_WBF and fit_w:
                    choice = -2
                elif fit_b >= 0:
                    choice = fit_b
                elif fill == FILL_BFW and fit_f >= 0:
                    choice = fit_f
                elif fit_w:
                    choice = -2
                elif fit_f >= 0:
                    choice = fit_f
                if choice == -1 and sleep <= t + EPS:
                    sleep = ready if t + EPS < ready < NEVER else NEVER
        if choice == -1:
            wake[d] = sleep
            continue
        left -= 1
        if choice == -2:
            code = queue[d, first_w[d]]
            first_w[d] += 1
            s = row_of[code]
            kept[d] -= left_over[s]
            free[d] = t + weight_time[s]
            if record:
                complete[d, recorded[d]] = 2 * half + code
                recorded[d] += 1
        else:
            code = order[d, choice]
            done[d, choice] = True
            if record:
                complete[d, recorded[d]] = code
                recorded[d] += 1
            receiver = d
            arrives = 0.0
            if code < half:
                s = row_of[code]
                opened[d] += activation[s]
                finished = t + forward_time[s]
                if s < S - 1:
                    receiver = device[s + 1]
                    arrives = finished + forward_hop[s + 1]
            else:
                s = row_of[code] - S
                opened[d] -= activation[s]
                if split:
                    kept[d] += left_over[s]
                    queue[d, last_w[d]] = code - half
                    last_w[d] += 1
                finished = t + backward_time[s]
                if s > 0:
                    receiver = device[s - 1]
                    arrives = finished + backward_hop[s - 1]
            end[code] = finished
            free[d] = finished
            if receiver != d:
                # A waiting device may have something to do earlier than it thought; a working one not before its end.
                earliest = max(arrives, free[receiver])
                if earliest < wake[receiver]:
                    wake[receiver] = earliest
        wake[d] = free[d]
        if free[d] > makespan:
            makespan = free[d]
    return makespan


@njit(cache=True)
def evaluate(
    tables: Tables,
    m: int,
    more: int,
    caps: Floats,
    increments: Floats,
    period: float,
    tau: float,
    group: int,
    policy: Floats,
    order: Ints,
    record: bool,
    complete: Ints,
    end: Floats,
) -> tuple[float, float]:
    """Time one candidate: chain increments to targets to an order that fits, simulated; (makespan, period used).

    The period grows until the order fits the caps: what a device holds is about lifespan / period, so this ends.

    Args:
        more: microbatches beyond m that are not simulated but added at the pace of the middle third.
        increments: time from each position of the chain to the next; float64[2 S].
        tau: targets inside a group are tau * period apart.
    """
    p, v = tables.stages_of.shape
    S = p * v
    offset = np.zeros(2 * S)
    total = 0.0
    for j in range(2 * S):
        total += increments[j]
        offset[j if j < S else 3 * S - 1 - j] = total
    fits = False
    for step in range(PERIOD_STEPS):
        fits = order_by_targets(tables, m, caps, offset, period, tau * period, group, order)
        if fits:
            break
        period *= 1.02 if step < 40 else 1.1
    if not fits:
        return NEVER, period
    makespan = simulate(tables, m, caps, order, policy, record, complete, end)
    if more > 0 and makespan < NEVER:
        low = m // 3
        high = 2 * m // 3
        base = S * m  # B of stage 0
        pace = (end[base + high] - end[base + low]) / (high - low)
        for d in range(p):
            work = 0.0
            for j in range(v):
                s = tables.stages_of[d, j]
                work += tables.forward[s] + tables.backward[s] + tables.weight[s]
            pace = max(pace, work)
        makespan += more * pace
    return makespan, period
