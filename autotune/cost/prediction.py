"""What a prediction says, and the FLOPs a step is credited with."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost.memory import DeviceMemory, fits_in, memory_refusal
from autotune.schedules.costs import PassCosts
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan

__all__ = ["Breakdown", "MeanPasses", "Prediction", "model_flops", "without_rounding"]


@dataclass(frozen=True)
class MeanPasses:
    """Measured pass times: means over the pipeline's devices of a device's whole share of the model, in seconds.

    Attributes:
        message_s: a message between two pipeline devices.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    message_s: float


@dataclass(frozen=True)
class Breakdown:
    """Where the step goes on its busiest pipeline device; the parts sum to the step time.

    The bubble is `pp_s` and `bubble_s` together: all the time of the pipeline in which that device does no work.

    Attributes:
        compute_s: kernels of the passes.
        tp_s: tensor-parallel collectives.
        pp_s: part of the bubble that the step would save if messages between pipeline devices took no time.
        overhead_s: the machine's fixed loss on every visit of a microbatch to a stage.
        bubble_s: rest of the bubble: waiting for the passes of other pipeline devices.
        dp_s: gradient reduction and parameter gathering.
        optimizer_s: optimizer step.
    """

    compute_s: float
    tp_s: float
    pp_s: float
    overhead_s: float
    bubble_s: float
    dp_s: float
    optimizer_s: float

    @property
    def pipeline_s(self) -> float:
        """The makespan of the passes (with `rolling_steps` the longest span): the step before dp and optimizer."""
        return self.compute_s + self.tp_s + self.pp_s + self.overhead_s + self.bubble_s

    @property
    def bubble_rate(self) -> float:
        """1 - work of the busiest device / time of the pipeline."""
        return max(0.0, self.pp_s + self.bubble_s) / self.pipeline_s


_ROUNDING = 1e-9
"""Share of a time that sums and differences of floats may be off by; a real fault is larger."""


def without_rounding(difference_s: float, of_s: float) -> float:
    """A difference of times, where it is below 0 by no more than rounding 0; a larger negative one stays and shows.

    Args:
        of_s: the time that was subtracted from.
    """
    return 0.0 if -_ROUNDING * of_s <= difference_s < 0 else difference_s


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to take.

    Attributes:
        step_time_s: one optimizer step.
        busiest: the pipeline device that `breakdown` is about.
        memory: peak of every pipeline device (its tp and dp ranks are alike), by what it holds.
        pass_costs: times and activation bytes that went into the schedule.
        exact: the schedule was simulated in full; otherwise extrapolated from shorter steps.
        mfu: model FLOPs / (step time x devices x peak), with the whole attention square counted, no recomputation.
    """

    plan: Plan
    step_time_s: float
    breakdown: Breakdown
    busiest: int
    memory: tuple[DeviceMemory, ...]
    pass_costs: PassCosts
    exact: bool
    tokens_per_s: float
    mfu: float

    @property
    def bubble_rate(self) -> float:
        """1 - work of the busiest device / time of the pipeline: `bubble_rate` of the results table."""
        return self.breakdown.bubble_rate

    @property
    def heaviest(self) -> int:
        """The pipeline device that needs most memory."""
        return max(range(len(self.memory)), key=lambda d: self.memory[d].total)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the heaviest device."""
        return round(self.memory[self.heaviest].total)

    def fits(self, limit_bytes: float | None) -> bool:
        """Whether the predicted peak is within a device's memory. A plan that doesn't fit may still not be refused."""
        return fits_in(limit_bytes, self.peak_memory_bytes)

    def is_over(self, limit_bytes: float | None) -> bool:
        """Whether the plan doesn't fit by its prediction, but isn't refused: it may, within the model's error."""
        return not self.fits(limit_bytes) and self.refusal(limit_bytes) is None

    def refusal(self, limit_bytes: float | None) -> str | None:
        """Why the plan can't fit (`refused (estimate): ...`), or None; see `autotune.cost.memory.memory_refusal`."""
        return memory_refusal(self.memory, limit_bytes)


def model_flops(model: ModelSpec, samples: int) -> float:
    """FLOPs of forward and backward of `samples` samples without recomputation, padding or causal savings.

    Source: Narayanan et al. (arXiv 2104.04473), section 5.1, for any attention and MLP width.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = 3 if model.activation == "swiglu" else 2
    weights = model.hidden * (q + 2 * kv) + q * model.hidden + matrices * model.hidden * model.ffn_hidden
    token = 2.0 * model.layers * (weights + 2 * model.sequence_length * q) + 2.0 * model.hidden * model.vocab
    return 3.0 * token * samples * model.sequence_length
