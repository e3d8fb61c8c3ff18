"""What a sampler is asked, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.space.plan import Plan

__all__ = ["FIELDS", "Observation", "Proposer", "fields_of"]

FIELDS = ("pp", "tp", "micro_batch_size", "schedule", "stages_per_device", "recompute")
"""What a study varies; the rest of a plan follows from these."""


@dataclass(frozen=True)
class Observation:
    """What the study knows about a measured plan.

    Attributes:
        value: tokens/s, measured or profiled; None if the plan gave no number that counts.
        peak_bytes: peak memory of the heaviest device, measured or profiled; None if nobody measured it.
        constraint: above 0 when infeasible, by how many bytes, measured or else predicted; None when nothing is known.
        failed: the trial said nothing about the plan (infrastructure, no result).
    """

    plan: Plan
    value: float | None
    constraint: float | None
    failed: bool
    peak_bytes: int | None = None


class Proposer(Protocol):
    """Picks from what is left, given what is known."""

    why_stopped: str
    """Why nothing that is left is worth a trial; empty as long as something is."""

    def propose(self, left: Sequence[Plan], known: Sequence[Observation], flights: Sequence[Plan] = ()) -> Plan | None:
        """One of `left`, which is not empty; None, and `why_stopped` tells, if none of them is worth a trial.

        Args:
            flights: plans that other tuners are measuring now, none of them in `left`.
        """


def fields_of(plan: Plan) -> dict[str, Any]:
    """The searched fields of a plan, which tell the plans of a space apart."""
    return {name: getattr(plan, name) for name in FIELDS}
