"""Building blocks: the passes of one microbatch on all devices, in slots of one unit pass.

A building block repeated every `interval` slots is a pipeline in its steady state (Pipeline Parallelism with
Controllable Memory, arXiv 2405.15362). How long a stage's activation is held is read off the block, so the block
decides the memory of the whole schedule before there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, permutations
from math import ceil

from autotune.schedules.placement import device_stages
from autotune.schedules.schedule import Pass

__all__ = [
    "BuildingBlock",
    "chain_block",
    "fill_backward_pairs",
    "fill_weights",
    "two_part_block",
    "two_part_blocks",
    "uniform_block",
]


@dataclass(frozen=True)
class BuildingBlock:
    """One microbatch's passes; F, B and W take one slot, a fused BW takes two.

    Attributes:
        placement: stage -> device.
        interval: slots from one microbatch to the next; 3 v for v stages a device leaves no slot idle.
        forward, backward: first slot of F and of B (or BW) of every stage.
        weight: slot of W of every stage, or None when the backward is fused.
    """

    placement: tuple[int, ...]
    interval: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...] | None

    @property
    def devices(self) -> int:
        """Devices of the pipeline (p)."""
        return max(self.placement) + 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline (S)."""
        return len(self.placement)

    def passes(self, microbatch: int = 0) -> Iterator[tuple[int, int, Pass]]:
        """(device, slot, pass) of every pass of one microbatch, `microbatch` intervals later than the block."""
        shift = microbatch * self.interval
        for stage, device in enumerate(self.placement):
            yield device, shift + self.forward[stage], Pass("F", stage, microbatch)
            kind = "BW" if self.weight is None else "B"
            yield device, shift + self.backward[stage], Pass(kind, stage, microbatch)  # type: ignore[arg-type]
            if self.weight is not None:
                yield device, shift + self.weight[stage], Pass("W", stage, microbatch)

    def last_slot(self, stage: int) -> int:
        """The first slot after the stage's last pass."""
        return self.backward[stage] + 2 if self.weight is None else self.weight[stage] + 1

    def lifespan(self, stage: int) -> int:
        """Slots from the start of F to the end of W (or BW): how long the stage's activation is held."""
        return self.last_slot(stage) - self.forward[stage]

    def peak_bound(self, device: int) -> Fraction:
        """Most activation `device` can hold, in microbatches of its share: sum of ceil(lifespan / interval) / v.

        Source: arXiv 2405.15362, equation 1.
        """
        held = device_stages(self.placement)[device]
        return Fraction(sum(ceil(self.lifespan(stage) / self.interval) for stage in held), len(held))

    def steady_peak(self, device: int) -> Fraction:
        """Activation that `device` holds at worst in the steady state, in the unit of `peak_bound` and never above it.

        The bound takes the worst moment of every stage; this counts how many lifespans overlap at each slot.
        """
        held = device_stages(self.placement)[device]
        worst = 0
        for slot in range(self.interval):
            alive = 0
            for stage in held:
                # Microbatches k with forward + k T <= slot + n T < last_slot + k T, for n large enough.
                alive += (slot - self.forward[stage]) // self.interval - (slot - self.last_slot(stage)) // self.interval
            worst = max(worst, alive)
        return Fraction(worst, len(held))

    def problems(self) -> list[str]:
        """Why the block can't be repeated: passes that collide or run before what they read; empty if it can."""
        found = []
        for device in range(self.devices):
            taken: dict[int, Pass] = {}
            for slot, item in sorted((slot, item) for on, slot, item in self.passes() if on == device):
                for used in range(slot, slot + (2 if item.kind == "BW" else 1)):
                    other = taken.setdefault(used % self.interval, item)
                    if other is not item:
                        found.append(f"device {device}: {other.kind}{other.stage} and {item.kind}{item.stage} collide")
        length = 2 if self.weight is None else 1
        chain = [(f"F{s}", self.forward[s], 1) for s in range(self.stages)]
        chain += [(f"B{s}", self.backward[s], length) for s in reversed(range(self.stages))]
        for (before, slot, taken_slots), (after, next_slot, _) in pairwise(chain):
            if next_slot < slot + taken_slots:
                found.append(f"{after} starts at {next_slot}, before the end of {before}")
        if self.weight is not None:
            found += [
                f"W{s} starts before the end of B{s}" for s in range(self.stages) if self.weight[s] <= self.backward[s]
            ]
        return found


def chain_block(
    placement: Sequence[int], forward_gaps: Sequence[int], backward_gaps: Sequence[int], turn: int = 1
) -> BuildingBlock:
    """The block with given gaps along the chain F0, F1, ..., B1, B0; W takes the first free slots after its B.

    Args:
        forward_gaps: slots from the start of F of each stage to that of the next; length S - 1.
        backward_gaps: slots from the start of B of stage s + 1 to that of stage s, in model order; length S - 1.
        turn: slots from the last F to the first B.
    """
    stages = len(placement)
    forward = [0]
    for gap in forward_gaps:
        forward.append(forward[-1] + gap)
    backward = [0] * stages
    backward[-1] = forward[-1] + turn
    for stage in reversed(range(stages - 1)):
        backward[stage] = backward[stage + 1] + backward_gaps[stage]
    interval = 3 * stages // (max(placement) + 1)
    weight = fill_weights(placement, interval, forward, backward)
    return BuildingBlock(tuple(placement), interval, tuple(forward), tuple(backward), weight)


def uniform_block(
    placement: Sequence[int], down: int, up: int, turns: tuple[int, int, int], interval: int = 6
) -> BuildingBlock:
    """The V block whose hops are the same on every device.

    The balance condition (arXiv 2405.15362, equation 2) ties the backward to the forward: the backward of the second
    stage, which runs first, hops down the devices as the forward of the first stage does, and the other pair hops up.
    So a device holds (down + up) / 6 of the activation of the whole model.

    Args:
        placement: a V placement.
        down: slots per hop of F of the first stage and of B of the second one.
        up: slots per hop of F of the second stage and of B of the first one.
        turns: slots from F of the first to F of the second stage on the last device, from the last F to the first B on
            device 0, and from B of the second to B of the first stage on the last device.
    """
    devices = max(placement) + 1
    assert interval == 6
    hops_down, hops_up = [down] * (devices - 1), [up] * (devices - 1)
    # Going back in model order, B of the second stage runs from device 0 to the last, B of the first one back up.
    return chain_block(placement, [*hops_down, turns[0], *hops_up], [*hops_up, turns[2], *hops_down], turns[1])


def two_part_block(
    placement: Sequence[int], slots: tuple[int, int, int], hops: tuple[int, int], split: int
) -> BuildingBlock | None:
    """An adaptive V block: hops of one size between the first devices, of another one after; None if it collides.

    Every pass sits at the earliest slot after what it reads whose place in the interval of 6 is the demanded one.

    Args:
        slots: place in the interval, 1 to 5, of F of the second stage, B of the second and B of the first stage on
            device 0, where F of the first stage is at 0 (arXiv 2405.15362, appendix A: 60 patterns).
        hops: slots per hop of the first part and the second part.
        split: how many hops belong to the first part.
    """
    devices = max(placement) + 1
    shift = [0]
    for gap in range(devices - 1):
        shift.append(shift[-1] + (hops[0] if gap < split else hops[1]))
    patterns = ((0, 1), (slots[0], -1), (slots[1], 1), (slots[2], -1))

    def place(pattern: tuple[int, int], device: int) -> int:
        base, direction = pattern
        return (base + (shift[device] if direction > 0 else -device)) % 6

    chain: list[int] = []
    routes = (range(devices), reversed(range(devices)), range(devices), reversed(range(devices)))
    for pattern, route in zip(patterns, routes, strict=True):
        for device in route:
            earliest = chain[-1] + 1 if chain else 0
            chain.append(earliest + (place(pattern, device) - earliest) % 6)
    stages = 2 * devices
    forward, backward = chain[:stages], chain[: stages - 1 : -1]
    for device in range(devices):
        if len({place(pattern, device) for pattern in patterns}) < 4:
            return None
    weight = fill_weights(placement, 6, forward, backward)
    return BuildingBlock(tuple(placement), 6, tuple(forward), tuple(backward), weight)


def two_part_blocks(placement: Sequence[int]) -> Iterator[BuildingBlock]:
    """Every distinct adaptive V block that can be repeated: 60 first devices, 15 pairs of hops, p - 1 splits.

    Source: arXiv 2405.15362, appendix A, and the search space of the authors' code.
    """
    seen = set()
    for slots in permutations(range(1, 6), 3):
        for hops in combinations_with_replacement(range(5, 0, -1), 2):
            for split in range(1, max(placement) + 1):
                block = two_part_block(placement, slots, hops, split)
                if block is not None and block not in seen and not block.problems():
                    seen.add(block)
                    yield block


def fill_weights(
    placement: Sequence[int], interval: int, forward: Sequence[int], backward: Sequence[int]
) -> tuple[int, ...]:
    """For every stage the first free slot of the interval after its B, stages in the order of their B.

    F and B that collide get slots all the same, so that `BuildingBlock.problems` can tell where they do.
    """
    weight = [0] * len(placement)
    for held in device_stages(tuple(placement)):
        taken = {slot % interval for stage in held for slot in (forward[stage], backward[stage])}
        for stage in sorted(held, key=lambda s: backward[s]):
            slot = backward[stage] + 1
            while slot % interval in taken and len(taken) < interval:
                slot += 1
            taken.add(slot % interval)
            weight[stage] = slot
    return tuple(weight)


def fill_backward_pairs(placement: Sequence[int], forward: Sequence[int], first: int) -> BuildingBlock:
    """The fused V block over given forwards: every BW takes the first pair of slots that leaves a pair for the other.

    Args:
        forward: slot of F of every stage, one odd distance apart on each device.
        first: the earliest slot of the first backward.
    """
    stages = len(placement)
    backward = [0] * stages
    earliest = first
    for stage in reversed(range(stages)):
        device = placement[stage]
        other = next(s for s in range(stages) if placement[s] == device and s != stage)
        taken = {forward[stage] % 6, forward[other] % 6}
        if other > stage:
            taken |= {backward[other] % 6, (backward[other] + 1) % 6}
        slot = earliest
        while not _leaves_pairs(taken, slot % 6):
            slot += 1
        backward[stage] = slot
        earliest = slot + 2
    return BuildingBlock(tuple(placement), 6, tuple(forward), tuple(backward), None)


def _leaves_pairs(taken: set[int], slot: int) -> bool:
    """Whether `slot` and the next one of an interval of 6 are free and leave another pair free, or nothing."""
    pair = {slot, (slot + 1) % 6}
    if pair & taken:
        return False
    rest = set(range(6)) - taken - pair
    return not rest or any((one + 1) % 6 in rest for one in rest)
