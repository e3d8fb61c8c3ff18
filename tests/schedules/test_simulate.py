"""The simulation kernel against a brute-force simulation and against known times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.schedules import kernel
from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import dependencies, linear_placement, v_placement
from autotune.schedules.registry import SCHEDULES, build
from autotune.schedules.schedule import Pass, Schedule
from autotune.schedules.simulate import simulate


def brute_force_ends(schedule: Schedule, costs: PassCosts) -> dict[Pass, float]:
    """End of every pass: go round all devices, again and again, and run whatever has its inputs."""
    durations = {
        "F": costs.forward,
        "B": costs.backward,
        "W": costs.weight,
        "BW": [b + w for b, w in zip(costs.backward, costs.weight, strict=True)],
    }
    ends: dict[Pass, float] = {}
    position = [0] * schedule.devices
    free = [0.0] * schedule.devices
    progress = True
    while progress:
        progress = False
        for device, passes in enumerate(schedule.order):
            if position[device] == len(passes):
                continue
            item = passes[position[device]]
            arrivals = [0.0]
            for needed in dependencies(item, schedule.stages):
                fused = Pass("BW", needed.stage, needed.microbatch)
                made = fused if needed.kind == "B" and needed not in ends else needed
                if made not in ends:
                    break
                arrivals.append(ends[made] + costs.latency(schedule.placement[made.stage], device))
            else:
                free[device] = max(free[device], *arrivals) + durations[item.kind][item.stage]
                ends[item] = free[device]
                position[device] += 1
                progress = True
    return ends


def random_costs(draw: st.DrawFn, schedule: Schedule) -> PassCosts:
    times = st.floats(0.01, 3)
    stages, devices = schedule.stages, schedule.devices
    lists = [tuple(draw(st.lists(times, min_size=stages, max_size=stages))) for _ in range(5)]
    if draw(st.booleans()):
        hop: float | tuple[tuple[float, ...], ...] = draw(st.floats(0, 1))
    else:
        rows = st.lists(st.floats(0, 1), min_size=devices, max_size=devices).map(tuple)
        hop = tuple(draw(st.lists(rows, min_size=devices, max_size=devices)))
    return PassCosts(
        lists[0], lists[1], lists[2], hop, lists[3], tuple(min(a, b) for a, b in zip(lists[3], lists[4], strict=True))
    )


@st.composite
def schedules_with_costs(draw: st.DrawFn) -> tuple[Schedule, PassCosts]:
    kind = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    devices = draw(st.integers(1, 5))
    microbatches = draw(st.integers(1, 3)) * devices if kind.microbatch_multiple else draw(st.integers(1, 11))
    microbatches = max(microbatches, kind.min_microbatches_per_device * devices)
    stages = kind.min_stages_per_device + (draw(st.integers(0, 1)) if kind.max_stages_per_device is None else 0)
    schedule = build(kind.name, devices, microbatches, stages)
    return schedule, random_costs(draw, schedule)


@given(schedules_with_costs())
@settings(max_examples=120, deadline=None)
def test_the_kernel_agrees_with_a_brute_force_simulation(case: tuple[Schedule, PassCosts]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    expected = brute_force_ends(schedule, costs)
    for device, passes in enumerate(schedule.order):
        assert list(timeline.end[device]) == pytest.approx([expected[item] for item in passes])


@given(schedules_with_costs())
@settings(max_examples=60, deadline=None)
def test_the_peak_is_the_top_of_the_memory_curve(case: tuple[Schedule, PassCosts]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    for device in range(schedule.devices):
        curve = timeline.memory_curve(device)
        assert max(held for _, held in curve) == pytest.approx(timeline.peak_activation[device])
        assert curve[-1][1] == pytest.approx(0, abs=1e-9)


def test_the_compiled_kernel_agrees_with_plain_python() -> None:
    schedule = build("v-half", 6, 14)
    costs = PassCosts.uniform(schedule.placement, 1, 1.3, 0.7, 0.1, kept=0.4)
    timeline = simulate(schedule, costs)
    order, first = kernel.encode(schedule)
    tables = kernel.cost_tables(schedule.placement, costs)
    work = {
        name: np.array(values)
        for name, values in kernel.scratch(schedule.devices, schedule.stages, schedule.microbatches, len(order)).items()
    }
    code = kernel.compiled()
    sizes = np.array(order), np.array(first), schedule.stages, schedule.microbatches
    ran = code.run(*sizes, np.array(tables.duration), np.array(tables.hop), np.array(tables.every), **work)
    peak = np.zeros(schedule.devices)
    code.peaks(*sizes, np.array(tables.activation), np.array(tables.kept), peak)
    assert ran == len(order)
    assert work["end"].tolist() == pytest.approx([end for row in timeline.end for end in row])
    assert peak.tolist() == pytest.approx(list(timeline.peak_activation))


def test_1f1b_takes_the_time_of_its_formula() -> None:
    # 1F1B: (m + p - 1)(F + B + W), arXiv 2401.10241, table 2.
    schedule = build("1f1b", 4, 10)
    timeline = simulate(schedule, PassCosts.uniform(schedule.placement, 1, 1.5, 0.5))
    assert timeline.makespan == pytest.approx(13 * 3)
    assert timeline.bubble_rate == pytest.approx(3 / 13)
    assert timeline.peak_activation == (4, 3, 2, 1)


def test_a_hop_is_paid_between_devices_only() -> None:
    placement = v_placement(2)
    schedule = build("zb-v", 2, 1)
    free = simulate(schedule, PassCosts.uniform(placement, 2, 2, 2))
    paid = simulate(schedule, PassCosts.uniform(placement, 2, 2, 2, 0.5))
    # Device 0 to 1 and back, once forward and once backward: the turn on device 1 and the one on device 0 are free.
    assert paid.makespan - free.makespan == pytest.approx(4 * 0.5)


def test_a_latency_table_is_read_by_sender_and_receiver() -> None:
    schedule = build("gpipe", 2, 1)
    there, back = 0.25, 3.0
    ones = (1.0, 1.0)
    costs = PassCosts(ones, ones, ones, ((0, there), (back, 0)), ones, ones)
    assert simulate(schedule, costs).makespan == pytest.approx(1 + there + 1 + 2 + back + 2)


def test_the_kept_part_is_held_until_the_weight_pass() -> None:
    schedule = build("zb-h1", 4, 8)
    costs = PassCosts.uniform(schedule.placement, activation=1, kept=0.25)
    # Worker i, 1-based: (p - i + 1) M_B + (i - 1) M_W, arXiv 2401.10241, section 2.3.
    assert simulate(schedule, costs).peak_activation == pytest.approx([4, 3.25, 2.5, 1.75])


def test_costs_of_another_pipeline_are_refused() -> None:
    schedule = build("1f1b", 4, 4)
    with pytest.raises(UserError, match="costs are for 3 stages, schedule 1f1b has 4"):
        simulate(schedule, PassCosts.uniform(linear_placement(3)))
    ones = (1.0,) * 4
    small_table = PassCosts(ones, ones, ones, ((0, 1), (1, 0)), ones, ones)
    with pytest.raises(UserError, match="hop table is for 2 devices"):
        simulate(schedule, small_table)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_must_be_finite_and_not_negative(value: float) -> None:
    with pytest.raises(UserError, match="finite and not negative"):
        PassCosts.uniform((0, 1), f=value)
    with pytest.raises(UserError, match="finite and not negative"):
        PassCosts.uniform((0, 1), comm=value)


def test_a_deadlock_is_refused() -> None:
    order = ((Pass("F", 0, 0), Pass("BW", 0, 0)), (Pass("BW", 1, 0), Pass("F", 1, 0)))
    with pytest.raises(UserError, match="deadlocks"):
        simulate(Schedule("broken", 1, (0, 1), order))
