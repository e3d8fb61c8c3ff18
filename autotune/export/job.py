"""What an exporter is given: one plan and everything it needs to be run elsewhere."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autotune.results.text import printable
from autotune.schedules import registry
from autotune.schedules.schedule import Schedule
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Evaluated", "Job", "make_job", "own_worker_note"]

Evaluated = Literal["measured", "profiled", "predicted", "not evaluated"]
"""How a study came by the figures of a plan, if it has any."""

_COMMAND_CHARACTERS = 400


@dataclass(frozen=True)
class Job:
    """One plan of a space, with its schedule.

    Attributes:
        given: the schedule, if it is no named one or there is one already; else it is built when it is asked for.
        evaluated: what the study did with the plan; None: nobody says.
        trial: number of its trial in the study.
    """

    space: Space
    plan: Plan
    given: Schedule | None = None
    evaluated: Evaluated | None = None
    trial: int = 0

    @cached_property
    def schedule(self) -> Schedule:
        """The passes of the plan; the same object that was checked, simulated and run.

        Raises:
            UserError: no schedule of that name, or it can't run with the plan's microbatches.
        """
        if self.given is not None:
            return self.given
        plan = self.plan
        return registry.build(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_device)

    @property
    def run_id(self) -> str:
        """Name and fingerprint: identifies the run among others on the same machines."""
        return f"{self.space.name}-{self.space.fingerprint(self.plan)}"

    @property
    def summary(self) -> str:
        """One line for the head of a written file."""
        devices = "device" if self.plan.devices == 1 else "devices"
        return f"{self.space.name}: {self.plan.describe()} on {self.plan.devices} {self.space.cluster.device} {devices}"

    @property
    def own_worker(self) -> str | None:
        """The command of the space's section `worker` in one line; None: the built-in worker."""
        worker = self.space.worker
        if worker is None:
            return None
        text = " ".join(printable(worker.command[0] if worker.shell else _join(worker.command)).split())
        return text if len(text) <= _COMMAND_CHARACTERS else text[:_COMMAND_CHARACTERS] + "..."


def _join(words: tuple[str, ...]) -> str:
    """Words as a command line; placeholders stay as they are written."""
    plain = (word and not any(c.isspace() or c in "'\"" for c in word) for word in words)
    return " ".join(word if is_plain else shlex.quote(word) for word, is_plain in zip(words, plain, strict=True))


def own_worker_note(job: Job) -> str | None:
    """What to know of a script that doesn't run the space's own worker; None where there is none."""
    worker = job.own_worker
    if worker is None:
        return None
    if job.evaluated == "measured":
        return f"The plan was measured with the study's own worker `{worker}`, not with this launcher."
    return f"The study's own worker is `{worker}`, which this script does not run."


def make_job(
    space: Space,
    plan: Plan,
    schedule: Schedule | None = None,
    evaluated: Evaluated | None = None,
    trial: int | None = None,
) -> Job:
    """The job of `plan`; its schedule is built by name unless `schedule` brings one (a generated one has no name).

    Raises:
        UserError: no schedule of that name, or it can't run with the plan's microbatches.
    """
    job = Job(space, plan, schedule, evaluated, trial or 0)
    assert job.schedule
    return job
