"""Sizes, times and bandwidths as people write them, read into plain numbers."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "format_count", "parse_bandwidth", "parse_duration", "parse_size", "parse_time"]

_NUMBER = re.compile(r"^\s*(?P<number>[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(?P<unit>[^\s0-9.]\S*)?\s*$")

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_BYTES = {f"{prefix}B": size for prefix, size in {**_DECIMAL, "K": 10**3, **_BINARY}.items()}
_BITS = {f"{prefix}bit": size / 8 for prefix, size in _DECIMAL.items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_PER_SECOND = {f"{unit}/s": size for unit, size in {**_BYTES, **_BITS}.items()} | {
    f"{prefix}bps": size / 8 for prefix, size in _DECIMAL.items()
}


def parse_size(value: object) -> int:
    """Bytes from `8GiB` (1024^3), `80GB` (10^9) or a plain number of bytes.

    Raises:
        ValueError: not a size; the message gives the legal spellings.
    """
    return round(_parse(value, _BYTES, "a size", "such as 8GiB (1024^3 bytes), 80GB (10^9 bytes) or a number of bytes"))


_LEGAL_TIMES = "such as 15us, 2ms, 1.5s or a number of seconds"


def parse_time(value: object) -> float:
    """Seconds from `15us`, `2ms`, `1.5s` or a plain number of seconds; 0 is a time.

    Raises:
        ValueError: not a time; the message gives the legal spellings.
    """
    return _parse(value, _SECONDS, "a time", _LEGAL_TIMES, zero=True)


def parse_duration(value: object) -> float:
    """As `parse_time`, but above 0: how long something may take."""
    return _parse(value, _SECONDS, "a time", _LEGAL_TIMES)


def parse_bandwidth(value: object) -> float:
    """Bytes per second from `300GB/s`, `25GiB/s`, `200Gbit/s`, `200Gbps` or a plain number of bytes per second.

    Raises:
        ValueError: not a bandwidth; the message gives the legal spellings.
    """
    legal = "such as 300GB/s, 25GiB/s, 200Gbit/s or a number of bytes per second"
    return _parse(value, _PER_SECOND, "a bandwidth", legal)


def _parse(value: object, units: dict[str, float] | dict[str, int], what: str, legal: str, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"is not {what}; write it {legal}")
    if isinstance(value, str):
        match = _NUMBER.match(value)
        unit = (match["unit"] or "") if match else ""
        if match is None or (unit and unit not in units):
            raise ValueError(f"is not {what}; write it {legal}")
        number = float(match["number"].replace("_", "")) * (units[unit] if unit else 1)
    else:
        number = float(value)
    if not (0 < number < float("inf") or (zero and number == 0)):
        raise ValueError(f"must be {what} {'of at least' if zero else 'above'} 0; write it {legal}")
    return number


def format_bytes(count: float) -> str:
    """`8.00 GiB`, `512.00 KiB`, `96 B`: binary units, because memory is sold and limited in them."""
    if count < 1023.5:
        return f"{count:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    for power, unit in enumerate(units, start=1):
        # 1024.00 of a unit, as rounding may make it, is 1.00 of the next.
        if count / 1024**power < 1023.995 or unit == units[-1]:
            break
    return f"{count / 1024**power:.2f} {unit}"


def format_count(count: int) -> str:
    """`124.4M`: a number of parameters in the units people compare models by."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 100 * size else f"{count / size:.1f}{unit}"
    return str(count)
