"""Writes a plan in the form that another launcher reads."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from autotune.errors import UserError
from autotune.export.job import Evaluated, Job, make_job, own_worker_note
from autotune.export.megatron import megatron_files
from autotune.export.torchrun import torchrun_files, worker_files
from autotune.export.torchtitan import torchtitan_files
from autotune.schedules.schedule import Schedule
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["TARGETS", "export_note", "export_plan", "render_plan"]

TARGETS: dict[str, Callable[[Job, str], dict[str, str]]] = {
    "worker": worker_files,
    "torchrun": torchrun_files,
    "megatron": megatron_files,
    "torchtitan": torchtitan_files,
}
"""Every target: (job, python interpreter) -> text of every file, by name."""


def render_plan(
    space: Space,
    plan: Plan,
    target: str,
    schedule: Schedule | None = None,
    python: str = "python3",
    evaluated: Evaluated | None = None,
    trial: int | None = None,
) -> dict[str, str]:
    """The files of `plan` for `target`, by name; nothing is written.

    Args:
        schedule: the plan's passes, when they aren't those that its schedule's name builds.
        python: interpreter that the scripts use unless PYTHON is set.
        evaluated: how the study came by the plan's figures, which the scripts say.
        trial: number of the plan's trial in its study.

    Raises:
        UserError: unknown target, or the target can't run the plan; every reason is listed.
    """
    render = TARGETS.get(target)
    if render is None:
        close = difflib.get_close_matches(target.lower(), TARGETS, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise UserError(f"can't export to {target!r}{hint}; known: {', '.join(TARGETS)}")
    return render(make_job(space, plan, schedule, evaluated, trial), python)


def export_plan(
    space: Space,
    plan: Plan,
    target: str,
    out_dir: Path,
    schedule: Schedule | None = None,
    evaluated: Evaluated | None = None,
    trial: int | None = None,
) -> list[Path]:
    """Writes the files of `plan` for `target` into `out_dir` and returns their paths; scripts are executable.

    Args:
        evaluated, trial: see `render_plan`.

    Raises:
        UserError: unknown target or one that can't run the plan (nothing is written then), or the folder can't be
            written.
    """
    files = render_plan(space, plan, target, schedule, sys.executable, evaluated, trial)
    _make_folder(out_dir)
    written = []
    try:
        for name, text in files.items():
            path = out_dir / name
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(path.stat().st_mode | 0o111)
            written.append(path)
    except OSError as error:
        raise UserError(f"can't write {error.filename or out_dir}: {error.strerror}") from error
    return written


def export_note(space: Space, plan: Plan, target: str, evaluated: Evaluated | None = None) -> str | None:
    """What to know of an export that doesn't run the space's own worker; None if it does, or there is none."""
    worker = space.worker
    if worker is None or target == "worker" or (target == "torchrun" and worker.starter == "torchrun"):
        return None
    return f"{own_worker_note(Job(space, plan, evaluated=evaluated))} `--to worker` writes one that runs it."


def _make_folder(folder: Path) -> None:
    """Makes the folder of the files, if need be. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        blocking = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), None)
        if blocking is not None and not blocking.is_dir():
            raise UserError(
                f"can't write to {folder}: {blocking} is no folder; the files go into a folder, which is made if it "
                "isn't there"
            ) from error
        raise UserError(f"can't write to {folder}: the folder can't be made: {error.strerror}") from error
