"""Which device holds which stage, and which pass waits for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.errors import UserError
from autotune.schedules.schedule import Pass, PassKind

__all__ = [
    "PlacementKind",
    "dependencies",
    "device_stages",
    "linear_placement",
    "loop_placement",
    "make_placement",
    "placement_kind",
    "shares_ends",
    "v_placement",
]

PlacementKind = Literal["linear", "loop", "v"]


def linear_placement(devices: int) -> tuple[int, ...]:
    """One stage a device: stage s on device s.

    >>> linear_placement(3)
    (0, 1, 2)
    """
    return tuple(range(devices))


def loop_placement(devices: int, stages_per_device: int) -> tuple[int, ...]:
    """Interleaved stages: stage s on device s mod p.

    >>> loop_placement(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(devices)) * stages_per_device


def v_placement(devices: int) -> tuple[int, ...]:
    """Two stages a device, down the devices and back up, so that device 0 holds the first and the last stage.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    return tuple(range(devices)) + tuple(reversed(range(devices)))


def make_placement(kind: PlacementKind, devices: int, stages_per_device: int) -> tuple[int, ...]:
    """The placement of a kind.

    Raises:
        UserError: the kind does not allow this number of stages per device (linear 1, v 2, loop 1 or more).
    """
    if devices < 1 or stages_per_device < 1:
        raise UserError(
            f"a placement needs at least 1 device and 1 stage per device, not {devices} and {stages_per_device}"
        )
    if kind == "loop":
        return loop_placement(devices, stages_per_device)
    demanded = 1 if kind == "linear" else 2
    if stages_per_device != demanded:
        raise UserError(f"{kind} placement needs exactly {demanded} stages per device, not {stages_per_device}")
    return linear_placement(devices) if kind == "linear" else v_placement(devices)


def placement_kind(placement: tuple[int, ...]) -> PlacementKind | None:
    """The kind that `placement` is, or None when it is none of them; one device with two stages counts as `loop`."""
    devices = max(placement) + 1
    share, rest = divmod(len(placement), devices)
    if rest == 0 and placement == loop_placement(devices, share):
        return "linear" if share == 1 else "loop"
    return "v" if placement == v_placement(devices) else None


def shares_ends(placement: Sequence[int]) -> bool:
    """Whether one device holds both the first stage (embedding) and the last one (head).

    >>> shares_ends(v_placement(3)), shares_ends(loop_placement(3, 2)), shares_ends(linear_placement(1))
    (True, False, True)
    """
    return placement[0] == placement[-1]


def device_stages(placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For every device the stages it holds, in model order."""
    held: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, device in enumerate(placement):
        held[device].append(stage)
    return tuple(tuple(stages) for stages in held)


def dependencies(item: Pass, stages: int, gradient: PassKind = "B") -> tuple[Pass, ...]:
    """The passes whose results `item` reads, for a model of `stages` stages.

    F reads the activation of the stage before; B and BW read the stage's own F and the gradient of the stage after;
    W reads its own B.

    Args:
        gradient: the kind of the backward pass on the next stage (`B` or `BW`): a schedule may use both.
    """
    kind, stage, microbatch = item
    if kind == "F":
        return (Pass("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Pass("B", stage, microbatch),)
    own = Pass("F", stage, microbatch)
    return (own,) if stage == stages - 1 else (own, Pass(gradient, stage + 1, microbatch))
