"""Theory of building blocks (arXiv 2405.15362): memory bound, peak and growth of the bubble."""

from __future__ import annotations

import pytest

from autotune.errors import UserError
from autotune.schedules.building_block import BuildingBlock, chain_block, two_part_blocks, uniform_block
from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import linear_placement, loop_placement, v_placement
from autotune.schedules.registry import build
from autotune.schedules.simulate import simulate
from autotune.schedules.unroll import reorder, repeat, squeeze, unroll
from autotune.schedules.v_shaped import BLOCKS, block_of

SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 12, 16]


@pytest.mark.parametrize("name", sorted(BLOCKS))
@pytest.mark.parametrize("p", SIZES)
def test_every_named_block_repeats_without_collision_and_bounds_the_peak(name: str, p: int) -> None:
    block = BLOCKS[name](p)
    assert block.problems() == []
    peaks = simulate(unroll(block, 3 * p).schedule(name)).peak_activation
    for device in range(p):
        assert peaks[device] <= block.steady_peak(device) <= block.peak_bound(device)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_repeating_puts_one_pass_in_a_slot(name: str) -> None:
    table = repeat(BLOCKS[name](5), 9)
    for row in table.cells:
        used = [s for slot, item in row for s in range(slot, slot + (2 if item.kind == "BW" else 1))]
        assert len(used) == len(set(used))


def test_the_steady_state_of_a_block_leaves_no_slot_idle() -> None:
    table = repeat(BLOCKS["v-half"](4), 30)
    for row in table.cells:
        busy = {slot for slot, _ in row}
        assert set(range(60, 120)) <= busy


@pytest.mark.parametrize("p", [4, 5, 6, 7, 8, 9, 12, 16, 24, 32])
def test_peaks_of_v_min_and_v_half_are_the_published_ones(p: int) -> None:
    assert max(BLOCKS["v-min"](p).steady_peak(device) for device in range(p)) == (p + 4) // 3
    assert max(BLOCKS["v-half"](p).steady_peak(device) for device in range(p)) == (p + 2) // 2
    assert max(BLOCKS["v-zb"](p).steady_peak(device) for device in range(p)) == p


@pytest.mark.parametrize("p", [3, 4, 5, 6, 7, 8, 9, 12])
@pytest.mark.parametrize("microbatches", [4, 6])
def test_bubbles_at_equal_pass_times_are_the_published_ones(p: int, microbatches: int) -> None:
    """In passes of one stage, independent of m: V-Min 4p - 5 or 4p - 7, V-Half 3p - 7 or 3p - 4."""
    m = microbatches * p

    def bubble(name: str) -> float:
        return 2 * simulate(build(name, p, m)).makespan - 6 * m

    assert bubble("v-min") == pytest.approx(4 * p - (7 if p % 3 == 0 else 5))
    assert bubble("v-half") == pytest.approx(3 * p - (7 if p % 2 == 0 else 4))


@pytest.mark.parametrize("p", [5, 6, 7, 8])
@pytest.mark.parametrize("times", [(1, 1.2, 0.7), (1, 1.5, 0.6), (1, 2, 1), (2, 1, 1), (1, 0.5, 0.5), (1, 1, 2)])
def test_bubbles_grow_with_microbatches_by_the_published_laws(p: int, times: tuple[float, float, float]) -> None:
    """Per extra microbatch: V-Min 6 max - 2 sum, V-Half max(0, 2B - W - 2F, 2F - W - 2B), in times of one stage."""
    F, B, W = times

    def growth(name: str) -> float:
        costs = PassCosts.uniform(v_placement(p), 2 * F, 2 * B, 2 * W)
        few, many = 6 * p, 8 * p
        spans = [simulate(build(name, p, m), costs).makespan - 2 * m * sum(times) for m in (few, many)]
        return (spans[1] - spans[0]) / (many - few)

    assert growth("v-half") == pytest.approx(max(0, 2 * B - W - 2 * F, 2 * F - W - 2 * B), abs=1e-6)
    law = 6 * max(times) - 2 * sum(times)
    if max(times) > W:
        assert growth("v-min") == pytest.approx(law, abs=1e-6)
    else:
        # The law has W in its maximum; our W are not tied to a place behind their B there, so ours grows less.
        assert growth("v-min") <= law


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_no_schedule_of_a_block_beats_the_dependency_path(name: str) -> None:
    """6n + 6p - 3k - 1 unit passes, n microbatches and a peak of k stage activations (appendix of the paper)."""
    for p in (2, 3, 4, 5, 8, 12):
        for m in (p, 3 * p):
            found = simulate(build(name, p, m))
            k = 2 * max(found.peak_activation)
            assert 2 * found.makespan >= 6 * m + 6 * p - 3 * k - 1


@pytest.mark.parametrize("p", [3, 4, 6])
def test_v_min_or_v_half_meet_the_dependency_path(p: int) -> None:
    """So nothing within their memory is shorter at equal pass times."""
    name = "v-half" if p % 2 == 0 else "v-min"
    found = simulate(build(name, p, 4 * p))
    assert 2 * found.makespan == 24 * p + 6 * p - 6 * max(found.peak_activation) - 1


@pytest.mark.parametrize("p", [3, 4, 5])
def test_two_part_blocks_reach_the_published_bubbles_at_even_peaks(p: int) -> None:
    """Bubble of the longest device span by peak P: 3p - 1 - 3P + max(3p, p + 1 + 2 floor((P + 1) / 2))."""
    m = 3 * p
    blocks: dict[int, list[BuildingBlock]] = {}
    for block in two_part_blocks(v_placement(p)):
        peak = max(int(2 * block.steady_peak(device)) for device in range(p))
        if peak <= 2 * p:
            blocks.setdefault(peak, []).append(block)
    for peak in (2 * p, 2 * p - 2):
        best = min(2 * simulate(unroll(block, m).schedule("two-part")).span for block in blocks[peak]) - 6 * m
        assert round(best) == 3 * p - 1 - 3 * peak + max(3 * p, p + 1 + 2 * ((peak + 1) // 2)), peak


def test_1f1b_and_interleaved_blocks_have_the_known_memory() -> None:
    p = 4
    linear = chain_block(linear_placement(p), [1] * (p - 1), [2] * (p - 1))
    assert linear.problems() == []
    assert [linear.peak_bound(device) for device in range(p)] == [4, 3, 2, 1]
    assert linear.steady_peak(0) == 4
    looped = chain_block(loop_placement(3, 2), [1, 1, 2, 1, 1], [1, 1, 2, 1, 1])
    assert looped.interval == 6
    assert looped.problems() == []
    peaks = simulate(unroll(looped, 9).schedule("loop")).peak_activation
    assert all(peaks[device] <= looped.peak_bound(device) for device in range(3))


def test_a_block_that_collides_or_runs_too_early_is_named() -> None:
    block = uniform_block(v_placement(2), down=3, up=3, turns=(3, 3, 3))
    assert any("collide" in text for text in block.problems())
    early = BuildingBlock((0, 1), 3, (0, 0), (2, 1), (3, 2))
    assert "F1 starts at 0, before the end of F0" in early.problems()


def test_squeezing_keeps_the_order_and_never_starts_a_pass_later() -> None:
    raw = repeat(BLOCKS["v-min"](6), 12)
    tight = squeeze(raw)
    for before, after in zip(raw.cells, tight.cells, strict=True):
        assert [item for _, item in before] == [item for _, item in after]
        assert all(new <= old for (old, _), (new, _) in zip(before, after, strict=True))


@pytest.mark.parametrize("put_off", [False, True])
def test_reordering_keeps_to_the_limit_and_runs_the_same_passes(put_off: bool) -> None:
    block = BLOCKS["v-half"](6)
    tight = squeeze(repeat(block, 13))
    limits = tuple(int(2 * block.steady_peak(device)) for device in range(6))
    after = reorder(tight, limits, put_off_weights=put_off)
    assert after.slots <= tight.slots
    for old, new in zip(tight.cells, after.cells, strict=True):
        assert {item for _, item in old} == {item for _, item in new}
    peaks = simulate(after.schedule("x")).peak_activation
    assert all(2 * peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_reordering_below_what_the_order_holds_is_refused() -> None:
    with pytest.raises(UserError, match="more than the limit 1"):
        reorder(squeeze(repeat(BLOCKS["v-min"](4), 4)), (1,) * 4)


def test_more_memory_shortens_a_block() -> None:
    block = BLOCKS["v-min"](8)
    assert unroll(block, 16, limits=(12,) * 8).slots <= unroll(block, 16).slots


def test_closed_forms_have_no_block() -> None:
    assert block_of("1f1b", 4) is None
    assert block_of("v-half", 4) == BLOCKS["v-half"](4)
