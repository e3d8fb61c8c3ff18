"""What an exporter is given: one plan and everything it needs to be run elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autotune.schedules import registry
from autotune.schedules.schedule import Schedule
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Job", "make_job"]


@dataclass(frozen=True)
class Job:
    """One plan of a space, with its schedule.

    Attributes:
        given: the schedule, if it is no named one or there is one already; else it is built when it is asked for.
    """

    space: Space
    plan: Plan
    given: Schedule | None = None

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
        return f"{self.space.name}: {self.plan.describe()} on {self.plan.devices} {self.space.cluster.device} devices"


def make_job(space: Space, plan: Plan, schedule: Schedule | None = None) -> Job:
    """The job of `plan`; its schedule is built by name unless `schedule` brings one (a generated one has no name).

    Raises:
        UserError: no schedule of that name, or it can't run with the plan's microbatches.
    """
    job = Job(space, plan, schedule)
    assert job.schedule
    return job
