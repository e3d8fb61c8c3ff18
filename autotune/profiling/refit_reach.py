"""Where a fit to finished trials holds: for a space whose passes are of the size of those it was fitted to. No torch.

Efficiency and the fixed time of a kernel can't be told apart by passes of one size: fits that explain the trials
equally well then disagree on larger ones. So a space beyond the trials' sizes is predicted by all such fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.cost.assumptions import Assumptions, worker_assumptions
from autotune.cost.devices import Machine
from autotune.cost.predict import Predictor
from autotune.cost.work import layer_work
from autotune.profiling.refit import Fitter, Refit, Trial, in_range, mean_error
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["MOST_APART", "Reach", "reach"]

FARTHEST = 2.0
"""Passes up to this many times the largest fitted size, and down to this part of the smallest, are as those fitted."""
AS_GOOD = 1.25
"""A fit with up to this many times the best one's error explains the trials as well."""
MOST_APART = 1.5
"""Predictions of such fits that differ by more say nothing."""
SAMPLE = 12
RIVALS = (("efficiency",), ("kernel_s",), ("efficiency", "kernel_s"))


@dataclass(frozen=True)
class Reach:
    """How a space differs from the trials that a fit was made of.

    Attributes:
        remarks: each difference that the fit doesn't cover, with its numbers.
        apart: where the sizes of passes differ, the largest ratio of the step times that equally good fits predict for
            a plan of the space; else 1.
    """

    remarks: tuple[str, ...]
    apart: float

    @property
    def misleads(self) -> bool:
        """Whether the trials leave open what the space's plans take."""
        return self.apart > MOST_APART


def reach(fit: Refit, fitter: Fitter, trials: Sequence[Trial], space: Space) -> Reach:
    """What `fit`, made by `fitter` of `trials`, says about `space`."""
    plans = space.plans()
    remarks = []
    fitted = [_size(plan, fitter, fitter.assumptions) for plan, _ in trials]
    wanted = [_size(plan, space, fitter.assumptions) for plan in plans]
    apart = 1.0
    if wanted and (max(wanted) > FARTHEST * max(fitted) or min(wanted) < min(fitted) / FARTHEST):
        remarks.append(
            f"it was fitted to layers of {_range(fitted)} a microbatch and rank, this space's are of {_range(wanted)}"
        )
        apart = _apart(fit, fitter, trials, space, plans[:: -(-len(plans) // SAMPLE)])
    if space.training.dtype != fitter.training.dtype:
        remarks.append(f"it was fitted to {fitter.training.dtype}, this space trains in {space.training.dtype}")
    if space.cluster.devices != fitter.cluster.devices:
        remarks.append(f"it was fitted on {fitter.cluster.devices} devices, this space has {space.cluster.devices}")
    return Reach(tuple(remarks), apart)


def _size(plan: Plan, of: Fitter | Space, assumptions: Assumptions | None) -> float:
    """FLOPs of the forward matmuls of one layer on one rank."""
    assumptions = assumptions or worker_assumptions(of.cluster.device)
    work = layer_work(of.model, plan.tp, plan.micro_batch_size, of.training.dtype, assumptions, "none")
    return sum(matmul.flops for matmul in work.forward.matmuls)


def _range(sizes: Sequence[float]) -> str:
    return f"{min(sizes) / 1e6:,.3g} to {max(sizes) / 1e6:,.3g} MFLOP"


def _apart(fit: Refit, fitter: Fitter, trials: Sequence[Trial], space: Space, plans: Sequence[Plan]) -> float:
    error = mean_error(fit.after)
    machines = [fit.machine]
    for numbers in RIVALS:
        if len(trials) < len(numbers):
            continue
        rival = fitter.fit(trials, numbers)
        if mean_error(fitter.errors(rival, trials)) <= AS_GOOD * error:
            machines.append(in_range(rival))
    told = [_steps(machine, fitter.assumptions, space, plans) for machine in machines]
    return max((max(steps) / min(steps) for steps in zip(*told, strict=True)), default=1.0)


def _steps(machine: Machine, assumptions: Assumptions | None, space: Space, plans: Sequence[Plan]) -> list[float]:
    predictor = Predictor(space.model, space.cluster, space.training, assumptions, machine, compiled=False)
    return [predictor.predict(plan).step_time_s for plan in plans]
