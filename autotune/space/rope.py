"""Frequencies of rotary position embeddings, and the scalings that stretch them to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["RopeScaling", "rope_frequencies"]


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a longer context follow from those of the original one.

    `linear` divides every frequency by `factor` (position interpolation, arXiv 2306.15595). `llama3` divides only those
    whose wavelength is beyond the original context's share and blends in between, as Llama 3.1's configs state.

    Attributes:
        factor: how many times longer the context becomes.
        low_freq_factor, high_freq_factor: `llama3` divides wavelengths above original_positions / low_freq_factor, and
            keeps those below original_positions / high_freq_factor.
        original_positions: tokens of the context before scaling.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


def rope_frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> list[float]:
    """Angle per position, in radians, of each of the width / 2 pairs that rope turns: theta^(-2 i / width), scaled."""
    frequencies = [theta ** (-2 * pair / width) for pair in range(width // 2)]
    return frequencies if scaling is None else [_scaled(frequency, scaling) for frequency in frequencies]


def _scaled(frequency: float, scaling: RopeScaling) -> float:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = scaling.original_positions * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (kept + (1 - kept) / scaling.factor)
