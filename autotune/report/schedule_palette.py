"""Colours of passes: one hue a kind of pass, one shade a stage of the device."""

from __future__ import annotations

from autotune.schedules.schedule import PassKind, Schedule

__all__ = ["IDLE", "KIND_NAMES", "Rgb", "chunk_of", "hex_colour", "ink_on", "shade"]

Rgb = tuple[int, int, int]

KIND_NAMES: dict[PassKind, str] = {
    "F": "forward",
    "B": "backward, input",
    "W": "backward, weights",
    "BW": "backward",
}
IDLE: Rgb = (238, 240, 243)

# Blue, green and orange stay apart for the common kinds of colour blindness.
_BASE: dict[PassKind, Rgb] = {
    "F": (66, 122, 199),
    "B": (46, 148, 110),
    "W": (228, 148, 48),
    "BW": (46, 148, 110),
}
_PAPER: Rgb = (255, 255, 255)
_INK: Rgb = (20, 24, 33)


def chunk_of(schedule: Schedule) -> list[int]:
    """For every stage which one of its device's stages it is, from 0."""
    seen = [0] * schedule.devices
    chunks = []
    for device in schedule.placement:
        chunks.append(seen[device])
        seen[device] += 1
    return chunks


def shade(kind: PassKind, chunk: int, chunks: int) -> Rgb:
    """Colour of a pass of stage number `chunk` of the `chunks` on a device, the first one darkest."""
    base = _BASE[kind]
    part = 0.0 if chunks == 1 else 0.55 * chunk / (chunks - 1)
    return _mix(base, _PAPER, part)


def ink_on(colour: Rgb) -> Rgb:
    """Black or white, whichever reads better on `colour`."""
    brightness = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return _INK if brightness > 140 else _PAPER


def hex_colour(colour: Rgb) -> str:
    """`#rrggbb`."""
    return "#" + "".join(f"{part:02x}" for part in colour)


def _mix(one: Rgb, other: Rgb, part: float) -> Rgb:
    mixed = [round(a + (b - a) * part) for a, b in zip(one, other, strict=True)]
    return mixed[0], mixed[1], mixed[2]
