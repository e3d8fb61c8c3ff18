"""The table of named schedules, for the command line and the documentation."""

from __future__ import annotations

from autotune.schedules.registry import SCHEDULES, ScheduleKind

__all__ = ["catalogue", "catalogue_markdown", "catalogue_text"]

HEADER = ("name", "placement", "stages per device", "microbatches", "peak activation", "bubble", "source")


def catalogue() -> list[dict[str, object]]:
    """Every named schedule as plain JSON values."""
    return [
        {
            "name": kind.name,
            "placement": kind.placement,
            "min_stages_per_device": kind.min_stages_per_device,
            "max_stages_per_device": kind.max_stages_per_device,
            "microbatches": microbatches_text(kind),
            "split_backward": kind.split_backward,
            "adapts_to_costs": kind.search is not None,
            "peak_activation": kind.peak_activation,
            "bubble": kind.bubble,
            "source": kind.source,
        }
        for kind in SCHEDULES.values()
    ]


def stages_text(kind: ScheduleKind) -> str:
    """The legal stages per device in words."""
    low, high = kind.min_stages_per_device, kind.max_stages_per_device
    return f"{low} or more" if high is None else str(low) if low == high else f"{low} to {high}"


def microbatches_text(kind: ScheduleKind) -> str:
    """The legal microbatches in words, p devices."""
    demands = ["multiple of p"] if kind.microbatch_multiple else []
    if kind.min_microbatches_per_device:
        demands.append(f"at least {kind.min_microbatches_per_device}p")
    return ", ".join(demands) or "any"


def _rows() -> list[tuple[str, ...]]:
    return [
        (
            kind.name,
            kind.placement,
            stages_text(kind),
            microbatches_text(kind),
            kind.peak_activation,
            kind.bubble,
            kind.source,
        )
        for kind in SCHEDULES.values()
    ]


def catalogue_text() -> str:
    """The table with aligned columns."""
    rows = [HEADER, *_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def catalogue_markdown() -> str:
    """The table as docs/schedules.md shows it."""
    rows = [HEADER, ("---",) * len(HEADER), *_rows()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
