"""Lower bounds: published formula, and never above any schedule there is."""

from __future__ import annotations

import pytest
from engine_cases import problem_of, random_problems
from hypothesis import given, settings

from autotune.schedules.engine.bounds import lower_bounds
from autotune.schedules.engine.guard import Guard


@pytest.mark.parametrize(("p", "chunks"), [(4, 4), (4, 6), (8, 4), (8, 7), (8, 9), (16, 12), (16, 21)])
def test_fill_and_drain_is_the_published_bound_on_a_v_with_unit_passes(p: int, chunks: int) -> None:
    # arXiv 2405.15362: 6 n + 6 p - 3 k - 1 in passes of half a device, k chunks of activation, while k < 3p / 2.
    n = 3 * p
    bounds = lower_bounds(problem_of("v", p, n, 2, (1, 1, 1, 0)), chunks / 2)
    assert 2 * bounds.fill_drain == pytest.approx(6 * n + 6 * p - 3 * chunks - 1)


def test_ample_memory_leaves_work_after_the_first_forward_chain() -> None:
    bounds = lower_bounds(problem_of("linear", 4, 8, 1, (1, 1, 1, 0)), 8)
    assert bounds.best == bounds.work == 3 + 8 * 3


def test_one_microbatch_at_a_time_is_bound_by_memory_area() -> None:
    p, m = 6, 10
    bounds = lower_bounds(problem_of("linear", p, m, 1, (1, 1, 1, 0)), 1)
    # Device 0 holds a microbatch for its whole way down and back and its W.
    assert bounds.memory_area == pytest.approx(m * (2 * p + 1))


@settings(max_examples=40, deadline=None)
@given(random_problems())
def test_no_named_schedule_is_below_the_bound_of_its_own_memory(problem) -> None:
    everything = tuple(problem.microbatches * need for need in problem.smallest_caps())
    for named in Guard().better(problem, everything, lambda: float("inf")):
        assert lower_bounds(problem, named.peak).best <= named.makespan * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(random_problems())
def test_more_memory_never_raises_the_bound(problem) -> None:
    least = max(problem.smallest_caps())
    bounds = [lower_bounds(problem, factor * least).best for factor in (1.0, 1.3, 2.0, 3.7, 10.0)]
    assert bounds == sorted(bounds, reverse=True)
