"""What is assumed of a device and its links when the space file doesn't say it."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.space.cluster import Link

__all__ = ["DEVICES", "DeviceDefaults"]

# Data sheets say GB; reading it as 10^9 leaves some 7 % of the card for driver, context and fragmentation.
GB = 10**9


@dataclass(frozen=True)
class DeviceDefaults:
    """Defaults of one device name.

    Attributes:
        memory_bytes: memory of the device; None when the name doesn't tell (no limit unless the file sets one).
        intra_node, inter_node: bandwidth per device and direction, latency of a small message.
        source: where the figures come from.
    """

    memory_bytes: int | None
    intra_node: Link
    inter_node: Link
    source: str


# 400 Gbit/s and 200 Gbit/s a device: one NIC of the generation per accelerator, as in DGX H100 and DGX A100.
_NDR = Link(latency_s=5e-6, bandwidth_bytes_per_s=50e9)
_HDR = Link(latency_s=5e-6, bandwidth_bytes_per_s=25e9)


def _nvlink(bytes_per_s: float) -> Link:
    return Link(latency_s=3e-6, bandwidth_bytes_per_s=bytes_per_s)


DEVICES: dict[str, DeviceDefaults] = {
    "cpu": DeviceDefaults(
        None,
        Link(latency_s=190e-6, bandwidth_bytes_per_s=1.5e9),
        Link(latency_s=250e-6, bandwidth_bytes_per_s=1.25e9),
        "gloo between two processes of one host, 1 KiB and 32 MiB messages, torch 2.13; between nodes: 10 Gbit/s",
    ),
    "cuda": DeviceDefaults(
        None,
        Link(latency_s=5e-6, bandwidth_bytes_per_s=25e9),
        Link(latency_s=10e-6, bandwidth_bytes_per_s=12.5e9),
        "PCIe 4.0 x16 at about 80 % of 31.5 GB/s; between nodes: 100 Gbit/s",
    ),
    "a100-40g": DeviceDefaults(40 * GB, _nvlink(300e9), _HDR, "NVIDIA A100 data sheet: NVLink 600 GB/s both ways"),
    "a100-80g": DeviceDefaults(80 * GB, _nvlink(300e9), _HDR, "NVIDIA A100 data sheet: NVLink 600 GB/s both ways"),
    "h100": DeviceDefaults(80 * GB, _nvlink(450e9), _NDR, "NVIDIA H100 SXM data sheet: NVLink 900 GB/s both ways"),
    "h200": DeviceDefaults(141 * GB, _nvlink(450e9), _NDR, "NVIDIA H200 SXM data sheet: NVLink 900 GB/s both ways"),
    "b200": DeviceDefaults(180 * GB, _nvlink(900e9), _NDR, "NVIDIA DGX B200 data sheet: NVLink 1.8 TB/s both ways"),
    "mi300x": DeviceDefaults(
        192 * GB,
        Link(latency_s=5e-6, bandwidth_bytes_per_s=64e9),
        _NDR,
        "AMD MI300X data sheet: 192 GB; one Infinity Fabric link to each of 7 peers, 128 GB/s both ways",
    ),
}
