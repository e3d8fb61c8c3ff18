"""Run one plan on ranks of its own, started for it and ended after it.

The tuner starts a supervisor (`autotune.profiling.supervisor`), the supervisor the launcher, the launcher a small
`rank_entry` per rank, and that the worker. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.command import WorkerCommand, started_ranks
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervised import SupervisedLaunch
from autotune.profiling.supervisor import Ending, LaunchSpec

__all__ = ["launch", "prepare_folder", "trial_folder"]

_POLL_S = 0.1


def trial_folder(logs: Path, trial: int) -> Path:
    """Where the request, the reports and the logs of a trial lie: `logs/trial-0003`."""
    return logs / f"trial-{trial:04d}"


def prepare_folder(request: TrialRequest, folder: Path) -> None:
    """Make the folder of a trial and write its request. Raises UserError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "request.json").write_text(json.dumps(request.to_dict()), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from error


def launch(
    request: TrialRequest,
    worker: WorkerCommand,
    folder: Path,
    time_limit_s: float,
    owner: str = "",
    should_stop: Callable[[], bool] = lambda: False,
) -> Ending:
    """Run one plan on its own process group and return when none of its processes is left.

    Args:
        folder: of this trial, created here, for `request.json`, `launcher.log`, `rank-N.log` and the ranks' reports.
        time_limit_s: wall time, start-up included.
        owner: marks the processes, normally `owner_mark` of the study.
        should_stop: asked some times a second; true ends the trial with kind `stopped`.

    Raises:
        UserError: the command has an unknown placeholder, or the folder can't be written.
    """
    command = started_ranks(worker.fill(request, folder), worker.starter, request.plan.devices, folder)
    prepare_folder(request, folder)
    running = SupervisedLaunch(LaunchSpec(command, str(folder), time_limit_s), request.cluster.device, owner)
    try:
        while (ending := running.poll(_POLL_S)) is None:
            if should_stop():
                running.stop()
        return ending
    finally:
        running.close()
