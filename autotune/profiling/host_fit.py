"""From timed communication to what a call and a byte of it cost. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.profiling.profile_records import HostFigures

__all__ = ["Sample", "fit_host"]

Sample = tuple[float, float, float]
"""Collectives or messages, the bytes they send, and the seconds they took beyond some that move nothing."""


def fit_host(samples: Sequence[Sample]) -> HostFigures:
    """The cost a call and a byte that fit the samples best by least squares, neither below 0."""
    cc = sum(c * c for c, _, _ in samples)
    cb = sum(c * b for c, b, _ in samples)
    bb = sum(b * b for _, b, _ in samples)
    cs = sum(c * s for c, _, s in samples)
    bs = sum(b * s for _, b, s in samples)
    determinant = cc * bb - cb * cb
    if determinant > 1e-9 * cc * bb:
        call_s, byte_s = (bb * cs - cb * bs) / determinant, (cc * bs - cb * cs) / determinant
        if call_s >= 0 and byte_s >= 0:
            return HostFigures(call_s, byte_s)
    calls_alone, bytes_alone = max(0.0, cs / cc), max(0.0, bs / bb)
    left = [
        sum((s - c * calls_alone) ** 2 for c, _, s in samples),
        sum((s - b * bytes_alone) ** 2 for _, b, s in samples),
    ]
    return HostFigures(calls_alone, 0.0) if left[0] <= left[1] else HostFigures(0.0, bytes_alone)
