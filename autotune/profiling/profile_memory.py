"""Peak memory of a pipeline device from metered stages: what it holds, pass by pass and message by message. No torch.

Walks the device's lowered actions in the order the executor runs them, so receive buffers live from their posting. A
sent tensor is taken to have left when the next pass begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.profiling.profile_records import StageFigures
from autotune.schedules.lowering import Action, Receive, Send
from autotune.schedules.schedule import Pass

__all__ = ["WalkedPeak", "walk"]


@dataclass(frozen=True)
class WalkedPeak:
    """The worst moment of a device: bytes of activations held, of tensors between stages, and of the running pass."""

    held_bytes: float
    boundary_bytes: float
    temporary_bytes: float

    @property
    def total_bytes(self) -> float:
        """Everything beside parameters, gradients and optimizer state."""
        return self.held_bytes + self.boundary_bytes + self.temporary_bytes


def walk(
    actions: Sequence[Action], figures: Mapping[int, StageFigures], boundary_bytes: float, last_stage: int
) -> WalkedPeak:
    """The peak of a device that runs `actions`.

    Args:
        figures: of the device's stages.
        boundary_bytes: the activation between two stages on one rank.
        last_stage: of the whole pipeline.
    """
    held = boundary = 0.0
    worst = WalkedPeak(0.0, 0.0, 0.0)
    for action in actions:
        if isinstance(action, Receive):
            boundary += boundary_bytes
            continue
        if isinstance(action, Send):
            boundary -= boundary_bytes
            continue
        stage = figures[action.stage]
        before = (held, boundary)
        held, boundary = _after(action, stage, held, boundary, boundary_bytes, last_stage)
        at = (held, boundary) if action.kind == "F" else before
        peak = WalkedPeak(*at, stage.passes[action.kind].peak_bytes)
        if peak.total_bytes > worst.total_bytes:
            worst = peak
    return worst


def _after(
    item: Pass, stage: StageFigures, held: float, boundary: float, boundary_bytes: float, last_stage: int
) -> tuple[float, float]:
    """What is held, of activations and of boundary tensors, when a pass has ended."""
    if item.kind == "W":
        return held - stage.kept_bytes, boundary
    if item.kind == "F":
        return held + stage.held_bytes, boundary + boundary_bytes * (item.stage < last_stage)
    kept = stage.kept_bytes if item.kind == "B" else 0.0
    # The input turns into its gradient; the gradient of the output has been read.
    return held - stage.held_bytes + kept, boundary - boundary_bytes * (item.stage < last_stage)
