"""Fits machine numbers to measured step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.cost.assumptions import Assumptions
from autotune.cost.devices import Machine
from autotune.cost.predict import Predictor
from autotune.errors import UserError
from autotune.space.cluster import ClusterSpec
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

__all__ = ["FITTABLE", "Refit", "fit_machine", "refit_to_trials"]

FITTABLE: dict[str, tuple[float, float, float]] = {
    "efficiency": (0.05, 1.0, 0.6),
    "kernel_s": (0.0, 1e-3, 20e-6),
    "visit_s": (0.0, 1.0, 0.5e-3),
    "layer_host_s": (0.0, 1.0, 6e-3),
    "attention_efficiency": (0.05, 1.5, 0.75),
    "memory_efficiency": (0.1, 1.0, 0.85),
    "link_efficiency": (0.05, 1.0, 0.8),
}
"""Numbers that can be fitted: least, greatest and starting value."""

STEPS = 20
PROBE = 1e-3


def fit_machine(
    machine: Machine,
    numbers: Sequence[str],
    errors: Callable[[Machine], Sequence[float]],
    from_start: bool = True,
    greatest: Mapping[str, float] = MappingProxyType({}),
) -> Machine:
    """The machine with `numbers` set so that the squared relative errors are least.

    Gauss-Newton with halved steps; numbers that no error depends on keep their value.

    Args:
        errors: relative error of every row for a machine.
        from_start: begin at `FITTABLE`'s values, so that the catalogue's own can't leak into a fit; otherwise at the
            machine's.
        greatest: limits of numbers other than `FITTABLE`'s.

    Raises:
        UserError: a number that can't be fitted, or fewer rows than numbers.
    """
    import numpy as np

    for name in numbers:
        if name not in FITTABLE:
            raise UserError(f"{name!r} can't be fitted: give some of {', '.join(FITTABLE)}")
    if from_start:
        machine = machine.with_numbers(**{name: FITTABLE[name][2] for name in numbers})
    scale = np.array([FITTABLE[name][2] for name in numbers])
    low = np.array([FITTABLE[name][0] for name in numbers]) / scale
    high = np.array([greatest.get(name, FITTABLE[name][1]) for name in numbers]) / scale

    def residuals(point: np.ndarray) -> np.ndarray:
        values = dict(zip(numbers, (float(x) for x in point * scale), strict=True))
        return np.array(errors(machine.with_numbers(**values)))

    point = np.array([getattr(machine, name) for name in numbers]) / scale
    best = residuals(point)
    if len(best) < len(numbers):
        raise UserError(f"{len(numbers)} numbers can't be fitted to {len(best)} measured step times")
    for _ in range(STEPS):
        jacobian = np.stack([(residuals(point + PROBE * axis) - best) / PROBE for axis in np.eye(len(numbers))], axis=1)
        step = np.linalg.lstsq(jacobian, -best, rcond=1e-6)[0]
        moved, point, best = _walk(residuals, point, best, step, low, high)
        if not moved:
            break
    return machine.with_numbers(**dict(zip(numbers, (float(x) for x in point * scale), strict=True)))


def _walk(
    residuals: Callable[[Any], Any], point: Any, best: Any, step: Any, low: Any, high: Any
) -> tuple[bool, Any, Any]:
    """The first of ever shorter steps that lowers the squared error by more than rounding."""
    import numpy as np

    for shrink in (1.0, 0.5, 0.25, 0.1, 0.02):
        trial = np.clip(point + shrink * step, low, high)
        errors = residuals(trial)
        if float(errors @ errors) < float(best @ best) * (1 - 1e-6) - 1e-15:
            return True, trial, errors
    return False, point, best


@dataclass(frozen=True)
class Refit:
    """A machine fitted to finished trials.

    Attributes:
        before, after: mean absolute relative error of the step time over those trials.
    """

    machine: Machine
    before: float
    after: float


def refit_to_trials(
    trials: Sequence[tuple[Plan, float]],
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    machine: Machine,
    assumptions: Assumptions | None = None,
    numbers: Sequence[str] = ("efficiency",),
) -> Refit:
    """Fits machine numbers to measured trials of one space, starting at `machine`'s own.

    Args:
        trials: plans and their measured step times in seconds.
        assumptions: what ran them; None: this package's worker.

    Raises:
        UserError: fewer trials than numbers, or a number that can't be fitted.
    """

    def errors(figures: Machine) -> list[float]:
        predictor = Predictor(model, cluster, training, assumptions, figures)
        return [predictor.predict(plan).step_time_s / measured_s - 1 for plan, measured_s in trials]

    fitted = fit_machine(machine, numbers, errors, from_start=False)
    before, after = (sum(map(abs, errors(m))) / len(trials) for m in (machine, fitted))
    return Refit(fitted, before, after)
