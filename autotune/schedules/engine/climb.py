"""Hill climb on a candidate: its target times, its period and its filling policy."""

from __future__ import annotations

import numpy as np
from numba import njit

from autotune.schedules.engine.backfill import (
    FILL_NONE,
    NEVER,
    POLICY_FILL,
    POLICY_LOOK,
    POLICY_OVERRUN,
    POLICY_OVERRUN_W,
    POLICY_WAITING,
    evaluate,
)
from autotune.schedules.engine.problem import Floats, Tables

__all__ = ["climb"]

EPS = 1e-9
LEAST = 1e-3  # targets along the chain must ascend


@njit(cache=True)
def _shift_leg(increments: Floats, p: int, legs: int, size: float) -> None:
    """Change the hops of one leg, or of its beginning or end, by one amount."""
    leg = np.random.randint(legs)
    change = np.random.normal() * size * (0.02 if np.random.random() < 0.5 else 0.12)
    low, high = 0, p
    if np.random.random() < 0.3:
        if np.random.random() < 0.5:
            low = np.random.randint(p)
        else:
            high = np.random.randint(p) + 1
    for j in range(leg * p + max(low, 1), leg * p + high):
        increments[j] = max(LEAST, increments[j] + change)


@njit(cache=True)
def _vary_policy(policy: Floats, v: int, most_waiting: int) -> None:
    """Change one field of the policy."""
    field = np.random.randint(5)
    if field == 0:
        policy[POLICY_FILL] = FILL_NONE + np.random.randint(4)
    elif field == 1:
        policy[POLICY_OVERRUN] = np.random.random()
        if np.random.random() < 0.3:
            policy[POLICY_OVERRUN] = 0.0
    elif field == 2:
        policy[POLICY_OVERRUN_W] = 0.0 if np.random.random() < 0.5 else np.random.random()
        if np.random.random() < 0.2:
            policy[POLICY_OVERRUN_W] = 100.0  # run a W at any gap
    elif field == 3:
        policy[POLICY_WAITING] = NEVER if np.random.random() < 0.4 else np.random.randint(most_waiting + 1)
    else:
        policy[POLICY_LOOK] = 2 + np.random.randint(12 * v)


@njit(cache=True)
def climb(
    tables: Tables,
    m: int,
    more: int,
    caps: Floats,
    increments: Floats,
    period: float,
    tau: float,
    group: int,
    policy: Floats,
    work: float,
    floor: float,
    seed: int,
    evaluations: int,
) -> tuple[float, Floats, float, float, Floats]:
    """The best of `evaluations` neighbours in a row; equal ones are accepted, so that it drifts over plateaus.

    Args:
        work: work of a device for one microbatch, the size of the moves.
        floor: candidates faster than this are passed over (see `ladder`).

    Returns:
        (makespan, increments, period, tau, policy).
    """
    np.random.seed(seed)
    p, v = tables.stages_of.shape
    S = p * v
    order = np.zeros((p, 2 * v * m), np.int64)
    complete = np.zeros((1, 1), np.int64)
    end = np.zeros(2 * S * m)
    best, period = evaluate(tables, m, more, caps, increments, period, tau, group, policy, order, False, complete, end)
    legs = 2 * v
    most_waiting = min(v * m, 2 * v * p)
    for _ in range(evaluations):
        new_increments = increments.copy()
        new_policy = policy.copy()
        new_period = period
        new_tau = tau
        u = np.random.random()
        if u < 0.40:
            _shift_leg(new_increments, p, legs, work)
            if np.random.random() < 0.4:
                _shift_leg(new_increments, p, legs, work)
        elif u < 0.60 and legs > 1:
            j = (1 + np.random.randint(legs - 1)) * p
            new_increments[j] = max(LEAST, new_increments[j] + np.random.normal() * work * 0.3)
        elif u < 0.72:
            j = np.random.randint(2 * S)
            new_increments[j] = max(LEAST, new_increments[j] + np.random.normal() * work * 0.3)
        elif u < 0.82:
            new_period = period * (0.9 + 0.15 * np.random.random())
        elif u < 0.86 and group > 1:
            new_tau = min(1.0, max(0.05, tau * (1 + 0.2 * np.random.normal())))
        else:
            _vary_policy(new_policy, v, most_waiting)
            if np.random.random() < 0.5:
                new_period = period * (0.9 + 0.15 * np.random.random())
        value, new_period = evaluate(
            tables, m, more, caps, new_increments, new_period, new_tau, group, new_policy, order, False, complete, end
        )
        if floor <= value <= best + EPS:
            best = value
            increments = new_increments
            period = new_period
            tau = new_tau
            policy = new_policy
    return best, increments, period, tau, policy
