"""What measured plans tell of others: a Gaussian process over the families that plans belong to.

A quantity of a plan (by how much a prediction errs, whether it runs at all) is a sum of effects:

    y(plan) = mean + sum over fields of effect(value of the field) + effect of the parts of its predicted step
              + effect shared by plans alike in most fields + the plan's own

each normal with mean 0. Effects of a schedule, of recomputation and of the stages a device holds are independent
between their values; those of pp, tp, dp and the micro-batch size are closer for closer values. The standard deviations
of the effects are unknown: the posterior is averaged over draws from their prior, weighted by the likelihood of what
was measured, so that a few measurements don't claim more than they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.space.plan import Plan

__all__ = ["Families", "Scales"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_NAMED = ("schedule", "stages_per_device", "recompute")
_ORDERED = ("pp", "tp", "dp", "micro_batch_size")
_FIELDS = (*_NAMED, *_ORDERED)
# Correlation of an ordered field's effects, each factor of two apart.
_PER_DOUBLING = 0.5
# Correlation of the shared effect, each field in which plans differ.
_PER_FIELD = 0.6
_DRAWS = 96
# Draws of the least weight together add nothing that is seen.
_NEGLIGIBLE = 0.03
_MOST_DRAWS = 10
# Measurements that judge the draws; more, taken evenly, cost much and say the same.
_MOST_WEIGHED = 80
# Candidates a block: keeps the kernels of 10,000 plans against hundreds measured in little memory.
_BLOCK = 2048


@dataclass(frozen=True)
class Scales:
    """Prior medians of the effects' standard deviations; a draw departs from each by a factor of about `spread`.

    Attributes:
        mean: of the mean, taken as it is.
        field: of each field's effects.
        parts: of the relative error of a part of the step, such as its communication.
        alike: of the effect that plans alike in most fields share.
        own: of what is a plan's own, noise of its measurement included.
    """

    mean: float
    field: float
    parts: float
    alike: float
    own: float
    spread: float = 2.5


class Families:
    """The plans of a space, and how their quantities go together.

    Args:
        parts: shares of the predicted step by part, (plans, parts); None without predictions.
    """

    def __init__(self, plans: Sequence[Plan], parts: Floats | None = None) -> None:
        self._values = [_codes(plans, name) for name in _NAMED] + [
            np.log2([float(getattr(plan, name)) for plan in plans]) for name in _ORDERED
        ]
        # A field that is the same everywhere has no effect of its own beside the mean.
        self._varying = [index for index, values in enumerate(self._values) if np.ptp(values) > 0]
        self._parts = None if parts is None else parts - parts.mean(axis=0)

    def posterior(self, scales: Scales, measured: Indices, y: Floats, wanted: Indices) -> tuple[Floats, Floats]:
        """Mean and standard deviation of a quantity for the `wanted` plans, given `y` of the `measured` ones.

        The plan's own effect is part of the deviation: it is what a measurement of the plan would show.
        """
        draws = self._draws(scales)
        prior = scales.mean**2
        if not len(measured):
            centre = np.median(draws, axis=0)
            variances = prior + self._variance(centre, wanted)
            return np.zeros(len(wanted)), np.sqrt(variances)
        thin = slice(None, None, math.ceil(len(y) / _MOST_WEIGHED))
        chosen, share = _heaviest(self._log_likelihoods(draws, prior, measured[thin], y[thin]))
        inner = self._kernels(measured, measured)
        inverses = [np.linalg.inv(_covariance(draws[index], prior, inner)) for index in chosen]
        means, deviations = np.empty(len(wanted)), np.empty(len(wanted))
        for begin in range(0, len(wanted), _BLOCK):
            block = wanted[begin : begin + _BLOCK]
            outer = self._kernels(block, measured)
            mean, second = np.zeros(len(block)), np.zeros(len(block))
            for draw, weight, inverse in zip(draws[chosen], share, inverses, strict=True):
                cross = np.tensordot(draw[:-1], outer, axes=1) + prior
                gain = cross @ inverse
                one = gain @ y
                variance = prior + self._variance(draw, block) - np.einsum("ij,ij->i", gain, cross)
                mean += weight * one
                second += weight * (np.maximum(variance, draw[-1]) + one**2)
            means[begin : begin + _BLOCK] = mean
            deviations[begin : begin + _BLOCK] = np.sqrt(np.maximum(second - mean**2, 0.0))
        return means, deviations

    def _log_likelihoods(self, draws: Floats, prior: float, measured: Indices, y: Floats) -> Floats:
        """Logarithm of the marginal likelihood of `y` under each draw, up to a constant."""
        inner = self._kernels(measured, measured)
        matrices = np.stack([_covariance(draw, prior, inner) for draw in draws])
        lower = np.linalg.cholesky(matrices)
        scaled = np.linalg.solve(lower, np.broadcast_to(y[:, None], (len(draws), len(y), 1)))[..., 0]
        log_determinants = 2.0 * np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
        return np.asarray(-0.5 * (np.sum(scaled**2, axis=1) + log_determinants))

    def _draws(self, scales: Scales) -> Floats:
        """Variances of the effects, (draws, kernels + 1): those of `_kernels`, and the plan's own last."""
        medians = [scales.field] * len(self._varying) + [scales.alike]
        if self._parts is not None:
            medians.append(scales.parts)
        medians.append(scales.own)
        normal = np.random.default_rng(0).standard_normal((_DRAWS, len(medians)))
        normal[0] = 0.0
        # What is a plan's own is known better: it can't be far below the noise of a measurement.
        factors = np.log(scales.spread) * np.array([1.0] * (len(medians) - 1) + [0.5])
        return np.asarray((np.array(medians) * np.exp(normal * factors)) ** 2)

    def _kernels(self, a: Indices, b: Indices) -> Floats:
        """Correlations of every effect between plans `a` and `b`, (kernels, a, b)."""
        kernels, differing = [], np.zeros((len(a), len(b)))
        for index in self._varying:
            distance = np.abs(self._values[index][a][:, None] - self._values[index][b][None, :])
            if index < len(_NAMED):
                distance = (distance > 0).astype(np.float64)
                kernels.append(1.0 - distance)
            else:
                kernels.append(_PER_DOUBLING**distance)
            differing += np.minimum(distance, 2.0)
        kernels.append(_PER_FIELD**differing)
        if self._parts is not None:
            kernels.append(self._parts[a] @ self._parts[b].T)
        return np.stack(kernels)

    def _variance(self, draw: Floats, wanted: Indices) -> Floats:
        """Prior variance of plans beside that of the mean."""
        flat = len(self._varying) + 1
        variance = np.full(len(wanted), draw[:flat].sum() + draw[-1])
        if self._parts is not None:
            variance += draw[flat] * np.einsum("ij,ij->i", self._parts[wanted], self._parts[wanted])
        return variance


def _covariance(draw: Floats, prior: float, kernels: Floats) -> Floats:
    """Of measured plans among each other."""
    return np.asarray(np.tensordot(draw[:-1], kernels, axes=1) + prior + draw[-1] * np.eye(kernels.shape[1]))


def _codes(plans: Sequence[Plan], name: str) -> Floats:
    """A number for each value of a field."""
    values = [getattr(plan, name) for plan in plans]
    order = {value: float(index) for index, value in enumerate(sorted(set(values)))}
    return np.array([order[value] for value in values])


def _heaviest(log_weights: Floats) -> tuple[Indices, Floats]:
    """The draws that matter and their shares, which sum to 1."""
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    enough = int(np.searchsorted(np.cumsum(weights[order]), 1.0 - _NEGLIGIBLE)) + 1
    chosen = order[: min(enough, _MOST_DRAWS)]
    return chosen, weights[chosen] / weights[chosen].sum()
