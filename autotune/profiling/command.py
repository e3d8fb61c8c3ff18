"""What runs a plan: the worker's command, how its ranks are started, and the environment they get."""

from __future__ import annotations

import os
import re
import shlex
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.errors import UserError
from autotune.profiling.process_tree import MARKER
from autotune.profiling.protocol import TrialRequest
from autotune.space.plan import Plan

__all__ = ["DEFAULT_WORKER", "ELASTIC_LOGS", "Starter", "WorkerCommand", "environment", "parse_worker", "started_ranks"]

Starter = Literal["torchrun", "none"]

ELASTIC_LOGS = ".torchrun"
"""Torch's launcher insists on a log folder of its own; it stays empty, ranks log by `rank_entry`."""

# Set by a launcher this tuner may itself run under; a rank that inherits them joins the wrong job.
_FOREIGN_VARIABLES = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE|ROLE_NAME"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING)$"
)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class WorkerCommand:
    """What runs a plan.

    Attributes:
        argv: the command for one plan, run without a shell; `{placeholders}` in it are filled in by `fill`.
        starter: `torchrun` starts the command once per rank under torch's elastic launcher; `none` starts it once
            and leaves it to start its own ranks.
        serve_argv: a command whose ranks run one plan after the other (see `autotune.profiling.pool`); `{inbox}` is the
            folder they read. None: the worker can't.
    """

    argv: tuple[str, ...]
    starter: Starter = "torchrun"
    serve_argv: tuple[str, ...] | None = None

    def fill(self, request: TrialRequest, folder: Path) -> tuple[str, ...]:
        """The command for one trial. Raises UserError for an unknown placeholder."""
        return _fill(self.argv, _trial_values(request.trial, request.plan, folder))

    def fill_serving(self, inbox: Path) -> tuple[str, ...]:
        """The command that serves `inbox`."""
        assert self.serve_argv is not None
        return _fill(self.serve_argv, {"python": sys.executable, "inbox": inbox})


DEFAULT_WORKER = WorkerCommand(
    argv=("{python}", "-m", "autotune.profiling.worker", "--request", "{request}", "--out", "{out}"),
    serve_argv=("{python}", "-m", "autotune.profiling.serve", "--inbox", "{inbox}"),
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


def started_ranks(command: tuple[str, ...], starter: Starter, ranks: int, folder: Path) -> tuple[str, ...]:
    """The command that starts `ranks` ranks of `command`, each under a `rank_entry` that logs to `folder`."""
    entry = (sys.executable, "-I", "-S", str(Path(__file__).with_name("rank_entry.py")), str(folder), *command)
    if starter == "none":
        return entry
    return (
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes", "1"),
        *("--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0"),  # port 0: the kernel picks a free one
        *("--rdzv-id", uuid.uuid4().hex),
        *("--local-addr", "localhost"),
        *("--log-dir", str(folder / ELASTIC_LOGS)),
        *("--max-restarts", "0"),
        *("--shutdown-timeout", "3"),  # between SIGTERM and SIGKILL of the ranks that outlive a failed one
        "--no-python",
        *entry,
    )


def environment(device: str, mark: str) -> dict[str, str]:
    """Environment of the processes of a launch: ours, without what a job around the tuner has set.

    Args:
        mark: of `autotune.profiling.process_tree.MARKER`.
    """
    values = {k: v for k, v in os.environ.items() if not _FOREIGN_VARIABLES.match(k)}
    values[MARKER] = mark
    values["PYTHONUNBUFFERED"] = "1"
    if device == "cpu":
        # A rank stands for one device: passes are timed by the CPU clock of one thread.
        values["OMP_NUM_THREADS"] = "1"
    else:
        values.setdefault("OMP_NUM_THREADS", "1")
    return values


def _trial_values(trial: int, plan: Plan, folder: Path) -> dict[str, object]:
    return {
        "python": sys.executable,
        "request": folder / "request.json",
        "out": folder,
        "nproc": plan.devices,
        "trial": trial,
        "pp": plan.pp,
        "tp": plan.tp,
        "dp": plan.dp,
        "micro_batch_size": plan.micro_batch_size,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "stages_per_device": plan.stages_per_device,
        "recompute": plan.recompute,
    }


def _fill(argv: tuple[str, ...], values: Mapping[str, object]) -> tuple[str, ...]:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UserError(f"unknown placeholder {match[0]} in the worker command; known: {', '.join(values)}")
        return str(values[match[1]])

    return tuple(_PLACEHOLDER.sub(value, word) for word in argv)
