"""Numbers as people read them. Stored values keep all their digits; these are for terminals only."""

from __future__ import annotations

from autotune.space.units import format_bytes

__all__ = ["bytes_text", "count_text", "duration_text", "number_text", "seconds_text"]

_MISSING = "-"


def number_text(value: float | None, digits: int = 3) -> str:
    """A number with `digits` decimals, or a dash."""
    return _MISSING if value is None else f"{value:.{digits}f}"


def count_text(value: float | None) -> str:
    """A whole number with thousands separated, or a dash; small rates keep a digit."""
    if value is None:
        return _MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def bytes_text(value: int | None) -> str:
    """A size with its unit, or a dash."""
    return _MISSING if value is None else format_bytes(value)


def seconds_text(value: float | None) -> str:
    """A short time: ms below one second."""
    if value is None:
        return _MISSING
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.3f} s"


def duration_text(seconds: float | None) -> str:
    """A long time: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds is None:
        return _MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
