"""The machines a plan runs on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClusterSpec", "Link"]


@dataclass(frozen=True)
class Link:
    """One level of the network: time of a message of n bytes = latency_s + n / bandwidth_bytes_per_s."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` machines of `devices_per_node` devices.

    Attributes:
        device: `cpu`, `cuda`, or the name of an accelerator.
        memory_limit_bytes: most bytes one device may hold at its peak; None for no limit.
        intra_node, inter_node: links inside a node and between nodes.
    """

    nodes: int
    devices_per_node: int
    device: str
    memory_limit_bytes: int | None
    intra_node: Link
    inter_node: Link

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node
