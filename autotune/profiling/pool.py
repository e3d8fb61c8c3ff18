"""Warm ranks: one launch that runs plan after plan, because starting ranks costs far more than a short trial.

The ranks (`autotune.profiling.serve`) watch an inbox folder; job k is the file `job-k.json` with the paths of a request
and of the folder its reports go to. A launch is trusted only as long as all goes well: after any trial that is not `ok`
its ranks are ended and the next trial gets new ones, and so it does after `MOST_TRIALS`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.command import WorkerCommand, started_ranks
from autotune.profiling.hosts import Hosts
from autotune.profiling.launcher import node_plan, prepare_folder
from autotune.profiling.part import look_again
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.rank_files import NODES_FILE
from autotune.profiling.supervised import SupervisedLaunch
from autotune.profiling.supervisor import Ending, LaunchSpec
from autotune.profiling.untrusted_json import read_object

__all__ = ["MOST_TRIALS", "RankPool"]

MOST_TRIALS = 32
"""Trials that one launch serves."""

_POLL_S = 0.05
_IDLE_LIMIT_S = 3600.0
_REFRESH_S = 0.25


class RankPool:
    """Ranks that are kept from trial to trial. Close it when the search ends.

    Args:
        worker: has a `serve_argv`.
        folder: where launches keep their own logs and inboxes, one folder each.
        owner: marks the processes, normally `owner_mark` of the study.
        hosts: the nodes that the ranks run on, `folder` being shared by all; None: this machine.
    """

    def __init__(self, worker: WorkerCommand, folder: Path, owner: str = "", hosts: Hosts | None = None) -> None:
        self._worker, self._folder, self._owner, self._hosts = worker, folder, owner, hosts
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
        if self._ranks != request.plan.devices or self._jobs >= MOST_TRIALS or self._died():
            self.close()
        started_at, started = time.time(), time.monotonic()
        running = self._launch or self._start(request, time_limit_s)
        running.limit(time_limit_s, hang_timeout_s)
        self._post(running, {"request": str(folder.absolute() / "request.json"), "out": str(folder.absolute())})
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

    def _died(self) -> bool:
        """Whether the ranks ended while they were idle, which says nothing about the plan that comes next."""
        # The supervisor's last word may have to be read before its end is seen.
        return self._launch is not None and any(self._launch.poll(0) is not None for _ in range(2))

    def _start(self, request: TrialRequest, time_limit_s: float) -> SupervisedLaunch:
        inbox = _new_inbox(self._folder)
        self._inbox, self._ranks, self._jobs = inbox, request.plan.devices, 0
        nodes = None if self._hosts is None else node_plan(self._hosts, request, self._worker)
        worker = self._worker if nodes is None else self._worker.on_nodes(nodes)
        command = started_ranks(worker.fill_serving(inbox.absolute()), worker.starter, self._ranks, inbox, nodes=nodes)
        spec = LaunchSpec(command, str(inbox.absolute()), time_limit_s, nodes=nodes)
        self._launch = SupervisedLaunch(spec, request.cluster.device, self._owner)
        return self._launch

    def _post(self, running: SupervisedLaunch, job: dict[str, str]) -> None:
        path = self._inbox / f"job-{self._jobs}.json"
        if self._hosts is not None:
            running.post(path.name, json.dumps(job))
        else:
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(job), encoding="utf-8")
            os.replace(temporary, path)
        self._jobs += 1

    def _wait(
        self, running: SupervisedLaunch, request: TrialRequest, folder: Path, should_stop: Callable[[], bool]
    ) -> Ending | None:
        """None when every rank reported `ok` for this request; else how the launch ended."""
        ranks, request_id = request.plan.devices, request.id
        looked_at = time.monotonic()
        while (ending := running.poll(_POLL_S)) is None:
            if self._hosts is not None and time.monotonic() - looked_at > _REFRESH_S:
                looked_at = time.monotonic()
                look_again(folder)
            if should_stop():
                running.stop()
            elif all(_is_ok(folder / f"rank-{rank}.json", request_id) for rank in range(ranks)):
                return None
        return ending

    def _hand_over_logs(self, folder: Path) -> None:
        """Put what tells of the launch's end beside the trial it failed in."""
        for path in chain(*map(self._inbox.glob, ("launcher.log", "rank-*", "main*", "node-*.log", NODES_FILE))):
            target = folder / path.name
            if not target.exists():
                with contextlib.suppress(OSError):
                    shutil.copy(path, target)


def _new_inbox(folder: Path) -> Path:
    """A folder of its own for one launch, also where other tuners make theirs. Raises UserError."""
    for number in itertools.count():
        inbox = folder / f"ranks-{number:04d}"
        try:
            inbox.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"cannot write {inbox}: {error.strerror}") from error
        return inbox
    raise AssertionError("numbers don't end")


def _is_ok(path: Path, request_id: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        report = read_object(path)
        return report.get("state") == "ok" and report.get("request_id") == request_id
    return False
