"""What the guard assumes of named schedules, held against all of them."""

from __future__ import annotations

from random import Random

import pytest

from autotune.schedules.costs import PassCosts
from autotune.schedules.engine.guard import UNSTEADY, margin, short_enough
from autotune.schedules.engine.problem import Problem
from autotune.schedules.registry import SCHEDULES
from autotune.schedules.simulate import simulate

COSTS = ((1, 1, 1, 0), (1, 1.2, 0.7, 0.05), (1, 1.5, 0.6, 0.2), (1, 0.8, 0.3, 0.5), (1, 2, 1.5, 0.1))


def uneven(placement: tuple[int, ...]) -> list[PassCosts]:
    """A heavy head, and random stages."""
    stages = len(placement)
    rest = (1.0,) * (stages - 1)
    heavy = (*rest, 3.0)
    random = Random(stages)
    found = [PassCosts(heavy, heavy, heavy, 0.05, (*rest, 1.5), (*rest, 0.5))]
    for _ in range(3):
        rows = [tuple(random.uniform(0.5, 2.0) for _ in placement) for _ in range(4)]
        found.append(PassCosts(rows[0], rows[1], rows[2], random.choice([0.0, 0.3]), rows[3], rows[3]))
    return found


@pytest.mark.parametrize("name", sorted(name for name, kind in SCHEDULES.items() if kind.search is None))
def test_a_short_schedule_tells_peak_and_time_of_a_long_one(name: str) -> None:
    kind = SCHEDULES[name]
    stages = (2, 4) if kind.max_stages_per_device is None else (kind.min_stages_per_device,)
    compared = 0
    for p in (2, 3, 5, 8):
        for v in stages:
            for m in (2 * p + 1, 3 * p, 4 * p - 1, 5 * p):
                few = short_enough(kind, p, m)
                if few is None or kind.microbatches_problem(p, m):
                    continue
                short, long = kind.generate(p, few, v), kind.generate(p, m, v)
                for costs in [PassCosts.uniform(short.placement, *c) for c in COSTS] + uneven(short.placement):
                    told, true = simulate(short, costs), simulate(long, costs)
                    for shorter, longer in zip(told.peak_activation, true.peak_activation, strict=True):
                        assert shorter <= longer
                    pace = Problem(short.placement, m, costs).busiest_work
                    assert (told.makespan + (m - few) * pace) * (1 - margin(costs)) <= true.makespan
                    compared += 1
    assert compared or name in UNSTEADY
