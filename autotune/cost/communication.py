"""Time of collectives and messages, from where the ranks of a plan sit.

Layout, as launchers do: rank = (pp_rank * dp + dp_rank) * tp + tp_rank; node = rank // devices_per_node. So tp ranks
are neighbours, then dp, and pipeline devices are furthest apart (Narayanan et al., arXiv 2104.04473, section 3.3).

A ring all-gather or reduce-scatter of a tensor of x bytes over k ranks takes x (k-1)/k / bandwidth + (k-1) latency; an
all-reduce is both (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.space.cluster import ClusterSpec, Link

__all__ = ["Layout", "gather_s", "group_link", "message_s", "rings_s"]


@dataclass(frozen=True)
class Layout:
    """Which global rank, and so which node, holds which part of a plan.

    Attributes:
        pp, dp, tp: the plan's degrees.
        devices_per_node: ranks of one node, which are consecutive.
    """

    pp: int
    dp: int
    tp: int
    devices_per_node: int

    def rank(self, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        """The global rank of one device of the plan."""
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def node(self, rank: int) -> int:
        """The node of a global rank."""
        return rank // self.devices_per_node

    def tp_group(self, pp_rank: int, dp_rank: int) -> range:
        """Global ranks that split the same layers."""
        return range(self.rank(pp_rank, dp_rank, 0), self.rank(pp_rank, dp_rank, self.tp))

    def dp_group(self, pp_rank: int, tp_rank: int) -> range:
        """Global ranks that hold the same parameters."""
        return range(self.rank(pp_rank, 0, tp_rank), self.rank(pp_rank, self.dp, tp_rank), self.tp)

    def crosses(self, sender: int, receiver: int) -> bool:
        """Whether the hop between two pipeline devices leaves the node for any pair of ranks.

        All ranks of a pipeline device send to their counterparts at the same time and the slowest pair counts.
        """
        width = self.dp * self.tp
        return any(
            self.node(sender * width + offset) != self.node(receiver * width + offset)
            for offset in (range(width) if width <= self.devices_per_node else (0,))
        )


def group_link(ranks: range, layout: Layout, cluster: ClusterSpec) -> Link:
    """The link that bounds a ring over `ranks`.

    Inside one node: the intra-node link. Over several nodes a ring enters and leaves each node once a ring, and the
    collective runs as many rings as the group has ranks in a node, each by its own network port (`inter_node` is a
    device's): the smaller of the intra-node link and that many ports bounds it.
    """
    ports = _fewest_in_a_node(ranks, layout)
    if ports is None:
        return cluster.intra_node
    bandwidth = cluster.inter_node.bandwidth_bytes_per_s * ports
    return Link(
        latency_s=cluster.inter_node.latency_s,
        bandwidth_bytes_per_s=bandwidth if ports == 1 else min(bandwidth, cluster.intra_node.bandwidth_bytes_per_s),
    )


def _fewest_in_a_node(ranks: range, layout: Layout) -> int | None:
    """Of the nodes that have any of evenly spaced ranks: the fewest that one has; None for a single node."""
    size = layout.devices_per_node
    first, last = layout.node(ranks[0]), layout.node(ranks[-1])
    if first == last:
        return None
    if ranks.step >= size:
        return 1
    # What inner nodes have repeats after `step` of them.
    nodes = (first, *range(first + 1, min(last, first + 1 + ranks.step)), last)
    inside = (range(node * size, (node + 1) * size) for node in nodes)
    return min(_before(ranks, node.stop) - _before(ranks, node.start) for node in inside)


def _before(ranks: range, end: int) -> int:
    """How many of the ranks are below `end`."""
    return min(len(ranks), max(0, -(-(end - ranks.start) // ranks.step)))


def gather_s(tensor_bytes: float, ranks: int, link: Link, efficiency: float) -> float:
    """Seconds of one all-gather or reduce-scatter of a tensor of `tensor_bytes` over `ranks`; 0 for one rank.

    Args:
        efficiency: share of the link's bandwidth that collectives reach.
    """
    return rings_s(tensor_bytes * (ranks - 1) / ranks, 1, ranks, link, efficiency)


def rings_s(sent_bytes: float, rings: float, ranks: int, link: Link, efficiency: float) -> float:
    """Seconds of `rings` all-gathers or reduce-scatters over `ranks`, an all-reduce counting as two; 0 for one rank.

    Args:
        sent_bytes: what a rank sends in all of them.
        efficiency: share of the link's bandwidth that collectives reach.
    """
    if ranks == 1:
        return 0.0
    return sent_bytes / (link.bandwidth_bytes_per_s * efficiency) + rings * (ranks - 1) * link.latency_s


def message_s(message_bytes: float, link: Link, efficiency: float) -> float:
    """Seconds of one point-to-point message."""
    return message_bytes / (link.bandwidth_bytes_per_s * efficiency) + link.latency_s
