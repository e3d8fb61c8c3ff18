"""Seconds of what happens once a step: gradient reduction over dp, and the optimizer."""

from __future__ import annotations

from autotune.cost.assumptions import Assumptions, element_bytes
from autotune.cost.communication import gather_s
from autotune.cost.devices import Machine
from autotune.space.cluster import Link
from autotune.space.training import DType

__all__ = ["dp_seconds", "optimizer_seconds"]


def dp_seconds(
    parameters: float, dp: int, link: Link, machine: Machine, dtype: DType, assumptions: Assumptions
) -> float:
    """Exposed seconds of the dp traffic of one device a step.

    Replicated: gradients are all-reduced (two gathers). ZeRO-1 and FSDP: gradients are reduce-scattered and parameters
    gathered, once a step (Rajbhandari et al., arXiv 1910.02054, section 7).
    """
    if dp == 1:
        return 0.0
    size = element_bytes(dtype)
    gradient = float(assumptions.gradient_bytes or size) * parameters
    second = gradient if assumptions.sharding == "none" else size * parameters
    moved = sum(gather_s(x, dp, link, machine.link_efficiency) for x in (gradient, second))
    return moved * (1.0 - assumptions.dp_overlap)


def optimizer_seconds(parameters: float, dp: int, machine: Machine, dtype: DType, assumptions: Assumptions) -> float:
    """Seconds of zeroing gradients, unscaling, norm, clipping and Adam on one device: all bound by memory.

    Bytes a parameter: zero g; unscale 2g with loss scaling; norm g; clip 2g; fused Adam reads the gradient and reads
    and writes master and two moments, 24 + g; casting the master to half precision 4 + e. Unfused Adam (torch's
    single-tensor loop): decay 8, lerp 12, square 8 + 12, root 8, two scalings 16, update 16 = 80. All but the zeroing
    touch the rank's own part alone when the optimizer is sharded.
    """
    size = element_bytes(dtype)
    g = float(assumptions.gradient_bytes or size)
    owned = parameters if assumptions.sharding == "none" else parameters / dp
    each = 3 * g + (24 + g if assumptions.fused_optimizer else 80)
    if assumptions.loss_scaling:
        each += 2 * g
    if size == 2 and assumptions.master_weights:
        each += 4 + size
    return (g * parameters + each * owned) / (machine.memory_bytes_per_s * machine.memory_efficiency)
