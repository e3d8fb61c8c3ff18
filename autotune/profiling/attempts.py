"""A trial whose launch failed for reasons outside of the plan is launched again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import TrialOutcome

__all__ = ["MOST_LAUNCHES", "run_trial"]

MOST_LAUNCHES = 3
"""Launches of one trial, if each ends with the state `launcher`."""


def run_trial(
    run: Callable[[], Ending], request: TrialRequest, folder: Path, worker: WorkerCommand = DEFAULT_WORKER
) -> TrialOutcome | None:
    """Launch a trial until its end says something about the plan, at most three times; None if it was stopped.

    Args:
        run: launches it in `folder`, such as `launch` or the `run` of a pool.
        folder: of the trial; what a failed launch left is moved to `launch-1`, `launch-2` in it.
    """
    for number in range(1, MOST_LAUNCHES + 1):
        ending = run()
        if ending.kind == "stopped":
            return None
        outcome = assess(request, ending, folder, worker=worker)
        if outcome.state != "launcher":
            return outcome
        if number < MOST_LAUNCHES:
            _set_aside(folder, f"launch-{number}")
    return replace(outcome, reason=f"{MOST_LAUNCHES} launches failed, at last: {outcome.reason}")


def _set_aside(folder: Path, name: str) -> None:
    """Keep the logs of a launch, out of the way of the next one's."""
    target = folder / name
    with contextlib.suppress(OSError):
        target.mkdir(exist_ok=True)
        for path in list(folder.iterdir()):
            if path.is_file():
                path.replace(target / path.name)
