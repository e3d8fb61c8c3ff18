"""Schedules in closed form: a warm-up of forwards, then one forward and one backward in turn.

They differ in the order of the forwards, how many come first, and how long a weight gradient is put off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autotune.schedules.placement import linear_placement, loop_placement
from autotune.schedules.schedule import Pass, Schedule

__all__ = [
    "alternate",
    "gis",
    "gis_h",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
]

Job = tuple[int, int]  # stage, microbatch


def alternate(
    forwards: Sequence[Job], backwards: Sequence[Job], warm_up: int, weight_lag: int | None = None
) -> tuple[Pass, ...]:
    """One device's order: `warm_up` forwards, then F and B in turn, then the backwards that are left.

    Args:
        forwards, backwards: (stage, microbatch) of every F and of every B, in order.
        warm_up: forwards before the first pair; all of them when there are fewer.
        weight_lag: None: the backward is fused (BW). Else every B after the first `weight_lag` ones is followed by the
            oldest W that waits; the W left come last.
    """
    order = [Pass("F", *job) for job in forwards[:warm_up]]
    ahead = len(order)
    for done, job in enumerate(backwards):
        if ahead < len(forwards):
            order.append(Pass("F", *forwards[ahead]))
            ahead += 1
        order.append(Pass("BW" if weight_lag is None else "B", *job))
        if weight_lag is not None and done >= weight_lag:
            order.append(Pass("W", *backwards[done - weight_lag]))
    if weight_lag is not None:
        order += [Pass("W", *job) for job in backwards[max(0, len(backwards) - weight_lag) :]]
    return tuple(order)


def _linear(name: str, devices: int, microbatches: int, warm_up: int, split: int | None) -> Schedule:
    """Warm-up of `warm_up` forwards per device behind, W put off by `split` per device before; None: fused."""
    order = []
    for device in range(devices):
        jobs = [(device, microbatch) for microbatch in range(microbatches)]
        lag = None if split is None else split * device
        order.append(alternate(jobs, jobs, warm_up * (devices - 1 - device), lag))
    return Schedule(name, microbatches, linear_placement(devices), tuple(order))


def gpipe(devices: int, microbatches: int, stages_per_device: int = 1) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    order = []
    for device in range(devices):
        jobs = [(device, microbatch) for microbatch in range(microbatches)]
        order.append(alternate(jobs, jobs, microbatches))
    return Schedule("gpipe", microbatches, linear_placement(devices), tuple(order))


def one_f_one_b(devices: int, microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Device i runs p - 1 - i forwards, then F and BW in turn (PipeDream-Flush, arXiv 2006.09503)."""
    return _linear("1f1b", devices, microbatches, 1, None)


def zb_h1(devices: int, microbatches: int, stages_per_device: int = 1) -> Schedule:
    """1F1B whose W are put off by i passes on device i (arXiv 2401.10241, section 2.3)."""
    return _linear("zb-h1", devices, microbatches, 1, 1)


def zb_h2(devices: int, microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Twice the warm-up of 1F1B, W put off by 2 i passes on device i (arXiv 2401.10241, section 2.3)."""
    return _linear("zb-h2", devices, microbatches, 2, 2)


def _grouped(
    name: str,
    devices: int,
    microbatches: int,
    stages_per_device: int,
    *,
    sizes: Sequence[int],
    hop: int,
    lag: int | None,
) -> Schedule:
    """Interleaved stages: groups of microbatches go through the stages of a device one after the other.

    Args:
        sizes: microbatches of each group, the first one the largest; what they hold beyond `microbatches` is left out
            of the order.
        hop: forwards of the warm-up that each device behind adds.
        lag: W are put off by this many passes per device before; None: fused.
    """
    placement = loop_placement(devices, stages_per_device)
    ends = list(accumulate(sizes))
    groups = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    order = []
    for device in range(devices):
        stages = [chunk * devices + device for chunk in range(stages_per_device)]
        forwards = [(stage, i) for members in groups for stage in stages for i in members]
        backwards = [(stage, i) for members in groups for stage in reversed(stages) for i in members]
        warm_up = (stages_per_device - 1) * sizes[0] + hop * (devices - 1 - device)
        passes = alternate(forwards, backwards, warm_up, None if lag is None else lag * device)
        order.append(tuple(item for item in passes if item.microbatch < microbatches))
    return Schedule(name, microbatches, placement, tuple(order))


def _group_sizes(microbatches: int, group: int) -> list[int]:
    """Sizes of groups of at most `group`: whole ones and a smaller last one, or even ones if that is under half.

    Stages wait for a small group to come round, so a very small one costs more than groups that are all a bit smaller.

    >>> _group_sizes(20, 8), _group_sizes(17, 8)
    ([8, 8, 4], [6, 6, 5])
    """
    whole, rest = divmod(microbatches, group)
    if 2 * rest >= group or rest == 0:
        return [group] * whole + [rest] * (rest > 0)
    share, larger = divmod(microbatches, whole + 1)
    return [share + 1] * larger + [share] * (whole + 1 - larger)


def interleaved_1f1b(devices: int, microbatches: int, stages_per_device: int) -> Schedule:
    """Groups of p; device i runs (v - 1) p + 2 (p - 1 - i) forwards first (Megatron-LM, arXiv 2104.04473)."""
    sizes = [devices] * (microbatches // devices)
    return _grouped("interleaved-1f1b", devices, microbatches, stages_per_device, sizes=sizes, hop=2, lag=None)


def interleaved_zb(devices: int, microbatches: int, stages_per_device: int) -> Schedule:
    """ZB-H1 on interleaved stages: (v - 1) p + p - 1 - i forwards first, W put off by i passes on device i."""
    sizes = _group_sizes(microbatches, devices)
    return _grouped("interleaved-zb", devices, microbatches, stages_per_device, sizes=sizes, hop=1, lag=1)


def gis(devices: int, microbatches: int, stages_per_device: int) -> Schedule:
    """Grouped interleaved: one F less per hop than interleaved 1F1B, W after B (PipeOffload, arXiv 2503.01328)."""
    sizes = _group_sizes(microbatches, devices)
    return _grouped("gis", devices, microbatches, stages_per_device, sizes=sizes, hop=1, lag=0)


def gis_h(devices: int, microbatches: int, stages_per_device: int) -> Schedule:
    """Grouped interleaved with groups of p / 2: half the memory for many stages (PipeOffload, arXiv 2503.01328).

    Groups this small only keep their order free of deadlock when whole, so a last one is planned whole.
    """
    half = (devices + 1) // 2
    sizes = [half] * -(-microbatches // half)
    return _grouped("gis-h", devices, microbatches, stages_per_device, sizes=sizes, hop=1, lag=0)
