"""Lower bounds on the makespan of any schedule of a problem under its caps.

Four arguments, per device d with work w_d per microbatch, each valid for unequal stages, latencies and caps:

- work: w_d for every microbatch, after the chain of F that reaches d's first stage; and the F and B work alone, before
  the chain of B that leaves d's first stage and the W of stage 0.
- fill and drain: before the first B can start on d only F run there, no more than fit the cap; after the last F of d
  only B and W run there, no more than the cap can hold. What does not fit is idle time. With equal unit passes on a V
  this is the 6 n + 6 p - 3 k - 1 of "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362, appendix).
- path: all F (or all B) of a device, before or after the chain that leads to them or follows them.
- memory area: each microbatch occupies activation x time at least as long as its chain takes from F to B; a device
  offers cap x time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.schedules.engine.problem import CAP_TOLERANCE, Problem

__all__ = ["Bounds", "lower_bounds"]


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of the makespan, in the time unit of the costs."""

    work: float
    fill_drain: float
    path: float
    memory_area: float

    @property
    def best(self) -> float:
        """The largest one."""
        return max(self.work, self.fill_drain, self.path, self.memory_area)


def lower_bounds(problem: Problem, limit: float | Sequence[float]) -> Bounds:
    """Bounds for every schedule of `problem` that keeps each device within `limit`.

    Args:
        limit: most activation of a device, in the memory unit of the costs; one number or one per device.
    """
    tables = problem.tables
    m = problem.microbatches
    f, b, w = tables.forward, tables.backward, tables.weight
    # Earliest start of F and of B of every stage; time from the start of B of a stage to the end of W of stage 0.
    reach = np.concatenate(([0.0], np.cumsum(f[:-1] + tables.forward_hop[1:])))
    leave = np.cumsum(b + np.concatenate(([0.0], tables.backward_hop[:-1]))) + w[0]
    # From the start of F of a stage to the start of its B.
    turn = np.concatenate((np.cumsum((f[:-1] + tables.forward_hop[1:])[::-1])[::-1], [0.0])) + f[-1]
    turn += np.concatenate((np.cumsum((b[1:] + tables.backward_hop[:-1])[::-1])[::-1], [0.0]))
    work = fill_drain = path = area = 0.0
    for device, cap in enumerate(problem.caps(limit)):
        held = np.flatnonzero(tables.device == device)
        low, high = held[0], held[-1]
        activation, kept = tables.activation[held], tables.kept[held]
        cap = _usable(cap, activation, kept)
        load = float((f + b + w)[held].sum())
        all_f, all_b = float(f[held].sum()), float(b[held].sum())
        head, out = float(reach[low]), float(leave[low] - b[low])
        first_b = float(min(reach[s] + turn[s] for s in held))
        last = float(turn[high] - f[high] + leave[high])  # from the end of the device's last F to the end of the step
        work = max(work, head + m * load, head + m * (all_f + all_b) + out)
        path = max(
            path,
            head + (m - 1) * float(f[low]) + float(turn[low] + leave[low]),
            head + m * all_f + last,
            first_b + m * all_b + out,
        )
        lifetime = float((activation * (turn[held] + b[held]) + kept * w[held]).sum())
        if lifetime > 0:
            area = max(area, head + m * lifetime / cap)
        if m * float(activation.sum()) > cap:
            # Not all F fit before the first B, so the first B is before the last F.
            before = min(first_b - head, cap * _most(f[held], activation))
            after = min(last, cap * max(_most((b + w)[held], activation), _most(w[held], kept)))
            fill_drain = max(
                fill_drain,
                first_b + m * load - before,
                head + m * load - after + last,
                first_b + m * load - before - after + last,
            )
    scale = problem.scale
    return Bounds(work / scale, fill_drain / scale, path / scale, area / scale)


def _usable(cap: float, activation: np.ndarray, kept: np.ndarray) -> float:
    """What of a cap can be filled: equal stages fill whole multiples only."""
    cap = cap * (1 + CAP_TOLERANCE)
    size = float(activation[0])
    if size > 0 and np.all(activation == size) and np.all((kept == size) | (kept == 0)):
        return math.floor(cap / size) * size
    return cap


def _most(times: np.ndarray, sizes: np.ndarray) -> float:
    """Most time per unit of memory."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(times > 0, times / sizes, 0.0)
    return float(rates.max())
