"""The interval of a ratio holds its level in the few rounds a final has, also for who looks after every round."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from autotune.results.final import LEAST_ROUNDS, NARROW
from autotune.results.ratios import RatioInterval, paired_ratio, t_quantile


@pytest.mark.parametrize(
    ("degrees", "two_sided_95", "two_sided_99"),
    [
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (3, 3.182, 5.841),
        (4, 2.776, 4.604),
        (7, 2.365, 3.499),
        (30, 2.042, 2.750),
    ],
)
def test_t_quantiles_are_those_of_the_printed_tables(degrees: int, two_sided_95: float, two_sided_99: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(two_sided_95, abs=6e-4)
    assert t_quantile(0.995, degrees) == pytest.approx(two_sided_99, abs=6e-4)
    assert t_quantile(0.5, degrees) == pytest.approx(0.0, abs=1e-9)


def rounds(random_: random.Random, count: int, gain: float, noise: float) -> tuple[list[float], list[float]]:
    """Step times of two plans, the own `gain` times as fast, on a machine that drifts by a third over the rounds."""
    drift = [1.0 + 0.33 * number / count for number in range(count)]
    own = [shared * math.exp(random_.gauss(0.0, noise)) for shared in drift]
    other = [shared * gain * math.exp(random_.gauss(0.0, noise)) for shared in drift]
    return own, other


def coverage(interval: Callable[[random.Random], RatioInterval | None], truth: float, repeats: int = 2000) -> float:
    found = [interval(random.Random(seed)) for seed in range(repeats)]
    return sum(one is not None and one.low <= truth <= one.high for one in found) / repeats


@pytest.mark.parametrize("count", [3, 4, 5, 8])
@pytest.mark.parametrize("noise", [0.002, 0.03])
def test_interval_covers_the_truth_in_95_of_100_cases_however_few_rounds(count: int, noise: float) -> None:
    assert coverage(lambda r: paired_ratio(*rounds(r, count, 1.23, noise)), 1.23) == pytest.approx(0.95, abs=0.02)


def test_percentile_bootstrap_of_three_rounds_would_not() -> None:
    generator = np.random.default_rng(0)
    logs = generator.normal(0.0, 0.01, (2000, 3))
    picks = generator.integers(0, 3, (2000, 500, 3))
    means = np.take_along_axis(logs[:, None, :], picks, axis=2).mean(axis=2)
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    assert np.mean((low <= 0.0) & (high >= 0.0)) < 0.80


def first_clear(random_: random.Random, noise: float, looks: int, corrected: bool) -> RatioInterval | None:
    """What is told by who looks after every round from the third on and stops when the answer is clear."""
    own, other = rounds(random_, LEAST_ROUNDS + looks - 1, 1.0, noise)
    found = None
    for count in range(LEAST_ROUNDS, LEAST_ROUNDS + looks):
        found = paired_ratio(own[:count], other[:count], looks if corrected else 1)
        if found is not None and found.is_clear(NARROW):
            break
    return found


@pytest.mark.parametrize("looks", [3, 6, 14])
@pytest.mark.parametrize("noise", [0.003, 0.008, 0.03])
def test_interval_still_holds_when_rounds_end_as_soon_as_the_answer_is_clear(looks: int, noise: float) -> None:
    assert 0.935 <= coverage(lambda r: first_clear(r, noise, looks, corrected=True), 1.0) <= 0.995


def test_without_the_correction_for_looks_it_would_not() -> None:
    assert coverage(lambda r: first_clear(r, 0.03, 6, corrected=False), 1.0) < 0.89


def test_swapped_plans_have_the_inverse_interval() -> None:
    own, other = [1.0, 1.1, 1.05], [1.3, 1.4, 1.2]
    found, swapped = paired_ratio(own, other), paired_ratio(other, own)
    assert found is not None
    assert swapped is not None
    assert (swapped.ratio, swapped.low, swapped.high) == pytest.approx((1 / found.ratio, 1 / found.high, 1 / found.low))
    assert (found.faster, found.slower, swapped.faster, swapped.slower) == (True, False, False, True)


def test_one_round_has_no_interval_and_wild_noise_no_overflow() -> None:
    assert paired_ratio([1.0], [2.0]) is None
    wild = paired_ratio([1e-9, 1e9], [1e9, 1e-9], looks=6)
    assert wild is not None
    assert math.isfinite(wild.high)
    assert not wild.is_clear(NARROW)
