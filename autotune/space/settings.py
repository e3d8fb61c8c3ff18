"""The plain settings of a space beside model, cluster and training: what is searched, and how a trial is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.space.plan import Recompute

__all__ = [
    "REGEX_GROUPS",
    "REGEX_TIMES",
    "ReaderKind",
    "ReaderSettings",
    "SearchLists",
    "Starter",
    "TrialSettings",
    "WorkerSettings",
]

Starter = Literal["torchrun", "none"]
ReaderKind = Literal["json", "megatron", "torchtitan", "regex"]

REGEX_TIMES = ("step_time_s", "step_time_ms", "tokens_per_s")
REGEX_GROUPS = (*REGEX_TIMES, "step", "peak_memory_bytes", "peak_memory_gib", "loss")
"""Named groups of a regular expression that reads a log."""


@dataclass(frozen=True)
class SearchLists:
    """The values of every searched dimension, in the file's order, each once.

    dp and the number of microbatches are no lists: dp = devices / (pp tp), m = global batch / (dp micro_batch_size).

    Attributes:
        stages_per_device: for schedules that let it be chosen (interleaved ones); others fix it.
    """

    pp: tuple[int, ...]
    tp: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    schedule: tuple[str, ...]
    stages_per_device: tuple[int, ...] = (2,)
    recompute: tuple[Recompute, ...] = ("none",)


@dataclass(frozen=True)
class TrialSettings:
    """How one plan is measured.

    Attributes:
        timeout_s: seconds after which a trial is stopped.
        hang_timeout_s: seconds without progress of any rank after which a trial is stopped; None leaves it to the
            worker's kind (see `autotune.profiling.command.hang_timeout`).
    """

    warmup_steps: int = 1
    measured_steps: int = 3
    timeout_s: float = 600.0
    hang_timeout_s: float | None = None


@dataclass(frozen=True)
class ReaderSettings:
    """How the result of a worker is read.

    Attributes:
        kind: `json`: the ranks' reports or one result file; the others read lines of logs.
        patterns: regular expressions of kind `regex`, with groups of `REGEX_GROUPS`.
        log: files that are read, a glob seen from the trial's folder; placeholders are filled in.
        skip_steps: optimizer steps that don't count; None: the trial's warm-up steps.
    """

    kind: ReaderKind = "json"
    patterns: tuple[str, ...] = ()
    log: str = "rank-*.log"
    skip_steps: int | None = None


@dataclass(frozen=True)
class WorkerSettings:
    """The command that runs a plan, as a space file gives it; `autotune.profiling.command` runs it.

    Attributes:
        command: its words, with placeholders; with `shell` one text.
        env: (name, value) of environment variables, with placeholders.
        cwd: absolute path of the folder it runs in; None: the tuner's.
        python_hooks: see `autotune.profiling.rank_hooks`.
    """

    command: tuple[str, ...]
    shell: bool = False
    starter: Starter = "torchrun"
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    reader: ReaderSettings = ReaderSettings()
    python_hooks: bool = True
