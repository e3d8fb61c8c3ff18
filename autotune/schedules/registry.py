"""Every named schedule, what it demands, and the one way to build it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autotune.errors import UserError
from autotune.schedules.schedule import Schedule

__all__ = ["SCHEDULES", "PlacementKind", "ScheduleKind", "build", "find"]

PlacementKind = Literal["linear", "loop", "v"]


@dataclass(frozen=True)
class ScheduleKind:
    """A named schedule.

    Attributes:
        placement: `linear` (one stage a device), `loop` (stage s on device s mod p) or `v` (two stages a device,
            first and last stage on device 0).
        split_backward: whether B and W are passes of their own.
        generate: (devices, microbatches, stages_per_device) -> Schedule, for arguments that meet the demands.
        peak_activation, bubble: formulas in words, for the table of schedules (p devices, m microbatches, v stages).
        source: where the schedule comes from.
        min_stages_per_device, max_stages_per_device: legal v (max None: no upper end).
        microbatch_multiple: whether m must be a multiple of p.
    """

    name: str
    placement: PlacementKind
    split_backward: bool
    generate: Callable[[int, int, int], Schedule]
    peak_activation: str
    bubble: str
    source: str
    min_stages_per_device: int = 1
    max_stages_per_device: int | None = 1
    microbatch_multiple: bool = False

    def stages_problem(self, stages_per_device: int) -> str | None:
        """Why `stages_per_device` is illegal, or None."""
        low, high = self.min_stages_per_device, self.max_stages_per_device
        if stages_per_device >= low and (high is None or stages_per_device <= high):
            return None
        legal = f"exactly {low}" if high == low else f"at least {low}" if high is None else f"{low} to {high}"
        return f"{self.name} needs {legal} stages per device, not {stages_per_device}"

    def microbatches_problem(self, devices: int, microbatches: int) -> str | None:
        """Why `microbatches` is illegal on `devices` devices, or None."""
        if microbatches < 1:
            return f"{self.name} needs at least 1 microbatch, not {microbatches}"
        if self.microbatch_multiple and microbatches % devices:
            return f"{self.name} needs microbatches to be a multiple of {devices} devices, not {microbatches}"
        return None
