"""What the engine is asked: one pipeline, its costs as arrays, and how much each device may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.errors import UserError
from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import PlacementKind, device_stages, placement_kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
else:
    Floats = Ints = Any

__all__ = ["CAP_TOLERANCE", "Floats", "Ints", "Problem", "Tables"]

# A peak is a short sum of stage activations: relative rounding of 1e-9 must not make a full device overfull.
CAP_TOLERANCE = 1e-9


class Tables(NamedTuple):
    """Costs of a pipeline as the compiled kernels read them; S stages, p devices, v stages a device.

    Attributes:
        device: device of every stage; int64[S].
        stages_of: stages of every device in model order; int64[p, v].
        slot: place of a stage among its device's stages; int64[S].
        forward, backward, weight: scaled times; float64[S]. With a fused backward `backward` holds both, `weight` 0.
        forward_hop: latency into F of a stage; float64[S].
        backward_hop: latency into B of a stage; float64[S].
        activation, kept: held from F to B, and the part that stays until W; float64[S].
        kinds: 3 for F, B, W; 2 when B and W are one pass; int64[1].
    """

    device: Ints
    stages_of: Ints
    slot: Ints
    forward: Floats
    backward: Floats
    weight: Floats
    forward_hop: Floats
    backward_hop: Floats
    activation: Floats
    kept: Floats
    kinds: Ints


@dataclass(frozen=True)
class Problem:
    """Schedule `microbatches` on a placement under costs.

    Attributes:
        placement: stage -> device; every device holds the same number of stages.
        costs: times, latencies and activations of the stages.
        fused: B and W run as one pass, `BW`.

    Raises:
        UserError: the placement is uneven, the costs are for another number of stages, or no microbatch is asked for.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: PassCosts
    fused: bool = False

    def __post_init__(self) -> None:
        held = device_stages(self.placement)
        if len({len(stages) for stages in held}) != 1 or not held[0]:
            raise UserError(f"every device must hold the same number of stages, placement is {list(self.placement)}")
        if self.costs.stages != len(self.placement):
            raise UserError(f"costs are for {self.costs.stages} stages, the placement has {len(self.placement)}")
        if self.costs.wrap_every != 1:
            raise UserError(f"the schedule engine charges every hop: wrap_every must be 1, not {self.costs.wrap_every}")
        if self.microbatches < 1:
            raise UserError(f"a schedule needs at least 1 microbatch, not {self.microbatches}")

    @cached_property
    def devices(self) -> int:
        """Devices of the pipeline (p)."""
        return max(self.placement) + 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline (S)."""
        return len(self.placement)

    @property
    def stages_per_device(self) -> int:
        """Stages each device holds (v)."""
        return self.stages // self.devices

    @cached_property
    def kind(self) -> PlacementKind | None:
        """The kind of the placement, or None when it is none of the known ones."""
        return placement_kind(self.placement)

    @property
    def passes(self) -> int:
        """Passes of one step on all devices."""
        return (2 if self.fused else 3) * self.stages * self.microbatches

    @cached_property
    def busiest_work(self) -> float:
        """Work of the busiest device for one microbatch, in the time unit of the costs."""
        costs = self.costs
        stage = [f + b + w for f, b, w in zip(costs.forward, costs.backward, costs.weight, strict=True)]
        return max(math.fsum(stage[s] for s in stages) for stages in device_stages(self.placement))

    @cached_property
    def scale(self) -> float:
        """Engine time = scale x time of the costs; a power of two, so that scaling rounds nothing.

        It brings the work of a device to about 3 per microbatch, so that one tolerance fits seconds and milliseconds.
        """
        total = sum(self.costs.forward) + sum(self.costs.backward) + sum(self.costs.weight)
        mean = total / self.devices
        return 2.0 ** -round(math.log2(mean / 3.0)) if mean > 0 else 1.0

    def with_fused_backward(self) -> Problem:
        """The same problem with B and W as one pass."""
        return replace(self, fused=True)

    def smallest_caps(self) -> tuple[float, ...]:
        """What each device holds when one microbatch is alone in the pipeline: no schedule holds less."""
        return tuple(
            math.fsum(self.costs.activation[stage] for stage in stages) for stages in device_stages(self.placement)
        )

    def caps(self, limit: float | Sequence[float]) -> tuple[float, ...]:
        """Most activation of every device under one limit for all, or one limit each."""
        caps = (limit,) * self.devices if isinstance(limit, (int, float)) else tuple(limit)
        if len(caps) != self.devices:
            raise UserError(f"memory limits are for {len(caps)} devices, the pipeline has {self.devices}")
        return caps

    def fits(self, caps: Sequence[float]) -> bool:
        """Whether any schedule stays within `caps` (one microbatch at a time does, if one does)."""
        least = self.smallest_caps()
        return all(need <= cap * (1 + CAP_TOLERANCE) for need, cap in zip(least, caps, strict=True))

    @cached_property
    def tables(self) -> Tables:
        """The costs as arrays, in engine time."""
        import numpy as np

        costs, scale = self.costs, self.scale
        stages = self.stages
        held = device_stages(self.placement)
        backward = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)] if self.fused else costs.backward
        slot = [held[device].index(stage) for stage, device in enumerate(self.placement)]
        into_forward = [costs.edge_latency(self.placement, max(s - 1, 0), s) for s in range(stages)]
        into_backward = [costs.edge_latency(self.placement, min(s + 1, stages - 1), s) for s in range(stages)]
        zeros = (0.0,) * stages
        return Tables(
            device=np.array(self.placement, np.int64),
            stages_of=np.array(held, np.int64),
            slot=np.array(slot, np.int64),
            forward=np.array(costs.forward) * scale,
            backward=np.array(backward) * scale,
            weight=np.array(zeros if self.fused else costs.weight) * scale,
            forward_hop=np.array(into_forward) * scale,
            backward_hop=np.array(into_backward) * scale,
            activation=np.array(costs.activation, dtype=np.float64),
            kept=np.array(zeros if self.fused else costs.kept, dtype=np.float64),
            kinds=np.array([2 if self.fused else 3], np.int64),
        )
