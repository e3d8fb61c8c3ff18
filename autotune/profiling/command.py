"""What runs a plan: the worker's command, how its ranks are started, and the environment they get."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.crew import NodePlan
from autotune.profiling.node_words import NODE_RANK, PORT
from autotune.profiling.process_tree import MARKER
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.rank_files import RESULT_FILE
from autotune.space.placeholders import (
    PLACEHOLDERS,
    WORD_LISTS,
    Value,
    fill_text,
    fill_words,
    placeholders_in,
    unknown_placeholders,
)
from autotune.space.settings import ReaderSettings, Starter, WorkerSettings

__all__ = [
    "DEFAULT_WORKER",
    "ELASTIC_LOGS",
    "PLAN_FILE",
    "Starter",
    "WorkerCommand",
    "environment",
    "hang_timeout",
    "parse_worker",
    "started_ranks",
    "worker_of",
]

ELASTIC_LOGS = ".torchrun"
"""Torch's launcher insists on a log folder of its own; it stays empty, ranks log by `rank_entry`."""

PLAN_FILE = "plan.json"

HANG_TIMEOUT_S = 300.0
"""Of a worker whose ranks tell their progress: more than twice what a rank waits for its peers in one collective."""

_JSON = ReaderSettings()

# Set by a launcher this tuner may itself run under; a rank that inherits them joins the wrong job.
_FOREIGN_VARIABLES = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE|ROLE_NAME"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    # of the tuner alone: the address of its database may hold a password
    r"|AUTOTUNE_STORAGE)$"
)


@dataclass(frozen=True)
class WorkerCommand:
    """What runs a plan.

    Attributes:
        argv: the command for one plan; `{placeholders}` in it are filled in by `fill`. With `shell` one text.
        starter: `torchrun` starts the command once per rank under torch's elastic launcher; `none` starts it once
            and leaves it to start its own ranks.
        serve_argv: a command whose ranks run one plan after the other (see `autotune.profiling.pool`); `{inbox}` is the
            folder they read. None: the worker can't.
        shell: run `argv` by `sh -c`; what is filled in is quoted.
        env: (name, value) of environment variables, with placeholders.
        cwd: folder the command runs in; None: ours.
        reader: how the result is read.
        heartbeat: the ranks tell their progress (see `autotune.profiling.heartbeat`), so that a silent rank hangs.
        python_hooks: load `autotune.profiling.rank_hooks` into ranks that run Python.
        arguments: values of placeholders for one plan beside those that follow from it: a trainer's arguments, a port.
    """

    argv: tuple[str, ...]
    starter: Starter = "torchrun"
    serve_argv: tuple[str, ...] | None = None
    shell: bool = False
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    reader: ReaderSettings = _JSON
    heartbeat: bool = False
    python_hooks: bool = True
    arguments: tuple[tuple[str, Value], ...] = ()

    @property
    def trainer_arguments(self) -> str | None:
        """The placeholder of a trainer's arguments that the command uses, such as `megatron_args`."""
        used = placeholders_in(" ".join(self.argv))
        return next((name for name in WORD_LISTS if name in used), None)

    def given(self, name: str, value: Value) -> WorkerCommand:
        """The command for a plan for which the placeholder `name` stands for `value`."""
        return replace(self, arguments=(*self.arguments, (name, value)))

    def with_port(self) -> WorkerCommand:
        """The command with a free port for `{port}`, if it has one: the same one wherever it stands."""
        texts = " ".join((*self.argv, *(text for _, text in self.env)))
        return self.given("port", str(_free_port())) if "port" in placeholders_in(texts) else self

    def on_nodes(self, plan: NodePlan) -> WorkerCommand:
        """The command for a launch on those nodes. What only they know when it begins stands in it as a token."""
        hosts = plan.hosts
        return (
            self.given("hosts", ",".join(hosts.names))
            .given("master_addr", hosts.head)
            .given("node_rank", NODE_RANK)
            .given("port", PORT)
            .given("python", hosts.python)
        )

    @property
    def starts_on_every_node(self) -> bool:
        """Whether nodes beside the first start the command, too: per rank, or by a launcher that is told its node."""
        texts = " ".join((*self.argv, *(text for _, text in self.env)))
        return self.starter == "torchrun" or "node_rank" in placeholders_in(texts)

    def fill(self, request: TrialRequest, folder: Path) -> tuple[str, ...]:
        """The command for one trial. Raises UserError for an unknown placeholder."""
        values = self._values(request, folder)
        _refuse_unknown(" ".join(self.argv))
        if self.shell:
            return ("/bin/sh", "-c", fill_text(self.argv[0], values, quoted=True))
        return fill_words(self.argv, values)

    def fill_env(self, request: TrialRequest, folder: Path) -> dict[str, str]:
        """The environment variables for one trial."""
        values = self._values(request, folder)
        return {name: fill_text(text, values) for name, text in self.env}

    def fill_log(self, request: TrialRequest, folder: Path) -> str:
        """The glob of the logs of one trial."""
        return fill_text(self.reader.log, {"port": "*", **self._values(request, folder)})

    def fill_serving(self, inbox: Path) -> tuple[str, ...]:
        """The command that serves `inbox`."""
        assert self.serve_argv is not None
        values: dict[str, Value] = {"python": sys.executable, **dict(self.arguments), "inbox": str(inbox)}
        return fill_words(self.serve_argv, values)

    def _values(self, request: TrialRequest, folder: Path) -> dict[str, Value]:
        return {**_trial_values(request, folder.absolute()), **dict(self.arguments)}


def _refuse_unknown(text: str) -> None:
    if unknown := unknown_placeholders(text):
        known = ", ".join(PLACEHOLDERS)
        raise UserError(f"unknown placeholder {{{unknown[0]}}} in the worker command; known: {known}")


DEFAULT_WORKER = WorkerCommand(
    argv=("{python}", "-m", "autotune.profiling.worker", "--request", "{request}", "--out", "{out}"),
    serve_argv=("{python}", "-m", "autotune.profiling.serve", "--inbox", "{inbox}"),
    heartbeat=True,
)


def parse_worker(text: str, starter: Starter = "torchrun") -> WorkerCommand:
    """The worker that a command line names, split like a shell would.

    Raises:
        UserError: it is empty, malformed, or has an unknown placeholder.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"worker command {text!r}: {error}") from None
    if not words:
        raise UserError("the worker command is empty")
    if not words[0].strip():
        raise UserError(f"worker command {text!r}: its first word, the program to run, is empty")
    _refuse_unknown(text)
    return WorkerCommand(tuple(words), starter, reader=_reader_of(text))


def _reader_of(text: str) -> ReaderSettings:
    """The arguments of a trainer mean that it runs and logs as it does."""
    used = placeholders_in(text)
    if "megatron_args" in used:
        return ReaderSettings("megatron")
    return ReaderSettings("torchtitan" if "torchtitan_args" in used else "json")


def worker_of(settings: WorkerSettings | None) -> WorkerCommand:
    """The worker of a space: what its section `worker` says, or the built-in one."""
    if settings is None:
        return DEFAULT_WORKER
    return WorkerCommand(
        argv=settings.command,
        starter=settings.starter,
        shell=settings.shell,
        env=settings.env,
        cwd=settings.cwd,
        reader=settings.reader,
        python_hooks=settings.python_hooks,
    )


def hang_timeout(worker: WorkerCommand, wanted_s: float | None) -> float | None:
    """Seconds without progress that end a trial: what is wanted, else 300 if the worker's ranks tell their progress."""
    if wanted_s is not None:
        return wanted_s
    return HANG_TIMEOUT_S if worker.heartbeat else None


def started_ranks(
    command: tuple[str, ...],
    starter: Starter,
    ranks: int,
    folder: Path,
    cwd: str | None = None,
    python_hooks: bool = True,
    nodes: NodePlan | None = None,
) -> tuple[str, ...]:
    """The command that starts `ranks` ranks of `command`, each under a `rank_entry` that logs to `folder`.

    Args:
        nodes: where they run; then the command is that of each node, with the tokens of `node_words`.
    """
    python = sys.executable if nodes is None else nodes.hosts.python
    options = (*(() if cwd is None else ("--cwd", cwd)), *(() if python_hooks else ("--no-hooks",)))
    if nodes is not None and starter == "none":
        # Commands of several nodes mustn't share their files: each has the name of its node's first rank.
        options = (*options, "--node", NODE_RANK, str(nodes.devices_per_node))
    script = str(Path(__file__).with_name("rank_entry.py"))
    entry = (python, "-I", "-S", script, *options, str(folder.absolute()), *command)
    if starter == "none":
        return entry
    return (
        python,
        *("-m", "torch.distributed.run"),
        *_rendezvous(ranks, nodes),
        *("--log-dir", str(folder.absolute() / ELASTIC_LOGS)),
        *("--max-restarts", "0"),
        *("--shutdown-timeout", "3"),  # between SIGTERM and SIGKILL of the ranks that outlive a failed one
        "--no-python",
        *entry,
    )


def _rendezvous(ranks: int, nodes: NodePlan | None) -> tuple[str, ...]:
    """Options of torch's launcher: how many ranks it starts, and where they meet.

    Over nodes the rendezvous is static: of torch's kinds it alone keeps to --node-rank, so that node i has ranks
    i x devices_per_node and up. The others sort the nodes by their addresses.
    """
    rendezvous_id = ("--rdzv-id", uuid.uuid4().hex)
    if nodes is None:
        return (
            *("--nnodes", "1"),
            *("--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "localhost:0"),  # port 0: the kernel picks a free one
            *rendezvous_id,
            *("--local-addr", "localhost"),
        )
    return (
        *("--nnodes", str(len(nodes.hosts.names))),
        *("--nproc-per-node", str(nodes.devices_per_node)),
        *("--node-rank", NODE_RANK),
        *("--rdzv-backend", "static"),
        *("--master-addr", nodes.hosts.head),
        *("--master-port", PORT),
        *rendezvous_id,
    )


def environment(device: str, mark: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of the processes of a launch: ours, without what a job around the tuner has set.

    Args:
        mark: of `autotune.profiling.process_tree.MARKER`.
        extra: the worker's own variables; they win over ours.
    """
    values = {k: v for k, v in os.environ.items() if not _FOREIGN_VARIABLES.match(k)}
    values[MARKER] = mark
    values["PYTHONUNBUFFERED"] = "1"
    if device == "cpu":
        # A rank stands for one device: passes are timed by the CPU clock of one thread.
        values["OMP_NUM_THREADS"] = "1"
    else:
        values.setdefault("OMP_NUM_THREADS", "1")
    return values | dict(extra or {}) | {MARKER: mark}


def _trial_values(request: TrialRequest, folder: Path) -> dict[str, Value]:
    plan = request.plan
    values = {
        "pp": plan.pp,
        "tp": plan.tp,
        "dp": plan.dp,
        "micro_batch_size": plan.micro_batch_size,
        "microbatches": plan.microbatches,
        "global_batch_size": request.training.global_batch_size,
        "sequence_length": request.model.sequence_length,
        "schedule": plan.schedule,
        "stages_per_device": plan.stages_per_device,
        "layer_split": ",".join(map(str, plan.layer_split)),
        "recompute": plan.recompute,
        "devices": plan.devices,
        "nnodes": request.cluster.nodes,
        "nproc": max(1, plan.devices // request.cluster.nodes),
        "node_rank": "0",
        "hosts": "localhost",
        "master_addr": "localhost",
        "warmup_steps": request.warmup_steps,
        "measured_steps": request.measured_steps,
        "steps": request.warmup_steps + request.measured_steps,
        "trial": request.trial,
        "python": sys.executable,
        "out": folder,
        "request": folder / "request.json",
        "plan_json": folder / PLAN_FILE,
        "result_json": folder / RESULT_FILE,
    }
    return {name: str(value) for name, value in values.items()}


def _free_port() -> int:
    """A port that nobody listens on; another process may take it before the worker does (state `launcher`)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
