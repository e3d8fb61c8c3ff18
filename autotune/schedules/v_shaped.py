"""Schedules on the V placement: two stages a device, built from building blocks, and DualPipe-V in closed form."""

from __future__ import annotations

from autotune.schedules.building_block import BuildingBlock, fill_backward_pairs, uniform_block
from autotune.schedules.placement import v_placement
from autotune.schedules.schedule import Pass, Schedule
from autotune.schedules.unroll import unroll

__all__ = ["BLOCKS", "block_of", "dualpipe_v", "one_f_one_b_v", "v_half", "v_min", "v_zb", "zb_v"]


def v_min_block(devices: int) -> BuildingBlock:
    """Hops of 1 and 1: a third of 1F1B's memory (arXiv 2405.15362, table 8)."""
    wait = 3 if devices % 3 == 0 else 1
    return uniform_block(v_placement(devices), down=1, up=1, turns=(1, wait, 1))


def v_half_block(devices: int) -> BuildingBlock:
    """Hops of 2 and 1: half of 1F1B's memory (arXiv 2405.15362, table 8; turns as in the authors' code)."""
    wait = 4 if devices % 2 == 0 else 1
    return uniform_block(v_placement(devices), down=2, up=1, turns=(1, wait, 2))


def v_zb_block(devices: int) -> BuildingBlock:
    """Hops of 4 and 2: no bubble at 1F1B's memory (arXiv 2405.15362, section 3)."""
    return uniform_block(v_placement(devices), down=4, up=2, turns=(1, 1, 1))


def zb_v_block(devices: int) -> BuildingBlock:
    """Hops of 5 and 1: every device runs F B W of one stage, then of the other (arXiv 2401.10241, section 6)."""
    return uniform_block(v_placement(devices), down=5, up=1, turns=(1, 1, 1))


def one_f_one_b_v_block(devices: int) -> BuildingBlock:
    """Forward hops of 1, fused backwards in the pairs of slots left: 2/3 of 1F1B's memory (arXiv 2405.15362)."""
    forward = range(2 * devices)
    return fill_backward_pairs(v_placement(devices), forward, first=2 * devices)


BLOCKS = {
    "v-min": v_min_block,
    "v-half": v_half_block,
    "v-zb": v_zb_block,
    "zb-v": zb_v_block,
    "1f1b-v": one_f_one_b_v_block,
}


def block_of(name: str, devices: int) -> BuildingBlock | None:
    """The building block that the named schedule is unrolled from, or None when it has a closed form instead."""
    return BLOCKS[name](devices) if name in BLOCKS else None


def _unrolled(name: str, devices: int, microbatches: int) -> Schedule:
    return unroll(BLOCKS[name](devices), microbatches).schedule(name)


def v_min(devices: int, microbatches: int, stages_per_device: int = 2) -> Schedule:
    """A third of 1F1B's memory."""
    return _unrolled("v-min", devices, microbatches)


def v_half(devices: int, microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Half of 1F1B's memory."""
    return _unrolled("v-half", devices, microbatches)


def v_zb(devices: int, microbatches: int, stages_per_device: int = 2) -> Schedule:
    """1F1B's memory and no bubble, from the controllable-memory family."""
    return _unrolled("v-zb", devices, microbatches)


def zb_v(devices: int, microbatches: int, stages_per_device: int = 2) -> Schedule:
    """1F1B's memory and no bubble, with the steady state of the zero-bubble paper."""
    return _unrolled("zb-v", devices, microbatches)


def one_f_one_b_v(devices: int, microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Fused backwards at two thirds of 1F1B's memory."""
    return _unrolled("1f1b-v", devices, microbatches)


def dualpipe_v(devices: int, microbatches: int, stages_per_device: int = 2) -> Schedule:
    """DualPipe cut in half: pairs of F and B that can overlap (DeepSeek-AI, DualPipe repository); needs m >= 2 p."""
    order = tuple(_dualpipe_v_device(device, devices, microbatches) for device in range(devices))
    return Schedule("dualpipe-v", microbatches, v_placement(devices), order)


def _dualpipe_v_device(device: int, devices: int, microbatches: int) -> tuple[Pass, ...]:
    """The eight phases of DualPipe-V on one device; stage 0 and 1 below are the device's first and second stage."""
    stages = (device, 2 * devices - 1 - device)
    behind = devices - 1 - device
    order: list[Pass] = []
    next_forward, next_backward = [0, 0], [0, 0]
    put_off: list[Pass] = []

    def forward(which: int) -> None:
        order.append(Pass("F", stages[which], next_forward[which]))
        next_forward[which] += 1

    def backward(which: int, split: bool = False) -> None:
        microbatch = next_backward[which]
        order.append(Pass("B" if split else "BW", stages[which], microbatch))
        if split:
            put_off.append(Pass("W", stages[which], microbatch))
        next_backward[which] += 1

    def weight() -> None:
        order.append(put_off.pop(0))

    for _ in range(2 * behind):
        forward(0)
    for _ in range(device + 1):
        forward(0)
        forward(1)
    for _ in range(behind):
        backward(1, split=True)
        weight()
        forward(1)
    for _ in range(microbatches - 2 * devices + device + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(behind):
        backward(1)
        forward(1)
        backward(0)
    # The second half of the last pairs puts its weight gradients off; odd devices begin one backward earlier.
    half = (device + 1) // 2
    for pair in range(device + 1):
        backward(1, split=pair > half or (pair == half and device % 2 == 1))
        backward(0, split=pair >= half)
    for _ in range(behind):
        weight()
        backward(0, split=True)
    while put_off:
        weight()
    return tuple(order)
