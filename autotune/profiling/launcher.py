"""Run one plan on ranks of its own, started for it and ended after it.

The tuner starts a supervisor (`autotune.profiling.supervisor`), the supervisor the launcher, the launcher a small
`rank_entry` per rank, and that the worker. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.command import PLAN_FILE, WorkerCommand, started_ranks
from autotune.profiling.crew import NodePlan
from autotune.profiling.hosts import Hosts
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.rank_files import drop_results
from autotune.profiling.supervised import SupervisedLaunch
from autotune.profiling.supervisor import Ending, LaunchSpec

__all__ = ["empty_folder", "launch", "node_plan", "prepare_folder", "trial_folder"]

_POLL_S = 0.1


def trial_folder(logs: Path, trial: int) -> Path:
    """Where the request, the reports and the logs of a trial lie: `logs/trial-0003`."""
    return logs / f"trial-{trial:04d}"


def empty_folder(folder: Path, inside: Path) -> None:
    """Delete what an earlier trial, of this study or another, left in `folder`. Links are deleted, not followed.

    Raises:
        UserError: the folder is not within `inside`, the folder of the study, or can't be emptied.
    """
    if not folder.parent.resolve().is_relative_to(inside.resolve()):
        raise UserError(f"{folder} lies outside of {inside}, by a link; trials are only kept inside of it")
    try:
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        with contextlib.suppress(FileNotFoundError):
            for path in list(folder.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    except OSError as error:
        raise UserError(f"cannot empty {folder}: {error.strerror}") from error


def node_plan(hosts: Hosts, request: TrialRequest, worker: WorkerCommand) -> NodePlan:
    """Where the parts of a launch run. A plan always uses all devices of its cluster, so all of the nodes."""
    assert request.plan.devices == request.cluster.devices
    assert request.cluster.nodes == len(hosts.names)
    return NodePlan(hosts, request.cluster.devices_per_node, not worker.starts_on_every_node)


def prepare_folder(request: TrialRequest, folder: Path) -> None:
    """Make the folder of a launch: with its request and its plan, and no result of another launch.

    Raises:
        UserError: the folder can't be written, or such a result can't be deleted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drop_results(folder)
        (folder / "request.json").write_text(json.dumps(request.to_dict()), encoding="utf-8")
        (folder / PLAN_FILE).write_text(json.dumps(request.plan.to_dict()), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from error


def launch(
    request: TrialRequest,
    worker: WorkerCommand,
    folder: Path,
    time_limit_s: float,
    owner: str = "",
    should_stop: Callable[[], bool] = lambda: False,
    hang_timeout_s: float | None = None,
    hosts: Hosts | None = None,
) -> Ending:
    """Run one plan on its own process group and return when none of its processes is left.

    Args:
        folder: of this trial, created here, for `request.json`, `launcher.log`, `rank-N.log` and the ranks' reports.
        time_limit_s: wall time, start-up included.
        owner: marks the processes, normally `owner_mark` of the study.
        should_stop: asked some times a second; true ends the trial with kind `stopped`.
        hang_timeout_s: time without progress of any rank after which the trial ends with kind `hang`; None: no limit.
        hosts: the nodes that the ranks run on, `folder` being shared by all; None: this machine.

    Raises:
        UserError: the command has an unknown placeholder, or the folder can't be written.
    """
    nodes = None if hosts is None else node_plan(hosts, request, worker)
    worker = worker.with_port() if nodes is None else worker.on_nodes(nodes)
    filled, env = worker.fill(request, folder), worker.fill_env(request, folder)
    command = started_ranks(
        filled,
        worker.starter,
        request.plan.devices,
        folder,
        cwd=worker.cwd,
        python_hooks=worker.python_hooks,
        nodes=nodes,
    )
    prepare_folder(request, folder)
    spec = LaunchSpec(command, str(folder.absolute()), time_limit_s, hang_timeout_s, nodes=nodes)
    running = SupervisedLaunch(spec, request.cluster.device, owner, env)
    try:
        while (ending := running.poll(_POLL_S)) is None:
            if should_stop():
                running.stop()
        return ending
    finally:
        running.close()
