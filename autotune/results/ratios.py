"""The ratio of two step times that were measured in rounds, with an interval that holds its level in few rounds.

Every round measures both plans one after the other, so what drifts with the machine is shared and falls out of the
ratio: the logarithms of the ratios of the rounds are the sample. Their mean has a Student t interval, which is exact
for normal noise however few the rounds are. The percentile bootstrap is not used: of three rounds it resamples ten
different sets, and its 95 % interval covers the truth in less than 80 % of cases (`tests/results/test_ratios.py` shows
both).

Whoever looks after every round and stops when the answer is clear stops too often by chance. Each look therefore has an
error of 0.05 / looks^0.7: simulated with 1 to 14 looks and any noise from far below to far above the width at which
looking ends, the interval at the end then covers the truth in 95 % of cases, where the plain one falls to 82 %. Noise
may have outliers as long as the launches of both plans scatter alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["CONFIDENCE", "RatioInterval", "paired_ratio", "t_quantile"]

CONFIDENCE = 0.95
"""Share of finals whose interval covers the true ratio, looks after every round included."""

_LOOK_EXPONENT = 0.7


@dataclass(frozen=True)
class RatioInterval:
    """A ratio of step times, above 1 where the first plan is the faster one, and its interval.

    Attributes:
        rounds: in which both plans were measured.
    """

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def faster(self) -> bool:
        """Whether the first plan is faster, beyond the noise."""
        return self.low > 1.0

    @property
    def slower(self) -> bool:
        """Whether the first plan is slower, beyond the noise."""
        return self.high < 1.0

    def is_clear(self, width: float) -> bool:
        """Whether another round is not worth its time: one is faster, or the interval is narrower than `width`."""
        return self.faster or self.slower or self.high - self.low < width

    def to_dict(self) -> dict[str, float]:
        """Plain JSON values."""
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "rounds": self.rounds}


def paired_ratio(own_s: Sequence[float], other_s: Sequence[float], looks: int = 1) -> RatioInterval | None:
    """Step times of another plan over one's own, above 1 where the own is faster; None for fewer than two rounds.

    Args:
        own_s, other_s: step time of each plan in each round, in the same order of rounds, all above 0.
        looks: how often at most such an interval is asked for while rounds are added, this time included.
    """
    assert len(own_s) == len(other_s)
    count = len(own_s)
    if count < 2:
        return None
    logs = [math.log(other / own) for own, other in zip(own_s, other_s, strict=True)]
    mean = math.fsum(logs) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / (count - 1))
    error = (1.0 - CONFIDENCE) / looks**_LOOK_EXPONENT
    half = t_quantile(1.0 - error / 2.0, count - 1) * deviation / math.sqrt(count)
    # Noise of a whole power of e leaves no bound worth a name, and must not overflow.
    half = min(half, 50.0)
    return RatioInterval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)


@lru_cache(maxsize=1024)
def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution with a whole number of degrees of freedom, by bisection.

    Args:
        probability: from 0.5 up, below 1.
    """
    assert 0.5 <= probability < 1.0
    assert degrees >= 1
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if _t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _t_cdf(value: float, degrees: int) -> float:
    """Distribution function of Student's t (Abramowitz and Stegun, 26.7.3 and 26.7.4: finite sums of the angle)."""
    angle = math.atan2(value, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2 == 0:
        term = total = sine
        for k in range(1, degrees - 2, 2):
            term *= k / (k + 1) * cosine * cosine
            total += term
        return 0.5 + total / 2.0
    total, term = angle, sine * cosine
    for k in range(1, degrees - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine * cosine
    return 0.5 + total / math.pi
