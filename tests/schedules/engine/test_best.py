"""The best schedule for a limit: sound, within it, never slower than named ones, never slower with more memory."""

from __future__ import annotations

import gc

import pytest
from engine_cases import REAL_COSTS, TINY, assert_sound, random_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.schedules.costs import PassCosts
from autotune.schedules.engine import (
    QUICK,
    best_schedule,
    fixed_stages,
    memory_front,
    node_latencies,
    smallest_memory,
    uniform_share,
)
from autotune.schedules.engine.problem import Problem
from autotune.schedules.registry import SCHEDULES, build
from autotune.schedules.simulate import simulate


def within(peak, limit: float) -> bool:
    return max(peak) <= limit * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(random_problems(), st.floats(1.0, 4.0), st.integers(0, 3))
def test_results_are_sound_for_any_costs_and_limit(problem: Problem, factor: float, seed: int) -> None:
    limit = factor * max(problem.smallest_caps())
    best = best_schedule(
        problem.devices,
        problem.microbatches,
        fixed_stages(problem.costs),
        limit,
        placement=problem.kind,
        fused=problem.fused,
        effort=TINY,
        seed=seed,
    )
    assert best.timeline.schedule.placement == problem.placement
    assert_sound(best.timeline, (limit,) * problem.devices)
    assert best.lower_bound <= best.makespan
    if problem.fused:
        assert {item.kind for row in best.timeline.schedule.order for item in row} == {"F", "BW"}


@settings(max_examples=15, deadline=None)
@given(random_problems(), st.lists(st.floats(1.0, 6.0), min_size=3, max_size=3))
def test_more_memory_is_never_slower(problem: Problem, factors: list[float]) -> None:
    source = fixed_stages(problem.costs)
    least = max(problem.smallest_caps())
    spans = [
        best_schedule(
            problem.devices,
            problem.microbatches,
            source,
            factor * least,
            placement=problem.kind,
            fused=problem.fused,
            effort=TINY,
        ).makespan
        for factor in sorted(factors)
    ]
    assert spans[0] * (1 + 1e-9) >= spans[1]
    assert spans[1] * (1 + 1e-9) >= spans[2]


@settings(max_examples=12, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 12),
    st.sampled_from(REAL_COSTS),
    st.lists(st.floats(1.0, 8.0), min_size=2, max_size=2),
)
def test_more_memory_is_never_slower_over_all_placements(p, m, costs, limits) -> None:
    low, high = (best_schedule(p, m, uniform_share(*costs), limit, effort=TINY).makespan for limit in sorted(limits))
    assert high <= low * (1 + 1e-9)


@pytest.mark.parametrize("costs", REAL_COSTS)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (5, 12)])
@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_no_named_schedule_that_fits_is_faster(p: int, m: int, costs, share: float) -> None:
    limit = share * p
    best = best_schedule(p, m, uniform_share(*costs), limit, effort=TINY)
    for name, kind in SCHEDULES.items():
        stages = (2, 3, 4) if kind.max_stages_per_device is None else (kind.min_stages_per_device,)
        if kind.microbatches_problem(p, m):
            continue
        for v in stages:
            schedule = build(name, p, m, v)
            timeline = simulate(schedule, PassCosts.uniform(schedule.placement, *costs))
            if within(timeline.peak_activation, limit):
                assert best.makespan <= timeline.makespan * (1 + 1e-9), name


# Optima proven by CP-SAT (23.85 by the lower bound), p = 4, m = 6.
OPTIMA = [
    ("v", (1, 1.2, 0.7, 0.05), 2, 26.15),
    ("v", (1, 1.2, 0.7, 0.05), 3, 22.05),
    ("v", (1, 1.2, 0.7, 0.05), 4, 19.65),
    ("v", (1, 1.2, 0.7, 0.05), 8, 19.05),
    ("v", (1, 1.5, 0.6, 0.2), 2, 32.50),
    ("v", (1, 1.5, 0.6, 0.2), 3, 26.95),
    ("v", (1, 1.5, 0.6, 0.2), 4, 23.85),
    ("v", (1, 1.5, 0.6, 0.2), 8, 20.75),
    ("linear", (1, 1.2, 0.7, 0.05), 2, 32.90),
    ("linear", (1, 1.5, 0.6, 0.2), 2, 38.70),
]


@pytest.mark.parametrize(("placement", "costs", "limit", "optimum"), OPTIMA)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_known_optima_of_four_devices_and_six_microbatches_are_reached(placement, costs, limit, optimum, seed) -> None:
    best = best_schedule(4, 6, uniform_share(*costs), limit, placement=placement, seed=seed)
    assert optimum * (1 - 1e-9) <= best.makespan <= optimum * 1.005
    assert best.lower_bound <= optimum * (1 + 1e-9)


def test_equal_arguments_give_equal_schedules() -> None:
    first, second = (
        best_schedule(4, 8, uniform_share(*REAL_COSTS[2]), 3, effort=QUICK, seed=5).timeline.schedule for _ in range(2)
    )
    assert first == second


def test_a_search_makes_no_cycles_so_that_it_needs_no_collector_and_leaves_it_as_it_was() -> None:
    best_schedule(4, 8, uniform_share(1, 1.5, 0.6, 0.2), 2, effort=QUICK)
    gc.collect()
    best_schedule(8, 32, uniform_share(1, 1.5, 0.6, 0.2), 6, effort=QUICK)
    assert gc.isenabled()
    # A handful comes from loading compiled code; the search's own tuples would be tens of thousands.
    assert gc.collect() < 1000
    with pytest.raises(UserError):
        best_schedule(4, 8, limit=0.1, effort=QUICK)
    assert gc.isenabled()


def test_a_fixed_placement_is_kept_and_others_are_compared() -> None:
    source = uniform_share(*REAL_COSTS[2])
    kept = best_schedule(4, 8, source, 4, placement="loop", stages_per_device=3, effort=TINY)
    assert (kept.chosen.placement, kept.chosen.stages_per_device) == ("loop", 3)
    assert kept.timeline.schedule.stages == 12
    free = best_schedule(4, 8, source, 4, effort=TINY)
    assert len(free.options) == 5
    assert free.options[0].makespan == free.makespan
    assert all(option.lower_bound is not None for option in free.options)
    assert free.chosen.describe() in free.reason()


def test_a_limit_below_one_microbatch_is_refused_with_the_smallest_feasible_one() -> None:
    with pytest.raises(UserError, match=r"smallest feasible one is 1\.0"):
        best_schedule(4, 8, limit=0.9)
    assert best_schedule(4, 8, limit=1.0, effort=TINY).timeline.peak_activation == (1.0,) * 4


def test_the_smallest_feasible_limit_of_uneven_stages_is_feasible() -> None:
    costs = PassCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, 0.0, (0.7, 1.3, 1.0, 1.9), (0.1, 1.3, 0.0, 0.2))
    with pytest.raises(UserError, match=r"smallest feasible one is 1\.9"):
        best_schedule(4, 8, fixed_stages(costs), 1.8)
    best = best_schedule(4, 8, fixed_stages(costs), 1.9, effort=TINY)
    assert_sound(best.timeline, (1.9,) * 4)


def test_limits_per_device_are_kept_one_by_one() -> None:
    limits = (1.5, 3.0, 2.0, 4.0)
    best = best_schedule(4, 8, uniform_share(*REAL_COSTS[1]), limits, effort=TINY)
    assert_sound(best.timeline, limits)
    same = best_schedule(4, 8, uniform_share(*REAL_COSTS[1]), 1.5, effort=TINY)
    assert best.makespan <= same.makespan * (1 + 1e-9)
    with pytest.raises(UserError, match="smallest feasible ones"):
        best_schedule(4, 8, limit=(1.0, 1.0, 0.5, 1.0))
    with pytest.raises(UserError, match="for 3 devices, the pipeline has 4"):
        best_schedule(4, 8, limit=(1.0, 1.0, 1.0))


def test_keeping_less_until_w_allows_a_faster_schedule() -> None:
    whole = best_schedule(4, 12, uniform_share(1, 1.2, 0.7, 0.05), 2, placement="v")
    part = best_schedule(4, 12, uniform_share(1, 1.2, 0.7, 0.05, kept=0.2), 2, placement="v")
    assert part.makespan < whole.makespan


def test_slow_links_between_nodes_are_paid() -> None:
    flat = best_schedule(8, 16, uniform_share(1, 1.2, 0.7, 0.05), 8, effort=QUICK)
    table = node_latencies(8, 4, 0.05, 0.6)
    nodes = best_schedule(8, 16, uniform_share(1, 1.2, 0.7, table), 8, effort=QUICK)
    assert nodes.makespan > flat.makespan
    again = simulate(nodes.timeline.schedule, nodes.timeline.costs)
    assert again.makespan == nodes.makespan


def test_one_device_runs_all_its_work() -> None:
    best = best_schedule(1, 5, uniform_share(1, 1, 1), 2, effort=TINY)
    assert best.makespan == 15
    assert best.gap == 0


def test_the_front_trades_memory_for_time_and_agrees_with_single_calls() -> None:
    source = uniform_share(*REAL_COSTS[2])
    front = memory_front(4, 8, source, effort=TINY)
    limits = [entry.limit for entry in front]
    spans = [entry.makespan for entry in front]
    assert limits == sorted(limits)
    assert spans == sorted(spans, reverse=True)
    assert len(front) >= 6
    for entry in front[::2]:
        assert within(entry.timeline.peak_activation, entry.limit)
        single = best_schedule(4, 8, source, entry.limit, effort=TINY)
        assert single.makespan == entry.makespan


def test_smallest_memory_keeps_its_slowdown_and_less_memory_does_not() -> None:
    source = uniform_share(*REAL_COSTS[2])
    fastest = best_schedule(4, 8, source, effort=TINY).makespan
    found = smallest_memory(4, 8, 0.05, source, effort=TINY)
    assert found.makespan <= 1.05 * fastest
    assert found.limit < 8
    assert best_schedule(4, 8, source, found.limit * 0.999, effort=TINY).makespan > 1.05 * fastest
    with pytest.raises(UserError, match="slowdown"):
        smallest_memory(4, 8, -0.1, source)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0, "microbatches": 4}, "at least 1 device"),
        ({"devices": 4, "microbatches": 0}, "1 microbatch"),
        ({"devices": 4, "microbatches": 4, "limit": -1}, "above 0"),
        ({"devices": 4, "microbatches": 4, "placement": "v", "stages_per_device": 3}, "exactly 2"),
    ],
)
def test_mistakes_are_told(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        best_schedule(**arguments)
