"""How a space is searched, and how a search ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autotune.cost.assumptions import Assumptions
from autotune.cost.devices import Machine
from autotune.errors import UserError
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.hosts import Hosts
from autotune.results.columns import Row
from autotune.results.final import LEAST_ROUNDS, Final
from autotune.results.measurement import Fidelity
from autotune.results.verdict import fastest, rate
from autotune.search.history import PREFIX
from autotune.search.samplers import SamplerName

if TYPE_CHECKING:
    from autotune.profiling.refit import Refit

__all__ = ["Ended", "Isolation", "SearchOptions", "SearchResult"]

Ended = Literal["complete", "converged", "trials", "timeout", "device-hours", "failing", "interrupted"]
Isolation = Literal["pool", "trial"]

MOST_SEED = 2**31 - 1
"""Of numpy's, which Optuna's samplers use, with room for what they add to it."""

# Limits of time -> their unit, and what holds without them.
_LIMITS = {
    "timeout_s": ("seconds", "no limit"),
    "device_hours": ("hours", "no limit"),
    "trial_timeout_s": ("seconds", "the space's trial.timeout_s"),
    "hang_timeout_s": ("seconds", "the space's trial.hang_timeout_s"),
}


@dataclass(frozen=True)
class SearchOptions:
    """How to search a space.

    Attributes:
        fidelity: `run` runs every plan on all its devices, `profile` measures its stages on one, `predict` nothing.
        trials: most trials of the study, earlier runs included; None for every legal plan.
        timeout_s: after this much time spent in trials, earlier runs included, none is begun; None for no limit.
        device_hours: after so many hours of devices in trials, earlier runs included, none is begun; None for no limit.
        trial_timeout_s: wall-clock limit of one trial; None takes the space's.
        hang_timeout_s: time without progress of any rank after which a trial is ended; None takes the space's.
        storage: database URL; None for study.db in the study's folder.
        worker: runs the plans; None takes the space's, or else the built-in one.
        isolation: `pool` keeps ranks from trial to trial if the worker can serve, `trial` starts new ones each time.
        resume: go on with the study in `folder`, beside other searches perhaps; fresh: delete it first. Neither: it
            must not exist.
        adopt: of a resume: take over rows that hold although the memory limit or the model's name changed.
        retry_failed: of a resume: run plans again that failed in searches before; out-of-memory is no failure.
        keep_going: go on though the first trials all failed alike.
        takeover_s: a search that gave no sign of life for so long is taken for dead by the others.
        hosts: nodes that a trial spans; None: those of a Slurm allocation of several nodes around us, or this machine.
        assumptions: of predictions about the software that runs the plans; None: this package's worker.
        figures: of one device, for predictions; None: the space's, or else the catalogue's.
        refuse_by_estimate: refuse plans whose predicted memory can't fit; None: where this package's worker runs them,
            for which the estimate is proven.
        final: how many of the fastest plans are measured again, with the baselines, when a `run` search ended; 0 for no
            final, None for 3.
        final_rounds: most rounds of it.
    """

    folder: Path
    fidelity: Fidelity = "run"
    trials: int | None = None
    timeout_s: float | None = None
    device_hours: float | None = None
    trial_timeout_s: float | None = None
    hang_timeout_s: float | None = None
    sampler: SamplerName = "auto"
    seed: int = 0
    storage: str | None = None
    resume: bool = False
    fresh: bool = False
    adopt: bool = False
    retry_failed: bool = False
    keep_going: bool = False
    takeover_s: float = 30.0
    worker: WorkerCommand | None = None
    isolation: Isolation = "pool"
    hosts: Hosts | None = None
    assumptions: Assumptions | None = None
    figures: Machine | None = None
    refuse_by_estimate: bool | None = None
    final: int | None = None
    final_rounds: int = 8

    def __post_init__(self) -> None:
        if self.resume and self.fresh:
            raise UserError("--resume and --fresh exclude each other: one goes on with a study, the other deletes it")
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials must be at least 1, not {self.trials}")
        if self.adopt and not self.resume:
            raise UserError("--adopt takes over rows of a study that --resume goes on with; give both")
        if self.retry_failed and not self.resume:
            raise UserError("--retry-failed runs failed plans of a study again that --resume goes on with; give both")
        for name, (unit, unset) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                option = f"--{name.removesuffix('_s').replace('_', '-')}"
                raise UserError(f"{option} must be above 0 {unit} and finite, not {value:g}; leave it out for {unset}")
        if not 1 <= self.takeover_s < math.inf:
            raise UserError(f"--takeover-after must be at least 1 second and finite, not {self.takeover_s:g}")
        if not 0 <= self.seed <= MOST_SEED:
            raise UserError(f"--seed must be a whole number from 0 to {MOST_SEED}, not {self.seed}")
        if self.final is not None and self.final < 0:
            raise UserError(f"--final must be at least 0, not {self.final}")
        if self.final_rounds < LEAST_ROUNDS:
            raise UserError(f"--final-rounds must be at least {LEAST_ROUNDS}, not {self.final_rounds}")
        self._refuse_what_the_fidelity_ignores()

    @property
    def finalists(self) -> int:
        """How many of the fastest plans a final is held between; 0 without one."""
        if self.fidelity != "run":
            return 0
        return 3 if self.final is None else self.final

    @property
    def refuses(self) -> bool:
        """Whether plans are refused by the estimate of their memory."""
        return self.worker in (None, DEFAULT_WORKER) if self.refuse_by_estimate is None else self.refuse_by_estimate

    def _refuse_what_the_fidelity_ignores(self) -> None:
        given = {
            "--worker": self.worker not in (None, DEFAULT_WORKER),
            "--trial-timeout": self.trial_timeout_s is not None,
            "--hang-timeout": self.hang_timeout_s is not None,
            "--hosts": self.hosts is not None,
            "--final": bool(self.final),
        }
        if self.fidelity == "predict":
            given |= {
                "--trials": self.trials is not None,
                "--timeout": self.timeout_s is not None,
                "--device-hours": self.device_hours is not None,
                "--retry-failed": self.retry_failed,
            }
        if self.fidelity != "run" and any(given.values()):
            names = " and ".join(name for name, is_given in given.items() if is_given)
            what = "runs nothing" if self.fidelity == "predict" else "measures stages in a process of its own"
            mean = "means" if sum(given.values()) == 1 else "mean"
            raise UserError(f"{names} {mean} nothing with --fidelity {self.fidelity}, which {what}")


@dataclass(frozen=True)
class SearchResult:
    """How a search ended.

    Attributes:
        rows: the whole table, judged: a row for every point of the space.
        legal: legal plans of the space.
        refit: the device's figures fitted to the trials of a run; None where that can't be done.
        why: why it ended, where `ended` alone doesn't say it: what the sampler says of a search that converged.
        final: the study's final, as far as it came; None if it had none.
        no_final: why it had none, why it isn't finished, or why it decided nothing.
    """

    ended: Ended
    rows: tuple[Row, ...]
    legal: int
    fidelity: Fidelity = "run"
    refit: Refit | None = None
    why: str = ""
    final: Final | None = None
    no_final: str = ""

    @property
    def best(self) -> Row | None:
        """The winner of the final, or else the fastest plan within its limits, of those evaluated at this fidelity."""
        marked = [row for row in self.rows if row.is_best and rate(row, self.fidelity) is not None]
        return marked[0] if marked else fastest(self.rows, fidelity=self.fidelity)

    @property
    def evaluated(self) -> int:
        """Legal plans that were evaluated at the search's fidelity."""
        return sum(row.fidelity == self.fidelity and row.state != "refused" for row in self.rows)

    @property
    def refused_by_estimate(self) -> int:
        """Legal plans that were refused by the estimate of their memory."""
        return sum(row.state == "refused" and row.fidelity != "" for row in self.rows) - self.refused_by_history

    @property
    def refused_by_history(self) -> int:
        """Legal plans that were refused because a smaller one ran out of memory."""
        return sum(row.state == "refused" and row.reason.startswith(PREFIX) for row in self.rows)

    def count(self, state: str) -> int:
        """Rows in `state`."""
        return sum(row.state == state for row in self.rows)
