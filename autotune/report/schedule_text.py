"""A schedule as a drawing in the terminal: a line a device, in colour where the terminal has it."""

from __future__ import annotations

from autotune.report.schedule_palette import KIND_NAMES, Rgb, chunk_of, ink_on, shade
from autotune.schedules.schedule import Pass
from autotune.schedules.simulate import Timeline

__all__ = ["schedule_text"]

WIDEST_CELL = 4
IDLE_MARK = "."
RESET = "\x1b[0m"


def schedule_text(timeline: Timeline, *, width: int = 120, colour: bool = False) -> str:
    """The drawing, folded into bands no wider than `width` columns.

    Without colour a pass is its letter and microbatch: capital for the device's first stage, small for the others; `b`
    and `B` stand for B and BW alike. In colour kinds are told apart by hue and stages by shade, and cells show the
    microbatch.
    """
    margin = len(str(timeline.schedule.devices - 1)) + 2
    columns = max(width - margin, 20)
    per_unit = _columns_per_unit(timeline, columns)
    lines = [_row(timeline, device, per_unit, colour) for device in range(timeline.schedule.devices)]
    total = max(len(line) for line in lines)
    columns = -(-total // -(-total // columns))  # as many bands as needed, all as wide
    bands = []
    for begin in range(0, total, columns):
        ruler = _ruler(begin, min(columns, total - begin), per_unit)
        band = [" " * margin + ruler]
        for device, line in enumerate(lines):
            cells = line[begin : begin + columns]
            band.append(f"{device:>{margin - 2}}  " + (_painted(cells) if colour else "".join(c for c, _ in cells)))
        bands.append("\n".join(part.rstrip() if not colour else part for part in band))
    legend = [_legend(timeline)] if colour else []
    return "\n\n".join([*bands, *legend, _summary(timeline)]) + "\n"


def _legend(timeline: Timeline) -> str:
    """A painted sample of every kind of pass, one per stage of a device."""
    schedule = timeline.schedule
    count = schedule.stages_per_device
    used = {item.kind for passes in schedule.order for item in passes}
    samples = []
    for kind, words in KIND_NAMES.items():
        if kind in used:
            cells: list[Cell] = [("  "[half], shade(kind, chunk, count)) for chunk in range(count) for half in (0, 1)]
            samples.append(f"{_painted(cells)} {kind} {words}")
    shades = ["dark to light: first to last stage of a device"] if count > 1 else []
    return "   ".join([*samples, *shades])


def _summary(timeline: Timeline) -> str:
    schedule = timeline.schedule
    peaks = " ".join(f"{peak:.4g}" for peak in timeline.peak_activation)
    return (
        f"{schedule.name}: {schedule.devices} devices, {schedule.microbatches} microbatches, "
        f"{schedule.stages_per_device} stages per device\n"
        f"makespan {timeline.makespan:.6g}, bubble rate {timeline.bubble_rate:.4f} "
        f"(of the longest device span {timeline.span_bubble_rate:.4f})\n"
        f"peak activation per device, in microbatches of its share: {peaks}"
    )


def _columns_per_unit(timeline: Timeline, columns: int) -> float:
    """Columns of one unit of time: the shortest pass gets 4 if the whole then fits into one band, else 3."""
    shortest = min(
        (
            end - start
            for s, e in zip(timeline.start, timeline.end, strict=True)
            for start, end in zip(s, e, strict=True)
            if end > start
        ),
        default=1.0,
    )
    fitting = columns / timeline.makespan * shortest if timeline.makespan else 1.0
    return min(max(int(fitting), 3), WIDEST_CELL) / shortest


Cell = tuple[str, Rgb | None]


def _row(timeline: Timeline, device: int, per_unit: float, colour: bool) -> list[Cell]:
    schedule = timeline.schedule
    chunks, count = chunk_of(schedule), len(schedule.device_stages(device))
    length = round(timeline.makespan * per_unit)
    cells: list[Cell] = [(" " if colour else IDLE_MARK, None)] * length
    for item, start, end in zip(schedule.order[device], timeline.start[device], timeline.end[device], strict=True):
        left, right = round(start * per_unit), round(end * per_unit)
        label = str(item.microbatch) if colour else _letter(item, chunks[item.stage]) + str(item.microbatch)
        paint = shade(item.kind, chunks[item.stage], count)
        room = right - left
        # A rule up to a gap at the end, so that the length of a pass shows without colour.
        text = label[:room].center(room) if colour else (label[:room].ljust(room - 1, "-") + " ")[:room]
        for column, character in zip(range(left, right), text, strict=True):
            cells[column] = (character, paint)
    return cells


def _letter(item: Pass, chunk: int) -> str:
    letter = "B" if item.kind == "BW" else item.kind
    return letter if chunk == 0 else letter.lower()


def _painted(cells: list[Cell]) -> str:
    """The cells with 24-bit colour codes, one per run of equal colour."""
    parts: list[str] = []
    current: Rgb | None = None
    for character, paint in cells:
        if paint != current:
            parts.append(RESET)
            if paint is not None:
                ink = ink_on(paint)
                parts.append("\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m".format(*ink, *paint))
            current = paint
        parts.append(character)
    return "".join([*parts, RESET])


def _ruler(begin: int, columns: int, per_unit: float) -> str:
    """Times at every tenth column or so, written where they are."""
    marks = [" "] * columns
    step = 12
    for column in range(0, columns, step):
        text = f"|{(begin + column) / per_unit:.4g}"
        if column + len(text) <= columns:
            marks[column : column + len(text)] = text
    return "".join(marks)
