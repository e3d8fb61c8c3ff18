"""Where ranks sit, and what their traffic takes."""

from __future__ import annotations

import pytest

from autotune.cost.communication import Layout, gather_s, group_link, message_s
from autotune.space.cluster import ClusterSpec, Link

INSIDE, OUTSIDE = Link(2e-6, 300e9), Link(5e-6, 25e9)
CLUSTER = ClusterSpec(8, 8, "a100-80g", None, INSIDE, OUTSIDE)


def test_ranks_are_laid_out_tp_innermost_then_dp_then_pp() -> None:
    layout = Layout(pp=2, dp=2, tp=4, devices_per_node=8)
    assert list(layout.tp_group(0, 0)) == [0, 1, 2, 3]
    assert list(layout.dp_group(0, 1)) == [1, 5]
    assert layout.rank(1, 0, 0) == 8
    every = [layout.rank(p, d, t) for p in range(2) for d in range(2) for t in range(4)]
    assert every == list(range(16))


def test_pipeline_neighbours_share_a_node_only_while_their_ranks_do() -> None:
    assert not Layout(2, 1, 4, 8).crosses(0, 1)
    assert Layout(2, 2, 4, 8).crosses(0, 1)
    deep = Layout(16, 1, 1, 8)
    assert [deep.crosses(d, d + 1) for d in range(15)] == [d == 7 for d in range(15)]


def test_a_group_inside_a_node_has_the_inner_link_and_one_across_has_a_port_for_each_of_its_ranks_there() -> None:
    layout = Layout(1, 8, 8, 8)
    assert group_link(layout.tp_group(0, 0), layout, CLUSTER) == INSIDE
    assert group_link(layout.dp_group(0, 0), layout, CLUSTER) == OUTSIDE
    two_per_node = Layout(1, 4, 4, 8)
    assert group_link(two_per_node.dp_group(0, 0), two_per_node, CLUSTER) == Link(5e-6, 50e9)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 8, 11])
@pytest.mark.parametrize("start", [0, 3, 6])
def test_a_ring_has_the_ports_of_the_node_that_has_fewest_of_its_ranks(start: int, step: int) -> None:
    layout = Layout(1, 1, 1, 8)
    for count in range(2, 40):
        ranks = range(start, start + count * step, step)
        held = [sum(rank // 8 == node for rank in ranks) for node in range(ranks[-1] // 8 + 1)]
        nodes = [number for number in held if number]
        bandwidth = min(25e9 * min(nodes), 300e9)
        assert group_link(ranks, layout, CLUSTER) == (INSIDE if len(nodes) == 1 else Link(5e-6, bandwidth))


def test_the_link_of_a_hundred_million_ranks_is_found_without_listing_them() -> None:
    layout = Layout(1, 10**8, 1, 1000)
    link = group_link(layout.dp_group(0, 0), layout, CLUSTER)
    assert link == Link(OUTSIDE.latency_s, INSIDE.bandwidth_bytes_per_s)


def _ring_all_gather_s(tensor_bytes: float, ranks: int, link: Link) -> float:
    """Every rank passes a piece to its neighbour until all have all; counted step by step."""
    held = [{rank} for rank in range(ranks)]
    clock = 0.0
    while any(len(pieces) < ranks for pieces in held):
        step = len(held[0]) - 1
        moves = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        for rank, piece in moves:
            held[(rank + 1) % ranks].add(piece)
        clock += link.latency_s + tensor_bytes / ranks / link.bandwidth_bytes_per_s
    return clock


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_gather_takes_what_a_ring_takes_step_by_step(ranks: int) -> None:
    expected = _ring_all_gather_s(6e6, ranks, INSIDE)
    assert gather_s(6e6, ranks, INSIDE, efficiency=1.0) == pytest.approx(expected)


def test_a_message_takes_latency_and_bandwidth() -> None:
    assert message_s(1e6, OUTSIDE, 0.5) == pytest.approx(5e-6 + 1e6 / 12.5e9)
