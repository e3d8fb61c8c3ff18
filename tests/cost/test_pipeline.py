"""The fast path through many plans gives what the full simulation gives."""

from __future__ import annotations

import random

import pytest

from autotune.cost.pipeline import DeviceBytes, Ratios, adapts, order_of, peak_bytes, pipeline
from autotune.errors import UserError
from autotune.schedules import registry
from autotune.schedules.costs import PassCosts
from autotune.schedules.simulate import simulate

NAMES = sorted(registry.SCHEDULES)


def _costs(name: str, devices: int, seed: int, spread: float = 0.1) -> PassCosts:
    """Stages of a real kind: equal but for the ends, and a hop."""
    stages = devices * registry.find(name).min_stages_per_device
    draw = random.Random(seed)
    f, b, w = (draw.uniform(0.7, 1.3) for _ in range(3))
    ends = {0: 1 - spread, stages - 1: 1 + spread / 2}
    scale = [ends.get(stage, 1.0) for stage in range(stages)]
    return PassCosts(
        forward=tuple(f * x for x in scale),
        backward=tuple(b * x for x in scale),
        weight=tuple(w * x for x in scale),
        hop=draw.choice([0.0, 0.05]),
        activation=(1.0,) * stages,
        kept=(0.9,) * stages,
    )


def _held_alone(costs: PassCosts) -> DeviceBytes:
    none = (0.0,) * costs.stages
    return DeviceBytes(costs.activation, costs.kept, none, none, none, none)


@pytest.mark.parametrize("name", NAMES)
def test_short_steps_are_simulated_exactly(name: str) -> None:
    costs, v = _costs(name, 4, 1), registry.find(name).min_stages_per_device
    timeline = simulate(registry.build(name, 4, 16, v), costs)
    got = pipeline(name, 4, 16, v)
    run = got.run(costs, _held_alone(costs))
    assert got.exact
    assert run.makespan_s == pytest.approx(timeline.makespan, rel=1e-12)
    assert run.span_s == pytest.approx(timeline.span, rel=1e-12)
    assert run.busy_s == pytest.approx(timeline.work)
    assert run.peak_bytes == pytest.approx(timeline.peak_activation)


@pytest.mark.parametrize("name", NAMES)
def test_machine_code_gives_the_same_numbers(name: str) -> None:
    costs, v = _costs(name, 4, 2), registry.find(name).min_stages_per_device
    got = pipeline(name, 4, 48, v)
    assert got.run(costs, _held_alone(costs), compiled=True) == got.run(costs, _held_alone(costs))


@pytest.mark.parametrize("devices", [2, 4, 6])
@pytest.mark.parametrize("name", NAMES)
def test_long_steps_are_extrapolated_within_one_percent(name: str, devices: int) -> None:
    v, m = registry.find(name).min_stages_per_device, 16 * devices
    for seed in range(3):
        costs = _costs(name, devices, seed)
        timeline = simulate(registry.build(name, devices, m, v), costs)
        got = pipeline(name, devices, m, v)
        run = got.run(costs, _held_alone(costs))
        assert not got.exact
        assert run.makespan_s == pytest.approx(timeline.makespan, rel=0.01)
        assert run.busy_s == pytest.approx(timeline.work)
        assert run.peak_bytes == pytest.approx(timeline.peak_activation, rel=0.03)


def test_without_latency_a_step_is_not_slower() -> None:
    costs = PassCosts.uniform((0, 1, 2, 3), comm=0.3)
    run = pipeline("1f1b", 4, 8, 1).run(costs, _held_alone(costs))
    free = simulate(registry.build("1f1b", 4, 8), PassCosts.uniform((0, 1, 2, 3)))
    assert run.instant_makespan_s == pytest.approx(free.makespan)
    assert run.instant_makespan_s < run.makespan_s


def test_temporaries_count_at_the_pass_that_makes_them() -> None:
    # One device, two microbatches: F F BW BW; held 1 each, and a BW needs 5 more while both are held.
    order = order_of(registry.build("gpipe", 1, 2))
    peak, held = [0.0], [0.0]
    peak_bytes(order.codes, order.first, 1, 2, [1.0, 0.5, 0.25, 3.0, 2.0, 5.0], peak, held)
    assert (peak, held) == ([7.0], [2.0])


def test_a_schedule_that_adapts_is_searched_with_the_plans_ratios() -> None:
    costs = PassCosts.uniform((0, 1, 2, 3), 2.0, 2.2, 1.0, 0.1, kept=0.5)
    ratios = Ratios.of(costs)
    assert ratios == Ratios(1.1, 0.5, 0.05, 0.5)
    assert adapts("zb-2p")
    assert not adapts("zb-h2")
    run = pipeline("zb-2p", 4, 12, 1, ratios).run(costs, _held_alone(costs))
    searched = simulate(registry.build("zb-2p", 4, 12, costs=ratios.costs(4)), costs)
    assert run.span_s == pytest.approx(searched.span)
    assert max(run.peak_bytes) <= 2 * 4


def test_a_schedule_is_built_once_for_all_plans_that_run_it() -> None:
    first = pipeline("v-half", 4, 24, 2)
    assert pipeline("v-half", 4, 24, 2) is first
    assert pipeline("v-half", 4, 28, 2).orders[1] is first.orders[1]  # steps of the same remainder share short ones


def test_numbers_a_schedule_does_not_allow_are_refused() -> None:
    with pytest.raises(UserError, match="multiple of 4"):
        pipeline("interleaved-1f1b", 4, 6, 2)
