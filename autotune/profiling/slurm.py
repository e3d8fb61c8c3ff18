"""Slurm: the nodes of the allocation that we run in, and the step that starts a process on each of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from autotune.errors import UserError

__all__ = ["allocated_hosts", "expand_nodelist", "step_command", "step_environment"]

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

# Options of the tuner's own step or batch script that srun would take for those of ours.
_STEP_OPTIONS = re.compile(
    r"^(SLURM_CPU_BIND.*|SLURM_CPUS_PER_TASK|SRUN_CPUS_PER_TASK|SLURM_TRES_PER_TASK|SLURM_NTASKS_PER_.*|SLURM_NPROCS"
    r"|SLURM_DISTRIBUTION|SLURM_EXACT|SLURM_EXCLUSIVE|SLURM_GPUS_PER_TASK|SLURM_STEP_.*|SLURM_STEPID|SLURM_LABELIO"
    r"|SLURM_STDINMODE|SLURM_STDOUTMODE|SLURM_STDERRMODE|SLURM_HOSTFILE|SLURM_MPI_TYPE|SLURM_THREADS"
    r"|SLURM_THREADS_PER_CORE|SLURM_UNBUFFEREDIO|SLURM_WAIT|SLURM_OPEN_MODE|SLURM_ARBITRARY_.*)$"
)


def allocated_hosts(environ: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Nodes of the Slurm allocation around this process, in Slurm's order; None outside of one, or if it has one node.

    Raises:
        UserError: Slurm's list can't be read.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not environ.get("SLURM_JOB_ID") or not nodelist:
        return None
    names = expand_nodelist(nodelist)
    return names if len(names) > 1 else None


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Host names of a Slurm node list: `gpu[01-03,07],login1` is gpu01, gpu02, gpu03, gpu07 and login1.

    Several brackets in a name (`rack[1-2]n[0-1]`) multiply, the last changing fastest, and numbers keep their leading
    zeros, as `scontrol show hostnames` has it.

    Raises:
        UserError: the list is malformed.
    """
    names: list[str] = []
    for part in _split(text):
        pieces = _GROUP.split(part)
        if not part or any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise UserError(f"{text!r} is no Slurm node list")
        found = [pieces[0]]
        for group, after in zip(pieces[1::2], pieces[2::2], strict=True):
            numbers = _numbers(group, text)
            found = [f"{before}{number}{after}" for before in found for number in numbers]
        names += found
    return tuple(names)


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", text.strip())


def _numbers(group: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in group.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UserError(f"{text!r} is no Slurm node list: {item!r} is no range of numbers")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def step_command(hosts: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """`srun` that runs `words` once on each of the nodes, beside the step that this process may be in.

    A step has all cores and GPUs of its nodes unless it asks for fewer. Standard input reaches every task: srun
    broadcasts it by default, and `--input=all` says so.
    """
    nodes = str(len(hosts))
    return (
        "srun",
        *("--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1"),
        *("--nodelist", ",".join(hosts)),
        "--overlap",
        "--kill-on-bad-exit=1",
        "--input=all",
        "--cpu-bind=none",
        "--mpi=none",
        *words,
    )


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for `srun`: without what would shape our step like another."""
    return {name: value for name, value in environ.items() if not _STEP_OPTIONS.match(name)}
