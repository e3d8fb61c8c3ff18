"""The compiled searches: whatever they return is valid, fits, and takes as long as the simulator says."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import REAL_COSTS, assert_sound, problem_of, random_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.schedules.engine.guard import orders_of, schedule_of
from autotune.schedules.engine.problem import Problem
from autotune.schedules.engine.site import Site
from autotune.schedules.engine.starts import starts
from autotune.schedules.registry import build
from autotune.schedules.simulate import simulate


def caps_of(problem: Problem, factor: float) -> tuple[float, ...]:
    return tuple(factor * need for need in problem.smallest_caps())


@settings(max_examples=60, deadline=None)
@given(random_problems(), st.sampled_from([1.0, 1.4, 2.5, 100.0]), st.integers(0, 5))
def test_every_start_becomes_a_sound_schedule(problem: Problem, factor: float, number: int) -> None:
    caps = caps_of(problem, factor)
    site = Site(problem, caps)
    found = site.orders(starts(problem)[number])
    timeline = simulate(schedule_of(problem, found.orders, "start"), problem.costs)
    assert_sound(timeline, caps)
    # The simulator starts passes at the earliest, the search may have waited for a better one.
    assert timeline.makespan <= found.makespan / problem.scale * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(random_problems(), st.sampled_from([1.0, 1.4, 2.5]), st.integers(0, 2**20))
def test_annealing_keeps_schedules_sound_and_never_makes_them_slower(problem, factor, seed) -> None:
    caps = caps_of(problem, factor)
    site = Site(problem, caps)
    found = site.orders(starts(problem)[0])
    better = site.anneal(found, 0.0, 0.0, (1.0, 0.05), 20_000, seed)
    timeline = simulate(schedule_of(problem, better.orders, "annealed"), problem.costs)
    assert_sound(timeline, caps)
    assert timeline.makespan == pytest.approx(better.makespan / problem.scale)
    assert better.makespan <= found.makespan


def test_annealing_does_not_go_below_its_floor() -> None:
    problem = problem_of("v", 4, 8, 2, REAL_COSTS[2])
    site = Site(problem, problem.caps(3))
    found = site.orders(starts(problem)[0])
    free = site.anneal(found, 0.0, 0.0, (0.5, 0.02), 300_000, 1)
    assert free.makespan < 0.97 * found.makespan
    held = site.anneal(found, 0.98 * found.makespan, 0.0, (0.5, 0.02), 300_000, 1)
    assert 0.98 * found.makespan <= held.makespan < found.makespan


def test_equal_seeds_give_equal_orders_and_others_differ() -> None:
    problem = problem_of("v", 4, 8, 2, REAL_COSTS[2])
    site = Site(problem, problem.caps(2))
    found = site.orders(starts(problem)[1])
    runs = [site.anneal(found, 0.0, 0.0, (0.5, 0.02), 50_000, seed).orders for seed in (3, 3, 4)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_a_climb_improves_its_best_candidate() -> None:
    problem = problem_of("v", 8, 16, 2, REAL_COSTS[2])
    site = Site(problem, problem.caps(4))
    site.start(slice(0, 8))
    before = site.value
    site.climb(3, 150, 0.0, 1)
    assert site.value < before


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "v-half", "1f1b-v", "interleaved-zb", "dualpipe-v"])
def test_orders_of_named_schedules_keep_their_time_and_peak(name: str) -> None:
    schedule = build(name, 4, 8)
    problem = (
        Problem(schedule.placement, 8, problem_of("v", 4, 8, 2, REAL_COSTS[1]).costs)
        if (len(schedule.placement) == 8 and schedule.placement[4] == 3)
        else problem_of("linear" if schedule.stages == 4 else "loop", 4, 8, schedule.stages // 4, REAL_COSTS[1])
    )
    timeline = simulate(schedule, problem.costs)
    found = orders_of(problem, schedule)
    again = simulate(schedule_of(problem, found.orders, name), problem.costs)
    assert again.makespan == pytest.approx(found.makespan / problem.scale)
    assert again.makespan <= timeline.makespan * (1 + 1e-12)
    assert max(again.peak_activation) <= max(timeline.peak_activation)
