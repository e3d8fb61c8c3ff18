"""A search whose first trials all fail alike stops: the next would, too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune.search.store import Finished

__all__ = ["FIRST_TRIALS", "common_failure"]

FIRST_TRIALS = 4
"""So many failures, each of another plan, are enough."""

_STATES = ("failed", "killed", "no-result", "invalid", "launcher", "hang")
# Ranks, ports, addresses and times differ between two failures by one cause.
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


def common_failure(finished: Sequence[Finished]) -> Finished | None:
    """The first of the trials, if the first four failed alike and no trial of all gave a number; else None.

    Alike: of one state, and with the same first line of the reason but for its numbers. Out of memory and over time are
    no such failures: other plans may need less.

    Args:
        finished: in the order they began.
    """
    if len(finished) < FIRST_TRIALS or any(one.outcome.measurement or one.outcome.predicted for one in finished):
        return None
    first, *others = finished[:FIRST_TRIALS]
    if first.outcome.state not in _STATES or any(_kind(one) != _kind(first) for one in others):
        return None
    return first


def _kind(one: Finished) -> tuple[str, str]:
    lines = one.outcome.reason.splitlines()
    return one.outcome.state, _VARIES.sub("N", lines[0]) if lines else ""
