"""The plain settings of a space beside model, cluster and training: what is searched, and how a trial is measured."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.space.plan import Recompute

__all__ = ["SearchLists", "TrialSettings"]


@dataclass(frozen=True)
class SearchLists:
    """The values of every searched dimension, in the file's order, each once.

    dp and the number of microbatches are no lists: dp = devices / (pp tp), m = global batch / (dp micro_batch_size).

    Attributes:
        stages_per_device: for schedules that let it be chosen (interleaved ones); others fix it.
    """

    pp: tuple[int, ...]
    tp: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    schedule: tuple[str, ...]
    stages_per_device: tuple[int, ...] = (2,)
    recompute: tuple[Recompute, ...] = ("none",)


@dataclass(frozen=True)
class TrialSettings:
    """How one plan is measured.

    Attributes:
        timeout_s: seconds after which a trial is stopped.
    """

    warmup_steps: int = 1
    measured_steps: int = 3
    timeout_s: float = 600.0
