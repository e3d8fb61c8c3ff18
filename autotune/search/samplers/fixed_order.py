"""Samplers that learn nothing: the order of the space file, or a random one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autotune.search.samplers.proposer import Observation
from autotune.space.plan import Plan

__all__ = ["Grid", "Random"]


class Grid:
    """In the order of the space file."""

    why_stopped = ""

    def propose(self, left: Sequence[Plan], known: Sequence[Observation], flights: Sequence[Plan] = ()) -> Plan:
        """The first."""
        return left[0]


class Random:
    """In one random order of the whole space, so that a resumed study goes on where it stopped."""

    why_stopped = ""

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        shuffled = list(plans)
        random.Random(seed).shuffle(shuffled)
        self.position = {plan: index for index, plan in enumerate(shuffled)}

    def propose(self, left: Sequence[Plan], known: Sequence[Observation], flights: Sequence[Plan] = ()) -> Plan:
        """The one that comes first in the random order."""
        return min(left, key=self.position.__getitem__)
