"""Against exact optima: never beaten, and reached on average within 2 %."""

from __future__ import annotations

import math

import pytest
from engine_cases import REAL_COSTS, problem_of

from autotune.errors import UserError
from autotune.schedules.checks import problems
from autotune.schedules.costs import PassCosts
from autotune.schedules.engine import QUICK, best_schedule, fixed_stages
from autotune.schedules.engine.problem import Problem
from autotune.schedules.placement import make_placement

pytest.importorskip("ortools", reason="the extra `prove` is not installed")
from autotune.schedules.engine.prove import prove

UNEVEN = PassCosts(
    forward=(1.0, 0.5, 0.75, 1.0),
    backward=(1.25, 0.5, 1.0, 1.0),
    weight=(0.5, 0.25, 0.5, 1.0),
    hop=((0.0, 0.25), (0.5, 0.0)),
    activation=(2.0, 1.0, 1.0, 2.0),
    kept=(1.0, 1.0, 0.0, 1.0),
)

CASES = [
    *((problem_of("linear", 3, 4, 1, costs), 2.0) for costs in REAL_COSTS),
    *((problem_of("v", 2, 4, 2, costs), limit) for costs in REAL_COSTS for limit in (1.0, 1.5, 2.0)),
    (problem_of("v", 3, 3, 2, REAL_COSTS[2]), 2.0),
    *((problem_of("loop", 2, 4, 2, costs), 1.5) for costs in REAL_COSTS),
    (Problem(make_placement("v", 2, 2), 4, UNEVEN), 5.0),
    (Problem(make_placement("loop", 2, 2), 4, UNEVEN), 4.0),
    (Problem(make_placement("v", 2, 2), 4, UNEVEN, fused=True), 5.0),
]


def test_optima_of_small_problems_are_never_beaten_and_nearly_reached() -> None:
    ratios = []
    for problem, limit in CASES:
        proof = prove(problem, limit, seconds=20)
        assert proof.optimal, "the cases are small enough to be solved"
        assert problems(proof.timeline.schedule) == []
        assert max(proof.timeline.peak_activation) <= limit * (1 + 1e-9)
        assert proof.timeline.makespan == pytest.approx(proof.lower_bound)
        best = best_schedule(
            problem.devices,
            problem.microbatches,
            fixed_stages(problem.costs),
            limit,
            placement=problem.kind,
            fused=problem.fused,
            effort=QUICK,
        )
        assert best.makespan >= proof.timeline.makespan * (1 - 1e-9)
        assert best.lower_bound <= proof.timeline.makespan * (1 + 1e-9)
        ratios.append(best.makespan / proof.timeline.makespan)
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.02


def test_a_hint_is_a_start_and_times_off_any_grid_give_a_bound_that_holds() -> None:
    placement = make_placement("v", 2, 2)
    costs = PassCosts.uniform(placement, math.sqrt(2), math.e / 2, math.pi / 5, 0.01 * math.sqrt(3))
    problem = Problem(placement, 3, costs)
    best = best_schedule(2, 3, fixed_stages(costs), 1.5, placement="v", effort=QUICK)
    proof = prove(problem, 1.5, seconds=20, hint=best.timeline)
    assert not proof.optimal, "rounded times prove a bound, not an optimum"
    assert proof.lower_bound <= proof.timeline.makespan <= best.makespan * (1 + 1e-3)
    assert proof.lower_bound >= 0.9 * best.makespan


def test_an_infeasible_limit_is_refused() -> None:
    with pytest.raises(UserError, match="one microbatch alone holds"):
        prove(problem_of("v", 2, 3, 2, REAL_COSTS[0]), 0.5, seconds=1)
