"""Warm ranks: one launch that runs plan after plan, because starting ranks costs far more than a short trial.

The ranks (`autotune.profiling.serve`) watch an inbox folder; job k is the file `job-k.json` with the paths of a request
and of the folder its reports go to. A launch is trusted only as long as all goes well: after any trial that is not `ok`
its ranks are ended and the next trial gets new ones, and so it does after `MOST_TRIALS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.command import WorkerCommand, started_ranks
from autotune.profiling.launcher import prepare_folder
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervised import SupervisedLaunch
from autotune.profiling.supervisor import Ending, LaunchSpec

__all__ = ["MOST_TRIALS", "RankPool"]

MOST_TRIALS = 32
"""Trials that one launch serves."""

_POLL_S = 0.05
_IDLE_LIMIT_S = 3600.0


class RankPool:
    """Ranks that are kept from trial to trial. Close it when the search ends.

    Args:
        worker: has a `serve_argv`.
        folder: where launches keep their own logs and inboxes, one folder each.
        owner: marks the processes, normally `owner_mark` of the study.
    """

    def __init__(self, worker: WorkerCommand, folder: Path, owner: str = "") -> None:
        self._worker, self._folder, self._owner = worker, folder, owner
        self._launch: SupervisedLaunch | None = None
        self._inbox = folder
        self._ranks = 0
        self._jobs = 0

    def run(
        self,
        request: TrialRequest,
        folder: Path,
        time_limit_s: float,
        should_stop: Callable[[], bool] = lambda: False,
        hang_timeout_s: float | None = None,
    ) -> Ending:
        """Run one plan, on warm ranks if there are any; what `launch` takes and gives.

        When it returns, either every rank wrote an `ok` report and is idle, or no process is left.
        """
        prepare_folder(request, folder)
        if self._ranks != request.plan.devices or self._jobs >= MOST_TRIALS:
            self.close()
        started_at, started = time.time(), time.monotonic()
        running = self._launch or self._start(request, time_limit_s)
        running.limit(time_limit_s, hang_timeout_s)
        self._post({"request": str(folder / "request.json"), "out": str(folder)})
        try:
            ending = self._wait(running, request, folder, should_stop)
        except BaseException:
            self.close()
            raise
        if ending is not None:
            self._launch = None
            self._hand_over_logs(folder)
            return replace(ending, started_at=started_at, duration_s=time.monotonic() - started)
        running.limit(_IDLE_LIMIT_S)
        return Ending("exited", 0, None, started_at, time.monotonic() - started)

    def close(self) -> None:
        """End the ranks, if there are any."""
        running, self._launch = self._launch, None
        if running is not None:
            running.close()

    def _start(self, request: TrialRequest, time_limit_s: float) -> SupervisedLaunch:
        number = 0
        while (inbox := self._folder / f"ranks-{number:04d}").exists():
            number += 1
        try:
            inbox.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"cannot write {inbox}: {error.strerror}") from error
        self._inbox, self._ranks, self._jobs = inbox, request.plan.devices, 0
        command = started_ranks(self._worker.fill_serving(inbox), self._worker.starter, self._ranks, inbox)
        self._launch = SupervisedLaunch(
            LaunchSpec(command, str(inbox), time_limit_s), request.cluster.device, self._owner
        )
        return self._launch

    def _post(self, job: dict[str, str]) -> None:
        path = self._inbox / f"job-{self._jobs}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(job), encoding="utf-8")
        os.replace(temporary, path)
        self._jobs += 1

    def _wait(
        self, running: SupervisedLaunch, request: TrialRequest, folder: Path, should_stop: Callable[[], bool]
    ) -> Ending | None:
        """None when every rank reported `ok` for this request; else how the launch ended."""
        ranks, request_id = request.plan.devices, request.id
        while (ending := running.poll(_POLL_S)) is None:
            if should_stop():
                running.stop()
            elif all(_is_ok(folder / f"rank-{rank}.json", request_id) for rank in range(ranks)):
                return None
        return ending

    def _hand_over_logs(self, folder: Path) -> None:
        """Put what tells of the launch's end beside the trial it failed in."""
        for path in [self._inbox / "launcher.log", *self._inbox.glob("rank-*"), *self._inbox.glob("main.*")]:
            target = folder / path.name
            if not target.exists():
                with contextlib.suppress(OSError):
                    shutil.copy(path, target)


def _is_ok(path: Path, request_id: str) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        report = json.loads(path.read_text(encoding="utf-8"))
        return report.get("state") == "ok" and report.get("request_id") == request_id
    return False
