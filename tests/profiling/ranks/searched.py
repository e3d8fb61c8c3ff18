"""Schedules that the engine finds for random costs, memory limits and placements: cases of the gradient proof."""

from __future__ import annotations

import functools
import random

from autotune.schedules.engine import QUICK, best_schedule, uniform_share
from autotune.schedules.schedule import Schedule

__all__ = ["SEARCHED", "searched_schedule"]

# (seed, devices): every third one has four devices.
SEARCHED = tuple((seed, 4 if seed % 3 == 0 else 2) for seed in range(20))


@functools.cache
def searched_schedule(seed: int, devices: int) -> Schedule:
    """The same schedule for the same arguments on every rank."""
    draw = random.Random(seed)
    forward, backward, weight = (round(draw.uniform(0.4, 2.0), 2) for _ in range(3))
    costs = uniform_share(forward, backward, weight, round(draw.uniform(0.0, 0.4), 2))
    placement = (None, "linear", "v", "loop")[seed % 4]
    stages = draw.choice((2, 3, 4)) if placement == "loop" else None
    microbatches = draw.randint(2, 9)
    limit = max(1.5, draw.uniform(1.0, devices + 1.0))
    found = best_schedule(
        devices, microbatches, costs, limit, placement=placement, stages_per_device=stages, effort=QUICK, seed=seed
    )
    return found.timeline.schedule
