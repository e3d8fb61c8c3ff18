"""What each named schedule promises: memory and bubble of its source, and no crash at the edges."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest

from autotune.errors import UserError
from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import v_placement
from autotune.schedules.registry import SCHEDULES, build, find
from autotune.schedules.simulate import Timeline, simulate

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.7), (1.0, 1.5, 0.6), (1.0, 1.0, 0.5)]


def timeline(name: str, p: int, m: int, v: int | None = None, times: tuple = (1, 1, 1), comm: float = 0) -> Timeline:
    schedule = build(name, p, m, v)
    return simulate(schedule, PassCosts.uniform(schedule.placement, *times, comm))


PEAKS = {
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: p,
    "interleaved-1f1b": lambda p, m, v: p + (p - 1) / v,
    "zb-h1": lambda p, m, v: p,
    "zb-h2": lambda p, m, v: 2 * p - 1,
    "zb-1p": lambda p, m, v: p,
    "zb-v": lambda p, m, v: p,
    "v-half": lambda p, m, v: (p + 2) // 2,
    "v-min": lambda p, m, v: (p + 4) // 3,
    "v-zb": lambda p, m, v: p,
    "interleaved-zb": lambda p, m, v: p,
    "dualpipe-v": lambda p, m, v: p + 0.5,
    "gis": lambda p, m, v: p,
    "gis-h": lambda p, m, v: p / v + (1 - 1 / v) * ceil(p / 2),
}


@pytest.mark.parametrize("name", sorted(PEAKS))
def test_peak_activation_is_the_documented_one(name: str) -> None:
    for p in (2, 3, 4, 5, 8):
        for v in (2, 4) if SCHEDULES[name].max_stages_per_device is None else (None,):
            peak = max(timeline(name, p, 4 * p, v).peak_activation)
            assert peak == pytest.approx(PEAKS[name](p, 4 * p, v)), (p, v)


@pytest.mark.parametrize("p", [2, 4, 8, 11])
def test_zb_2p_and_zb_stay_within_their_limit(p: int) -> None:
    assert max(timeline("zb-2p", p, 4 * p).peak_activation) <= 2 * p
    for limit in (1, 1.5, 2, p, 1.3 * p):
        schedule = build("zb", p, 4 * p, memory_limit=limit)
        assert max(simulate(schedule).peak_activation) <= limit


BUBBLES = {
    "gpipe": lambda p, v, F, B, W: (p - 1) * (F + B + W),
    "1f1b": lambda p, v, F, B, W: (p - 1) * (F + B + W),
    "interleaved-1f1b": lambda p, v, F, B, W: (p - 1) * (F + B + W) / v,
    "zb-h1": lambda p, v, F, B, W: (p - 1) * (F + B - W),
    "interleaved-zb": lambda p, v, F, B, W: (p - 1) * (F + B - W) / v,
    "gis": lambda p, v, F, B, W: (p - 1) * (F + B) / v,
}


@pytest.mark.parametrize("name", sorted(BUBBLES))
@pytest.mark.parametrize("times", TIMES)
def test_bubble_is_the_documented_one(name: str, times: tuple[float, float, float]) -> None:
    for p in (2, 4, 7):
        for v in (2, 4) if SCHEDULES[name].max_stages_per_device is None else (1,):
            m = 4 * p
            found = timeline(name, p, m, v, times)
            assert found.makespan - m * sum(times) == pytest.approx(BUBBLES[name](p, v, *times))


def test_h2_has_the_bubble_of_its_table_in_the_span_of_its_devices() -> None:
    # arXiv 2401.10241, table 2, with communication as the authors' code counts it.
    for F, B, W, comm in ((1, 1, 1, 0), (1, 1.2, 0.7, 0), (1, 1.2, 0.7, 0.05)):
        found = timeline("zb-h2", 6, 24, times=(F, B, W), comm=comm)
        assert found.span - 24 * (F + B + W) == pytest.approx(5 * (F + B + 2 * comm - 2 * W))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_few_microbatches_take_the_published_time(m: int) -> None:
    # m <= p, no communication, W < B: appendix H of arXiv 2401.10241.
    F, B, W, p = 1.0, 1.1, 0.7, 5
    assert timeline("1f1b", p, m, times=(F, B, W)).makespan == pytest.approx((m + p - 1) * (F + B + W))
    for name in ("zb-h1", "zb-1p", "zb-2p"):
        assert timeline(name, p, m, times=(F, B, W)).makespan == pytest.approx((m + p - 1) * (F + B) + W), name


@pytest.mark.parametrize("name", ["zb-v", "v-zb"])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 12, 16])
def test_zero_bubble_v_has_no_bubble_in_any_device_span(name: str, p: int) -> None:
    found = timeline(name, p, 3 * p)
    assert found.span_bubble_rate == pytest.approx(0)
    assert found.makespan == pytest.approx(9 * p + (p - 1) / 2)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_zero_bubble_v_is_optimal_from_p_microbatches_on(p: int) -> None:
    """The last device can't start before p - 1 stages have run and must then do all its work: 3m + (p - 1) / 2."""
    for m in range(p, 2 * p + 1):
        assert timeline("zb-v", p, m).makespan == pytest.approx(3 * m + (p - 1) / 2), m


def test_zero_bubble_v_is_good_for_fewer_microbatches() -> None:
    """A search of all V schedules finds nothing shorter than these; schedules cut out of a longer one take up to 23."""
    assert [timeline("zb-v", 8, m).makespan for m in (1, 3, 5)] == [16.5, 18.5, 21.5]


def test_v_schedules_hold_half_and_a_third_of_1f1b() -> None:
    p, m = 24, 72
    reference = max(timeline("1f1b", p, m).peak_activation)
    assert max(timeline("v-half", p, m).peak_activation) / reference == pytest.approx(1 / 2, abs=0.05)
    assert max(timeline("v-min", p, m).peak_activation) / reference == pytest.approx(1 / 3, abs=0.06)
    assert max(timeline("1f1b-v", p, m).peak_activation) / reference == pytest.approx(2 / 3, abs=0.06)


@pytest.mark.parametrize("name", ["interleaved-zb", "gis", "gis-h"])
def test_microbatches_that_do_not_fill_a_group_cost_neither_memory_nor_much_time(name: str) -> None:
    p, v = 8, 2
    limit = PEAKS[name](p, 0, v)
    for m in range(1, 3 * p):
        found = timeline(name, p, m, v)
        assert max(found.peak_activation) <= limit, m
        whole = -(-m // p) * p
        assert found.makespan <= timeline(name, p, whole, v).makespan, m


def test_memory_of_1f1b_does_not_grow_with_microbatches() -> None:
    assert timeline("1f1b", 4, 8).peak_activation == timeline("1f1b", 4, 64).peak_activation


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_fast_to_build(name: str) -> None:
    """A loose ceiling on the work: building must stay linear in passes, not quadratic."""
    import sys

    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        schedule = build(name, 8, 64)
    finally:
        sys.setprofile(None)
    assert calls < 60 * sum(len(row) for row in schedule.order)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match="no schedule 'v_haf'; did you mean 'v-half'"):
        find("v_haf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v-half", 4, 8, 1), "v-half needs exactly 2 stages per device, not 1"),
        (("interleaved-1f1b", 4, 8, 1), "needs at least 2 stages per device, not 1"),
        (("interleaved-1f1b", 4, 6, 2), "needs microbatches to be a multiple of 4 devices, not 6"),
        (("dualpipe-v", 4, 7, 2), "needs at least 8 microbatches on 4 devices, not 7"),
        (("1f1b", 4, 0), "needs at least 1 microbatch, not 0"),
        (("1f1b", 0, 4), "needs at least 1 device, not 0"),
    ],
)
def test_demands_that_are_not_met_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(*arguments)


def test_a_memory_limit_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(UserError, match="1f1b has its own memory and takes no limit"):
        build("1f1b", 4, 8, memory_limit=3)
    with pytest.raises(UserError, match=r"at least 1, one microbatch, not 0\.5"):
        build("zb", 4, 8, memory_limit=0.5)


def test_more_memory_never_slows_the_zero_bubble_search_much() -> None:
    """The search is greedy, so small steps back happen; large ones would be a fault."""
    spans = [simulate(build("zb", 6, 24, memory_limit=limit)).span for limit in range(1, 13)]
    assert all(later <= earlier * 1.03 for earlier, later in pairwise(spans))
    assert spans[-1] == pytest.approx(72)


def test_the_zero_bubble_search_adapts_to_costs() -> None:
    costs = PassCosts.uniform((0, 1, 2, 3), 1, 1.6, 0.4, 0.2)
    blind = simulate(build("zb-2p", 4, 12), costs)
    assert simulate(build("zb-2p", 4, 12, costs=costs), costs).span < blind.span


def test_v_placement_puts_first_and_last_stage_on_device_0() -> None:
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert build("v-min", 3, 6).placement == v_placement(3)
