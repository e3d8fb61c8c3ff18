"""A schedule as an SVG picture: a row a device, passes as boxes with their microbatch, a time axis, memory below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from autotune.report.schedule_palette import IDLE, KIND_NAMES, chunk_of, hex_colour, ink_on, shade
from autotune.schedules.schedule import Pass, Schedule
from autotune.schedules.simulate import Timeline

__all__ = ["Box", "Panel", "figure", "schedule_svg", "timeline_panel"]

FONT = "Inter, Helvetica, Arial, sans-serif"
ROW, GAP, CURVE = 24, 6, 26
LEFT, RIGHT, TOP, AXIS = 46, 16, 30, 34
HEADER, LEGEND = 58, 30
MAX_WIDTH, MIN_WIDTH = 3000.0, 560.0
BOX_MARGIN, DIGIT = 8.0, 6.0
TEXT_COLOUR, FAINT, GRID = "#141821", "#5b6472", "#d5d9e0"
CURVE_FILL, CURVE_LINE = "#b9a5d6", "#6d4aa3"


@dataclass(frozen=True)
class Box:
    """One pass in a panel: times in the panel's unit."""

    start: float
    end: float
    item: Pass


@dataclass(frozen=True)
class Panel:
    """One drawing of devices over time.

    Attributes:
        rows: for every device its boxes.
        chunks: for every stage its number among the stages of its device, and of how many.
        curves: for every device steps (time, held) of what it holds, or None to draw no memory.
        limit: the memory that the top of a curve stands for.
    """

    title: str
    rows: tuple[tuple[Box, ...], ...]
    chunks: tuple[tuple[int, int], ...]
    length: float
    curves: tuple[tuple[tuple[float, float], ...], ...] | None = None
    limit: float = 1.0
    marks: tuple[float, ...] = ()

    @property
    def row_height(self) -> int:
        return ROW + GAP + (CURVE if self.curves else 0)

    @property
    def height(self) -> int:
        return TOP + self.row_height * len(self.rows) + AXIS

    def natural_width(self) -> float:
        """Width at which the shortest pass has room for its number, within sane bounds."""
        shortest = min((box.end - box.start for row in self.rows for box in row if box.end > box.start), default=1.0)
        digits = len(str(max((box.item.microbatch for row in self.rows for box in row), default=0)))
        return min(max(self.length / shortest * (BOX_MARGIN + DIGIT * digits), MIN_WIDTH), MAX_WIDTH)


def schedule_svg(timeline: Timeline, *, memory: bool = False) -> str:
    """The picture of one schedule, with the memory curve under each device if `memory`."""
    return figure(headline(timeline), [[timeline_panel(timeline, "", memory=memory)]], timeline.schedule)


def headline(timeline: Timeline) -> tuple[str, str]:
    """Title and subtitle of a schedule's picture."""
    schedule = timeline.schedule
    stages = schedule.stages_per_device
    parts = f"{schedule.devices} devices, {schedule.microbatches} microbatches"
    parts += f", {stages} stages per device" if stages > 1 else ""
    figures = (
        f"makespan {timeline.makespan:.4g} \u00b7 bubble {timeline.bubble_rate:.1%} \u00b7 "
        f"peak activation {max(timeline.peak_activation):.4g}"
    )
    return f"{schedule.name}: {parts}", figures


def timeline_panel(timeline: Timeline, title: str, *, memory: bool) -> Panel:
    """The panel of a whole timeline."""
    schedule = timeline.schedule
    rows = tuple(
        tuple(Box(start, end, item) for item, start, end in zip(passes, starts, ends, strict=True))
        for passes, starts, ends in zip(schedule.order, timeline.start, timeline.end, strict=True)
    )
    curves = tuple(tuple(timeline.memory_curve(device)) for device in range(schedule.devices)) if memory else None
    return Panel(title, rows, stage_chunks(schedule), timeline.makespan, curves, max(timeline.peak_activation))


def stage_chunks(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """For every stage its number among its device's stages, and of how many."""
    return tuple(
        (chunk, schedule.placement.count(device))
        for chunk, device in zip(chunk_of(schedule), schedule.placement, strict=True)
    )


def figure(heading: tuple[str, str], grid: Sequence[Sequence[Panel]], schedule: Schedule) -> str:
    """Panels in rows under a title and a legend, as one SVG document."""
    widths = [[LEFT + panel.natural_width() + RIGHT for panel in row] for row in grid]
    width = max(sum(row) for row in widths)
    height = HEADER + LEGEND + sum(max(panel.height for panel in row) for row in grid)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="{FONT}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(LEFT, 26, heading[0], size=17, weight=600),
        _text(LEFT, 46, heading[1], size=12, fill=FAINT),
        _legend(LEFT, HEADER + 4, schedule, memory=any(panel.curves for row in grid for panel in row)),
    ]
    y = HEADER + LEGEND
    for row, row_widths in zip(grid, widths, strict=True):
        x = 0.0
        for panel, panel_width in zip(row, row_widths, strict=True):
            parts.append(_panel(panel, x + LEFT, y, panel_width - LEFT - RIGHT))
            x += panel_width
        y += max(panel.height for panel in row)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 11,
    fill: str = TEXT_COLOUR,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _legend(x: float, y: float, schedule: Schedule, *, memory: bool) -> str:
    kinds = [kind for kind in KIND_NAMES if any(item.kind == kind for row in schedule.order for item in row)]
    chunks = max(count for _, count in stage_chunks(schedule))
    parts = []
    for kind in kinds:
        for chunk in range(chunks):
            colour = shade(kind, chunk, chunks)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="14" height="12" rx="2" fill="{hex_colour(colour)}"/>')
            x += 16
        label = f"{kind} ({KIND_NAMES[kind]})"
        parts.append(_text(x + 3, y + 10, label, fill=FAINT))
        x += 20 + 6.1 * len(label)
    if chunks > 1:
        label = f"dark to light: first to last of the {chunks} stages of a device"
        parts.append(_text(x, y + 10, label, fill=FAINT))
        x += 20 + 6.1 * len(label)
    if memory:
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="14" height="12" rx="2" fill="{CURVE_FILL}"/>')
        parts.append(_text(x + 19, y + 10, "activation held", fill=FAINT))
    return "\n".join(parts)


def _panel(panel: Panel, x: float, y: float, width: float) -> str:
    scale = width / panel.length if panel.length else 0.0
    bottom = y + TOP + panel.row_height * len(panel.rows)
    parts = [_text(x, y + 16, panel.title, size=13, weight=600)] if panel.title else []
    ticks = _ticks(panel.length, max(2, int(width / 70)))
    parts += [
        f'<line x1="{x + tick * scale:.1f}" x2="{x + tick * scale:.1f}" y1="{y + TOP - 4}" y2="{bottom}" '
        f'stroke="{GRID}" stroke-width="1"/>'
        for tick in ticks
    ]
    for device, boxes in enumerate(panel.rows):
        top = y + TOP + device * panel.row_height
        parts.append(_text(x - 8, top + ROW / 2 + 4, f"{device}", anchor="end", fill=FAINT))
        parts.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{hex_colour(IDLE)}"/>')
        parts += [_box(box, panel.chunks[box.item.stage], x, top, scale) for box in boxes]
        if panel.curves:
            parts.append(_curve(panel.curves[device], panel.limit, x, top + ROW + 1, scale, panel.length))
    parts += [
        f'<line x1="{x + mark * scale:.1f}" x2="{x + mark * scale:.1f}" y1="{y + TOP - 6}" y2="{bottom}" '
        f'stroke="{TEXT_COLOUR}" stroke-width="1.2" stroke-dasharray="4 3"/>'
        for mark in panel.marks
    ]
    parts += [_text(x + t * scale, bottom + 12, f"{t:g}", size=10, fill=FAINT, anchor="middle") for t in ticks]
    parts.append(_text(x - 8, y + TOP - 8, "device", size=10, fill=FAINT, anchor="end"))
    parts.append(_text(x + width, bottom + 26, "time", size=10, fill=FAINT, anchor="end"))
    return "\n".join(parts)


def _box(box: Box, chunk: tuple[int, int], x: float, top: float, scale: float) -> str:
    colour = shade(box.item.kind, *chunk)
    left, width = x + box.start * scale, (box.end - box.start) * scale
    tip = f"{box.item.kind} of stage {box.item.stage}, microbatch {box.item.microbatch}: {box.start:g} to {box.end:g}"
    drawn = (
        f'<rect x="{left:.2f}" y="{top}" width="{max(width - 0.8, 0.3):.2f}" height="{ROW}" rx="1.5" '
        f'fill="{hex_colour(colour)}"><title>{escape(tip)}</title></rect>'
    )
    label = str(box.item.microbatch)
    size = min(11.0, (width - 3) / (0.62 * len(label)))
    if size < 6:
        return drawn
    ink = hex_colour(ink_on(colour))
    return drawn + _text(
        left + (width - 0.8) / 2, top + ROW / 2 + size * 0.36, label, size=round(size, 1), fill=ink, anchor="middle"
    )


def _curve(
    steps: Sequence[tuple[float, float]], limit: float, x: float, top: float, scale: float, length: float
) -> str:
    """Steps of what a device holds as a filled line, its own peak written at the right end."""
    height = CURVE - 4
    base = top + height

    def level(held: float) -> float:
        return base - (held / limit * height if limit else 0.0)

    points = [(x, base)]
    held = 0.0
    for time, after in steps:
        points += [(x + time * scale, level(held)), (x + time * scale, level(after))]
        held = after
    points += [(x + length * scale, level(held)), (x + length * scale, base)]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    peak = max(value for _, value in steps)
    return (
        f'<polygon points="{line}" fill="{CURVE_FILL}" fill-opacity="0.55" stroke="{CURVE_LINE}" stroke-width="0.8"/>'
        + _text(x - 8, base - 2, f"{peak:.3g}", size=9, fill=CURVE_LINE, anchor="end")
    )


def _ticks(length: float, most: int) -> list[float]:
    """Round numbers from 0 to `length`, at most `most` + 1 of them."""
    if length <= 0:
        return [0.0]
    step = 10.0**-9
    while True:
        for factor in (1, 2, 5):
            if length / (step * factor) <= most:
                count = int(length / (step * factor) + 1e-9)
                return [round(step * factor * k, 9) for k in range(count + 1)]
        step *= 10
