"""What a worker's `{megatron_args}` and `{torchtitan_args}` stand for, and which plans they can't express."""

from __future__ import annotations

from pathlib import Path

from autotune.export.job import Job
from autotune.export.megatron import megatron_arguments, megatron_problems
from autotune.export.schedule_csv import schedule_csv
from autotune.export.torchtitan import (
    SCHEDULE_CSV,
    torchtitan_needs_module,
    torchtitan_overrides,
    torchtitan_problems,
    torchtitan_uses_table,
)

__all__ = ["RULES", "trainer_arguments", "trainer_problems"]

RULES = {"megatron_args": "worker-megatron", "torchtitan_args": "worker-torchtitan"}
"""Rule that refuses what the trainer can't run, by the placeholder of its arguments."""


def trainer_problems(name: str, job: Job) -> list[str]:
    """Why the arguments `name` can't express the plan; empty if they can."""
    if name == "megatron_args":
        return megatron_problems(job)
    problems = torchtitan_problems(job)
    if not problems and torchtitan_needs_module(job):
        split = ",".join(map(str, job.plan.layer_split))
        problems = [
            f"no options of torchtitan split the layers into {split}; `autotune export` writes a config module for that"
        ]
    return problems


def trainer_arguments(name: str, job: Job, folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words that `name` stands for, and the files that they speak of, to be written to `folder`.

    Raises:
        UserError: the trainer can't run the plan.
    """
    if name == "megatron_args":
        return _words(megatron_arguments(job)), {}
    files = {SCHEDULE_CSV: schedule_csv(job.schedule)} if torchtitan_uses_table(job) else {}
    return _words(torchtitan_overrides(job, str(folder.absolute() / SCHEDULE_CSV))), files


def _words(options: list[str]) -> tuple[str, ...]:
    """An exporter writes an option and its value as one string."""
    return tuple(word for option in options for word in option.split(" ", 1))
