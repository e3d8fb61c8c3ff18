"""What fills each device: states for the whole step, activations and temporaries at the worst moment."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost.assumptions import StateBytes
from autotune.space.units import format_bytes

__all__ = ["MEMORY_ERROR", "OVER_LIMIT", "DeviceMemory", "fits_in", "memory_refusal"]

MEMORY_ERROR = 0.08
"""No published measurement is further below its prediction than this (`autotune validate` prints the errors)."""

OVER_LIMIT = "over limit"
"""The mark of a plan that is predicted not to fit, but isn't refused."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device at its peak, by what they hold.

    Attributes:
        parameters: the copy the passes read.
        gradients: accumulated gradients.
        optimizer: master copy and moments.
        activations: held between passes, at the moment of the peak.
        temporary: the running pass's own, at the same moment.
        buffers: scratch memory of libraries and persistent dummies.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    buffers: float

    @property
    def total(self) -> float:
        """Peak bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Bytes by what they hold, largest first."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return dict(sorted(named.items(), key=lambda item: -item[1]))

    @classmethod
    def of(cls, parameters: float, state: StateBytes, peak: float, held: float, buffers: float) -> DeviceMemory:
        """The memory of a device.

        Args:
            parameters: number of parameters on it.
            peak, held: activations with temporaries, and the activations alone, at the worst moment.
        """
        return cls(
            parameters=parameters * state.parameter,
            gradients=parameters * state.gradient,
            optimizer=parameters * state.optimizer,
            activations=held,
            temporary=peak - held,
            buffers=buffers,
        )


def fits_in(limit_bytes: float | None, peak_bytes: float) -> bool:
    """Whether a predicted peak, taken as it is, is within a device's memory; True without a limit."""
    return limit_bytes is None or peak_bytes <= limit_bytes


def memory_refusal(
    devices: tuple[DeviceMemory, ...], limit_bytes: float | None, proven_error: float = MEMORY_ERROR
) -> str | None:
    """Why a plan can't fit, or None: only when its prediction exceeds the limit by more than the proven error.

    The text names the heaviest device and what fills it.
    """
    if limit_bytes is None:
        return None
    heaviest = max(range(len(devices)), key=lambda d: devices[d].total)
    memory = devices[heaviest]
    if memory.total * (1 - proven_error) <= limit_bytes:
        return None
    filling = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.parts().items() if size > 0)
    return (
        f"refused (estimate): pipeline device {heaviest} would need {format_bytes(memory.total)} of "
        f"{format_bytes(limit_bytes)} even if the estimate is {proven_error:.0%} too high; it holds {filling}"
    )
