"""Every named schedule, what it demands, and the one way to build it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import UserError
from autotune.schedules import alternating, v_shaped, zero_bubble
from autotune.schedules.checks import check
from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import PlacementKind
from autotune.schedules.schedule import Schedule

__all__ = ["SCHEDULES", "PlacementKind", "ScheduleKind", "build", "find"]


@dataclass(frozen=True)
class ScheduleKind:
    """A named schedule.

    Attributes:
        placement: `linear` (one stage a device), `loop` (stage s on device s mod p) or `v` (two stages a device,
            first and last stage on device 0).
        split_backward: whether B and W are passes of their own.
        generate: (devices, microbatches, stages_per_device) -> Schedule, for arguments that meet the demands.
        search: (devices, microbatches, memory_limit, costs) -> Schedule, for a schedule that adapts to costs and to a
            limit in the unit of their activations; None for one that doesn't.
        peak_activation, bubble: formulas in words, for the table of schedules (p devices, m microbatches, v stages).
        source: where the schedule comes from.
        min_stages_per_device, max_stages_per_device: legal v (max None: no upper end).
        microbatch_multiple: whether m must be a multiple of p.
        min_microbatches_per_device: m must be at least this many times p.
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
    min_microbatches_per_device: int = 0
    search: Callable[[int, int, float | None, PassCosts | None], Schedule] | None = None

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
        least = self.min_microbatches_per_device * devices
        if microbatches < least:
            return f"{self.name} needs at least {least} microbatches on {devices} devices, not {microbatches}"
        return None

    def default_stages_per_device(self) -> int:
        """The smallest legal number of stages per device."""
        return self.min_stages_per_device


ZB_PAPER = "arXiv 2401.10241"
CM_PAPER = "arXiv 2405.15362"

Search = Callable[[int, int, float | None, PassCosts | None], Schedule]


def _without_costs(search: Search) -> Callable[[int, int, int], Schedule]:
    return lambda devices, microbatches, stages_per_device: search(devices, microbatches, None, None)


_KINDS = (
    ScheduleKind(
        name="gpipe",
        placement="linear",
        split_backward=False,
        generate=alternating.gpipe,
        peak_activation="m",
        bubble="(p-1)(F+B+W)",
        source="arXiv 1811.06965",
    ),
    ScheduleKind(
        name="1f1b",
        placement="linear",
        split_backward=False,
        generate=alternating.one_f_one_b,
        peak_activation="p",
        bubble="(p-1)(F+B+W)",
        source="arXiv 2006.09503",
    ),
    ScheduleKind(
        name="interleaved-1f1b",
        placement="loop",
        split_backward=False,
        generate=alternating.interleaved_1f1b,
        peak_activation="p + (p-1)/v",
        bubble="(p-1)(F+B+W)/v",
        source="arXiv 2104.04473",
        min_stages_per_device=2,
        max_stages_per_device=None,
        microbatch_multiple=True,
    ),
    ScheduleKind(
        name="zb-h1",
        placement="linear",
        split_backward=True,
        generate=alternating.zb_h1,
        peak_activation="p",
        bubble="(p-1)(F+B-W)",
        source=f"{ZB_PAPER}, section 2.3",
    ),
    ScheduleKind(
        name="zb-h2",
        placement="linear",
        split_backward=True,
        generate=alternating.zb_h2,
        peak_activation="2p-1",
        bubble="(p-1)(F+B-2W)",
        source=f"{ZB_PAPER}, section 2.3",
    ),
    *(
        ScheduleKind(
            name=name,
            placement="linear",
            split_backward=True,
            generate=_without_costs(search),
            search=search,
            peak_activation=peak,
            bubble=bubble,
            source=f"{ZB_PAPER}, section 3.1",
        )
        for name, search, peak, bubble in (
            ("zb-1p", zero_bubble.zb_1p, "p", "at most (p-1)(F+B-W)"),
            ("zb-2p", zero_bubble.zb_2p, "2p", "about 0 in the span"),
            ("zb", zero_bubble.zb, "any limit; 2p by default", "what the limit allows"),
        )
    ),
    ScheduleKind(
        name="zb-v",
        placement="v",
        split_backward=True,
        generate=v_shaped.zb_v,
        peak_activation="p",
        bubble="0 if F=B=W",
        source=f"{ZB_PAPER}, section 6",
        min_stages_per_device=2,
        max_stages_per_device=2,
    ),
    ScheduleKind(
        name="v-half",
        placement="v",
        split_backward=True,
        generate=v_shaped.v_half,
        peak_activation="floor((p+2)/2)",
        bubble="about (p-1)(F+B+W)/2",
        source=f"{CM_PAPER}, tables 8 and 9",
        min_stages_per_device=2,
        max_stages_per_device=2,
    ),
    ScheduleKind(
        name="v-min",
        placement="v",
        split_backward=True,
        generate=v_shaped.v_min,
        peak_activation="floor((p+4)/3)",
        bubble="about 2(p-1)(F+B+W)/3, and m (6 max(F,B,W) - 2(F+B+W))/2",
        source=f"{CM_PAPER}, tables 8 and 9",
        min_stages_per_device=2,
        max_stages_per_device=2,
    ),
    ScheduleKind(
        name="v-zb",
        placement="v",
        split_backward=True,
        generate=v_shaped.v_zb,
        peak_activation="p",
        bubble="0 if F=B=W",
        source=f"{CM_PAPER}, section 3",
        min_stages_per_device=2,
        max_stages_per_device=2,
    ),
    ScheduleKind(
        name="1f1b-v",
        placement="v",
        split_backward=False,
        generate=v_shaped.one_f_one_b_v,
        peak_activation="about 2p/3",
        bubble="about (p-1)(F+B+W)",
        source=CM_PAPER,
        min_stages_per_device=2,
        max_stages_per_device=2,
    ),
    ScheduleKind(
        name="interleaved-zb",
        placement="loop",
        split_backward=True,
        generate=alternating.interleaved_zb,
        peak_activation="p",
        bubble="(p-1)(F+B-W)/v",
        source="ZB-H1 on interleaved stages, as in torch",
        min_stages_per_device=2,
        max_stages_per_device=None,
    ),
    ScheduleKind(
        name="dualpipe-v",
        placement="v",
        split_backward=True,
        generate=v_shaped.dualpipe_v,
        peak_activation="p + 1/2",
        bubble="(p-1)(F+B+W)/6 if F=B=W",
        source="DeepSeek-AI, DualPipe",
        min_stages_per_device=2,
        max_stages_per_device=2,
        min_microbatches_per_device=2,
    ),
    ScheduleKind(
        name="gis",
        placement="loop",
        split_backward=True,
        generate=alternating.gis,
        peak_activation="p",
        bubble="(p-1)(F+B)/v",
        source="arXiv 2503.01328",
        min_stages_per_device=2,
        max_stages_per_device=None,
    ),
    ScheduleKind(
        name="gis-h",
        placement="loop",
        split_backward=True,
        generate=alternating.gis_h,
        peak_activation="p/v + (1-1/v) ceil(p/2)",
        bubble="about 0.43 (v=2) or 0.31 (v=4) of 1F1B's if F=B=W",
        source="arXiv 2503.01328",
        min_stages_per_device=2,
        max_stages_per_device=None,
    ),
)

SCHEDULES: dict[str, ScheduleKind] = {kind.name: kind for kind in _KINDS}
"""Every named schedule by its name."""


def find(name: str) -> ScheduleKind:
    """The schedule of that name.

    Raises:
        UserError: there is none; names the nearest one.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), SCHEDULES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UserError(f"no schedule {name!r}{hint} Known: {', '.join(SCHEDULES)}")


def build(
    name: str,
    devices: int,
    microbatches: int,
    stages_per_device: int | None = None,
    *,
    memory_limit: float | None = None,
    costs: PassCosts | None = None,
) -> Schedule:
    """The named schedule, checked.

    Args:
        stages_per_device: None: the smallest number its definition allows.
        memory_limit: the most activation a device may hold, in the unit of the costs; only for kinds with a search.
        costs: what a kind with a search adapts to; the others are the same for all costs and ignore them.

    Raises:
        UserError: unknown name, or the numbers don't meet the schedule's demands.
    """
    kind = find(name)
    stages = kind.default_stages_per_device() if stages_per_device is None else stages_per_device
    if devices < 1:
        raise UserError(f"{name} needs at least 1 device, not {devices}")
    for problem in (kind.stages_problem(stages), kind.microbatches_problem(devices, microbatches)):
        if problem:
            raise UserError(problem)
    if kind.search is not None:
        schedule = kind.search(devices, microbatches, memory_limit, costs)
    elif memory_limit is not None:
        adaptive = ", ".join(known for known, other in SCHEDULES.items() if other.search)
        raise UserError(f"{name} has its own memory and takes no limit; schedules that do: {adaptive}")
    else:
        schedule = kind.generate(devices, microbatches, stages)
    check(schedule)
    return schedule
