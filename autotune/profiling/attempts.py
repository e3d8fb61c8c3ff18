"""A trial whose launch failed for reasons outside of the plan is launched again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import TrialOutcome

__all__ = ["MOST_LAUNCHES", "run_trial"]

MOST_LAUNCHES = 3
"""Launches of one trial, if each ends with the state `launcher`."""


_PROBE_BYTES = 1 << 16


def run_trial(
    run: Callable[[], Ending],
    request: TrialRequest,
    folder: Path,
    worker: WorkerCommand = DEFAULT_WORKER,
    should_stop: Callable[[], bool] | None = None,
    cores: float | None = None,
) -> TrialOutcome | None:
    """Launch a trial until its end says something about the plan, at most three times; None if it was stopped.

    The outcome began with the first launch, and took what all of them did.

    Args:
        run: launches it in `folder`, such as `launch` or the `run` of a pool.
        folder: of the trial; what a failed launch left is moved to `launch-1`, `launch-2` in it.
        should_stop: whether the search is to end. A launch that was stopped though nobody asked for it was ended from
            outside, by a signal to its supervisor: it is launched again. None: whoever stopped it meant it.
        cores: that the ranks share; None asks this machine.

    Raises:
        UserError: the folder can't be written any more, so that what became of the trial says nothing about its plan.
    """
    started, spent_s = "", 0.0
    for number in range(1, MOST_LAUNCHES + 1):
        ending = run()
        if ending.kind == "stopped":
            if should_stop is None or should_stop():
                return None
            ending = replace(ending, kind="launcher", message="a signal from outside ended the supervisor of the trial")
        outcome = assess(request, ending, folder, cores, worker)
        started, spent_s = started or outcome.started, spent_s + outcome.duration_s
        outcome = replace(outcome, started=started, duration_s=spent_s)
        if outcome.measurement is None:
            _require_writable(folder)
        if outcome.state != "launcher":
            return outcome
        if should_stop is not None and should_stop():
            return None
        if number < MOST_LAUNCHES:
            _set_aside(folder, f"launch-{number}")
    return replace(outcome, reason=f"{MOST_LAUNCHES} launches failed, at last: {outcome.reason}")


def _require_writable(folder: Path) -> None:
    """Ranks that can't write their results fail for no fault of the plan."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        raise UserError(
            f"cannot write {folder}: {error.strerror}; its trial doesn't count, and --resume runs it again"
        ) from error


def _set_aside(folder: Path, name: str) -> None:
    """Keep the logs of a launch, out of the way of the next one's."""
    target = folder / name
    with contextlib.suppress(OSError):
        target.mkdir(exist_ok=True)
        for path in list(folder.iterdir()):
            if path.is_file():
                path.replace(target / path.name)
