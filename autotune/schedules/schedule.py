"""The one type that every layer reads: a pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Pass", "PassKind", "Schedule"]

PassKind = Literal["F", "B", "W", "BW"]


class Pass(NamedTuple):
    """One pass of one stage for one microbatch.

    F forward, B gradient of the input, W gradient of the weights, BW both fused.
    """

    kind: PassKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """For every device the ordered list of its passes, plus the placement.

    Attributes:
        name: the name it was generated under.
        microbatches: microbatches, numbered from 0, that flow through the pipeline.
        placement: device of every stage, in model order (stage -> device), devices numbered from 0.
        order: for every device its passes in the order it runs them.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    order: tuple[tuple[Pass, ...], ...]

    @property
    def devices(self) -> int:
        """Devices of the pipeline (p)."""
        return len(self.order)

    @property
    def stages(self) -> int:
        """Stages of the pipeline (S)."""
        return len(self.placement)

    @property
    def stages_per_device(self) -> int:
        """Stages of device 0 (v); every generator gives all devices the same number."""
        return self.placement.count(0)

    def device_stages(self, device: int) -> tuple[int, ...]:
        """Stages that `device` holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == device)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values; `from_dict` reads them back."""
        return {
            "name": self.name,
            "devices": self.devices,
            "microbatches": self.microbatches,
            "placement": list(self.placement),
            "order": [[list(p) for p in passes] for passes in self.order],
        }

    @classmethod
    def from_dict(cls, values: dict) -> Schedule:
        """The schedule that `to_dict` wrote (extra keys are ignored)."""
        return cls(
            name=values["name"],
            microbatches=values["microbatches"],
            placement=tuple(values["placement"]),
            order=tuple(tuple(Pass(*entry) for entry in passes) for passes in values["order"]),
        )
