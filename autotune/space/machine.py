"""What one device can do: the figures that a time prediction needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autotune.space.training import DType

__all__ = ["LEGAL", "Legal", "Machine", "out_of_range"]


@dataclass(frozen=True)
class Legal:
    """The values that a figure may have: finite, above `low` (or equal to it with `closed`), and at most `high`."""

    low: float = 0.0
    closed: bool = False
    high: float = math.inf

    def holds(self, value: float) -> bool:
        """Whether `value` is one of them; nan and infinities never are."""
        above = value >= self.low if self.closed else value > self.low
        return above and value <= self.high and value < math.inf

    def __str__(self) -> str:
        least = f"{'at least' if self.closed else 'above'} {self.low:g}"
        return f"finite and {least}" if self.high == math.inf else f"{least} and at most {self.high:g}"


_ABOVE_ZERO = Legal()
_SHARE = Legal(high=1.0)
_SECONDS = Legal(closed=True, high=1.0)

LEGAL: dict[str, Legal] = {
    "peak_flops": _ABOVE_ZERO,
    "peak_flops_float32": _ABOVE_ZERO,
    "memory_bytes": _ABOVE_ZERO,
    "memory_bytes_per_s": _ABOVE_ZERO,
    "efficiency": _SHARE,
    "kernel_s": _SECONDS,
    "memory_efficiency": _SHARE,
    # Relative to a large matmul, not to a peak: attention may be somewhat faster than the matmuls of a poor library.
    "attention_efficiency": Legal(high=1.5),
    "link_efficiency": _SHARE,
    "visit_s": _SECONDS,
    "layer_host_s": _SECONDS,
}
"""The legal range of each figure of a `Machine`, wherever it comes from."""


def out_of_range(name: str, value: float) -> str | None:
    """What is wrong with a figure's value, to be said after it; None if it is legal."""
    legal = LEGAL[name]
    return None if legal.holds(value) else f"must be {legal}"


@dataclass(frozen=True)
class Machine:
    """One device as the time model sees it.

    A matmul of x FLOPs takes x / (peak_flops * efficiency) + kernel_s, so its efficiency grows with its size and ends
    at `efficiency`; it never takes less than moving its operands. Every other kernel and collective pays kernel_s too.

    Attributes:
        peak_flops, peak_flops_float32: dense matmul FLOP/s of half precision and of float32, from the data sheet.
        memory_bytes_per_s: bandwidth of the device's memory, from the data sheet.
        memory_efficiency: share of it that streaming kernels reach.
        efficiency, kernel_s: the two fitted machine numbers: what large matmuls reach, and the fixed cost of a kernel.
        attention_efficiency: FLOP/s of flash attention relative to a large matmul.
        link_efficiency: share of a link's bandwidth that collectives and messages reach.
        visit_s: time a device loses beside the passes every time a microbatch goes through a stage and back (host work,
            hand-over of tensors): once a stage and microbatch.
        layer_host_s: least time of one layer's F, B and W together: the host can't launch its kernels faster.
    """

    name: str
    peak_flops: float
    peak_flops_float32: float
    memory_bytes: float | None
    memory_bytes_per_s: float
    efficiency: float
    kernel_s: float
    memory_efficiency: float = 0.85
    attention_efficiency: float = 0.75
    link_efficiency: float = 0.8
    visit_s: float = 0.0
    layer_host_s: float = 0.0

    def peak(self, dtype: DType) -> float:
        """Dense matmul FLOP/s in `dtype`."""
        return self.peak_flops_float32 if dtype == "float32" else self.peak_flops

    def with_numbers(self, **numbers: float) -> Machine:
        """The same machine with other fitted numbers."""
        return replace(self, **numbers)  # type: ignore[arg-type]
