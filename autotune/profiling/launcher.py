"""Start the ranks of one trial under torch's elastic launcher, and end them all.

The tuner starts a supervisor (`autotune.profiling.supervisor`), the supervisor the launcher, the launcher a small
`rank_entry` per rank, and that the worker. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from autotune.errors import UserError
from autotune.profiling.process_tree import MARKER, end_all, marked
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervisor import Ending, LaunchSpec

__all__ = [
    "DEFAULT_WORKER",
    "Starter",
    "WorkerCommand",
    "end_leftovers",
    "launch",
    "owner_mark",
    "parse_worker",
    "trial_folder",
]

Starter = Literal["torchrun", "none"]

# Set by a launcher this tuner may itself run under; a rank that inherits them joins the wrong job.
_FOREIGN_VARIABLES = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE|ROLE_NAME"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING)$"
)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_SUPERVISOR_SLACK_S = 20.0
_ELASTIC_LOGS = ".torchrun"  # torch's launcher insists on a folder of its own; ranks log by rank_entry


@dataclass(frozen=True)
class WorkerCommand:
    """What runs a plan.

    Attributes:
        argv: the command, run without a shell; `{placeholders}` in it are filled in by `fill`.
        starter: `torchrun` starts the command once per rank under torch's elastic launcher; `none` starts it once
            and leaves it to start its own ranks.
    """

    argv: tuple[str, ...]
    starter: Starter = "torchrun"

    def fill(self, request: TrialRequest, folder: Path) -> tuple[str, ...]:
        """The command for one trial. Raises UserError for an unknown placeholder."""
        plan = request.plan
        values: dict[str, object] = {
            "python": sys.executable,
            "request": folder / "request.json",
            "out": folder,
            "nproc": plan.devices,
            "trial": request.trial,
            "pp": plan.pp,
            "tp": plan.tp,
            "dp": plan.dp,
            "micro_batch_size": plan.micro_batch_size,
            "microbatches": plan.microbatches,
            "schedule": plan.schedule,
            "stages_per_device": plan.stages_per_device,
            "recompute": plan.recompute,
        }

        def value(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise UserError(f"unknown placeholder {match[0]} in the worker command; known: {', '.join(values)}")
            return str(values[match[1]])

        return tuple(_PLACEHOLDER.sub(value, word) for word in self.argv)


DEFAULT_WORKER = WorkerCommand(
    ("{python}", "-m", "autotune.profiling.worker", "--request", "{request}", "--out", "{out}")
)


def parse_worker(text: str, starter: Starter = "torchrun") -> WorkerCommand:
    """The worker that a command line names, split like a shell would. Raises UserError if it is empty or malformed."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"worker command {text!r}: {error}") from None
    if not words:
        raise UserError("the worker command is empty")
    return WorkerCommand(tuple(words), starter)


def trial_folder(logs: Path, trial: int) -> Path:
    """Where the request, the reports and the logs of a trial lie: `logs/trial-0003`."""
    return logs / f"trial-{trial:04d}"


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
        owner: marks the processes (see `end_leftovers`), normally `owner_mark` of the study.
        should_stop: asked some times a second; true ends the trial with kind `stopped`.

    Raises:
        UserError: the command has an unknown placeholder, or the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "request.json").write_text(json.dumps(request.to_dict()), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from error
    mark = f"{owner}/{uuid.uuid4().hex}"
    spec = LaunchSpec(_launcher_argv(request, worker, folder), str(folder), time_limit_s)
    try:
        return _supervised(spec, mark, _environment(request, mark), should_stop)
    finally:
        # Nothing unless the supervisor itself was killed.
        end_all(marked(mark), grace_s=0.0)
        shutil.rmtree(folder / _ELASTIC_LOGS, ignore_errors=True)


def owner_mark(study: str) -> str:
    """Marks the processes of a study and of the tuner that started them."""
    own = psutil.Process()
    return f"{study}/{own.pid}/{own.create_time():.2f}"


def end_leftovers(study: str) -> int:
    """End the processes of `study` whose tuner no longer lives; how many there were."""
    orphans = []
    for process in marked(f"{study}/"):
        with contextlib.suppress(psutil.Error, OSError):
            if not _tuner_lives(process.environ()[MARKER], study):
                orphans.append(process)
    end_all(orphans, grace_s=0.0)
    return len(orphans)


def _tuner_lives(mark: str, study: str) -> bool:
    try:
        pid, created = mark.removeprefix(f"{study}/").split("/")[:2]
        return f"{psutil.Process(int(pid)).create_time():.2f}" == created
    except (psutil.NoSuchProcess, ValueError):
        return False


def _launcher_argv(request: TrialRequest, worker: WorkerCommand, folder: Path) -> tuple[str, ...]:
    command = worker.fill(request, folder)
    entry = (sys.executable, "-I", "-S", str(Path(__file__).with_name("rank_entry.py")), str(folder), *command)
    if worker.starter == "none":
        return entry
    return (
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes", "1"),
        *("--nproc-per-node", str(request.plan.devices)),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0"),
        *("--rdzv-id", uuid.uuid4().hex),
        *("--local-addr", "localhost"),
        *("--log-dir", str(folder / _ELASTIC_LOGS)),
        *("--max-restarts", "0"),
        *("--shutdown-timeout", "3"),  # between SIGTERM and SIGKILL of the ranks that outlive a failed one
        "--no-python",
        *entry,
    )


def _environment(request: TrialRequest, mark: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not _FOREIGN_VARIABLES.match(k)}
    environment[MARKER] = mark
    environment["PYTHONUNBUFFERED"] = "1"
    if request.cluster.device == "cpu":
        # A rank stands for one device: passes are timed by the CPU clock of one thread.
        environment["OMP_NUM_THREADS"] = "1"
    else:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _supervised(spec: LaunchSpec, mark: str, environment: Mapping[str, str], should_stop: Callable[[], bool]) -> Ending:
    started_at, started = time.time(), time.monotonic()
    with open(Path(spec.folder, "launcher.log"), "ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "autotune.profiling.supervisor", json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    with supervisor:
        answer = b""
        limit = started + spec.time_limit_s + spec.term_grace_s + spec.follower_grace_s + _SUPERVISOR_SLACK_S
        while True:
            if should_stop() and not supervisor.stdin.closed:
                supervisor.stdin.close()
            readable, _, _ = select.select([supervisor.stdout], [], [], 0.1)
            if readable:
                chunk = os.read(supervisor.stdout.fileno(), 65536)
                if not chunk:
                    break
                answer += chunk
            elif time.monotonic() > limit:  # the supervisor itself hangs, stopped perhaps
                supervisor.kill()
                break
    try:
        return Ending(**json.loads(answer))
    except (ValueError, TypeError):
        message = f"the supervisor of the trial ended without a word (exit code {supervisor.returncode})"
        return Ending("launcher", None, None, started_at, time.monotonic() - started, None, message)
