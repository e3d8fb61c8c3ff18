"""From a schedule to what each device does: its passes with the sends and receives between them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from autotune.errors import UserError
from autotune.schedules import kernel
from autotune.schedules.schedule import Pass, Schedule

__all__ = ["Action", "Receive", "Send", "lower"]


class Send(NamedTuple):
    """Give a result of this device to another.

    Attributes:
        kind: `F` for an activation, `B` for a gradient.
        stage: the stage that made it; stage + 1 reads an activation, stage - 1 a gradient.
        peer: the device that receives.
    """

    kind: Literal["F", "B"]
    stage: int
    microbatch: int
    peer: int

    @property
    def reader(self) -> int:
        """The stage that reads the tensor."""
        return self.stage + 1 if self.kind == "F" else self.stage - 1

    def __str__(self) -> str:
        return f"send {self.kind}{self.stage}.{self.microbatch} to {self.peer}"


class Receive(NamedTuple):
    """Take a result of another device: `kind`, `stage`, `microbatch` as in its `Send`; `peer` is the sender."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int
    peer: int

    @property
    def reader(self) -> int:
        """The stage that reads the tensor."""
        return self.stage + 1 if self.kind == "F" else self.stage - 1

    def __str__(self) -> str:
        return f"receive {self.kind}{self.stage}.{self.microbatch} from {self.peer}"


Action = Pass | Send | Receive


def lower(schedule: Schedule) -> list[list[Action]]:
    """For every device its passes, in order, with every send and receive between different devices.

    All devices' lists are cuts of one global order: passes in the order they end when F, B and W take the same time,
    each followed at once by its send and by the peer's receive. So the receives of a pair of devices are posted in the
    order of the sends, which backends without tags need, and even transfers that block until they are matched can't
    deadlock. Neighbouring stages on one device hand over locally: no action.

    Raises:
        UserError: the schedule deadlocks.
    """
    stages, placement = schedule.stages, schedule.placement
    times = kernel.run_in_slots(schedule)
    if not times.complete:
        raise UserError(f"schedule {schedule.name} deadlocks: {times.ran} of {len(times.end)} passes can run")
    flat = [(device, item) for device, passes in enumerate(schedule.order) for item in passes]
    actions: list[list[Action]] = [[] for _ in schedule.order]
    for place in sorted(range(len(flat)), key=times.end.__getitem__):
        device, item = flat[place]
        doing, stage, microbatch = item
        own = actions[device]
        own.append(item)
        if doing == "W":
            continue
        kind: Literal["F", "B"] = "F" if doing == "F" else "B"
        reader = stage + 1 if kind == "F" else stage - 1
        if 0 <= reader < stages and (peer := placement[reader]) != device:
            own.append(Send(kind, stage, microbatch, peer))
            actions[peer].append(Receive(kind, stage, microbatch, device))
    return actions
