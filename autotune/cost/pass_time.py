"""Seconds of a pass on one device: its kernels one after the other, its tp collectives after them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost.communication import rings_s
from autotune.cost.devices import Machine
from autotune.cost.work import Matmul, PassWork
from autotune.space.cluster import Link
from autotune.space.training import DType

__all__ = ["PassSeconds", "matmul_s", "pass_seconds"]


@dataclass(frozen=True)
class PassSeconds:
    """Time of one pass; the device is busy for both.

    Attributes:
        compute: kernels.
        tp: tensor-parallel collectives that no kernel hides.
    """

    compute: float
    tp: float

    @property
    def total(self) -> float:
        """Time of the pass."""
        return self.compute + self.tp

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(self.compute + other.compute, self.tp + other.tp)

    def times(self, count: float) -> PassSeconds:
        """The same pass over `count` equal layers, or slower by that factor."""
        return PassSeconds(self.compute * count, self.tp * count)


def matmul_s(matmul: Matmul, machine: Machine, dtype: DType) -> float:
    """Seconds of one (batched) matmul: the roofline (Williams et al., 2009) plus a fixed cost a kernel."""
    busy = matmul.flops / (machine.peak(dtype) * machine.efficiency)
    moving = matmul.moved / (machine.memory_bytes_per_s * machine.memory_efficiency)
    return max(busy, moving) + machine.kernel_s


def pass_seconds(
    work: PassWork,
    machine: Machine,
    dtype: DType,
    tp: int,
    link: Link,
    *,
    least_s: float = 0.0,
    tp_overlap: float = 0.0,
) -> PassSeconds:
    """Time of one pass.

    Args:
        link: bounds the collectives of the tp group.
        least_s: host floor: launching the pass takes this long.
        tp_overlap: share of the collectives hidden behind kernels.
    """
    compute = sum(matmul_s(m, machine, dtype) for m in work.matmuls)
    rate = machine.peak(dtype) * machine.efficiency * machine.attention_efficiency
    compute += sum(a.flops / rate + machine.kernel_s for a in work.attention)
    compute += work.streamed_bytes / (machine.memory_bytes_per_s * machine.memory_efficiency)
    compute += work.streams * machine.kernel_s
    tp_s = 0.0
    if tp > 1 and work.gathers:
        sent = work.gather_bytes * (tp - 1) / tp
        tp_s = rings_s(sent, work.gathers, tp, link, machine.link_efficiency) + work.gathers * machine.kernel_s
    return PassSeconds(max(compute, least_s), tp_s * (1.0 - tp_overlap))
