"""What is said of a trial whose results can't be used: its state and why. No torch."""

from __future__ import annotations

from autotune.results.measurement import State

__all__ = ["NoMeasurement"]


class NoMeasurement(Exception):  # noqa: N818  it is an answer, no error
    """There are no numbers: `state` and `reason` of the trial. Raised by readers, caught by `assess`."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state
        self.reason = reason
