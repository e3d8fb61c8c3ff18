"""The Optuna study on disk: every trial with its plan and its outcome, safe against the death of the tuner."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import UserError
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.results.predicted import Predicted
from autotune.search.identity import differences
from autotune.search.samplers import FIELDS, Observation, fields_of
from autotune.search.storage_url import check_url, shown_url, without_secrets
from autotune.space.plan import Plan

__all__ = ["Finished", "Store", "open_store", "sqlite_url"]

_CONSTRAINT = "memory_bytes_over_limit"
_IDENTITY, _STUDY_ID, _PLAN, _OUTCOME, _FINAL = "identity", "study_id", "plan", "outcome", "final"
# A trial that says nothing about its plan: Optuna calls it failed and samplers take no notice of it.
_UNINFORMATIVE = ("failed", "invalid", "hang", "killed", "no-result", "non-finite", "launcher")
# A trial with a value: measured on all devices, or profiled on one.
_VALUED = ("ok", "predicted")


@dataclass(frozen=True)
class Finished:
    """A trial that came to an end, and how."""

    number: int
    plan: Plan
    outcome: TrialOutcome


class Store:
    """One study. A trial is begun with its plan and finished with its outcome; a begun one that has none is lost work.

    Args:
        memory_limit_bytes: limit that makes a plan infeasible; None for no limit.
    """

    def __init__(self, study: optuna.Study, plans: Mapping[str, Plan], memory_limit_bytes: int | None) -> None:
        self._study = study
        self._plans = plans
        self._limit = memory_limit_bytes
        self._open: dict[int, optuna.Trial] = {}
        self._choices = {name: sorted({getattr(plan, name) for plan in plans.values()}) for name in FIELDS}

    @property
    def study_id(self) -> str:
        """Marks the processes of this study."""
        return str(self._study.user_attrs[_STUDY_ID])

    def recover(self) -> list[Plan]:
        """Close the trials that a dead tuner left open; the plans among them that have no outcome yet."""
        lost = []
        with _database_errors():
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if _OUTCOME in trial.user_attrs:  # killed between writing the outcome and closing the trial
                    self._close(trial.number, _outcome(trial))
                    continue
                self._study.tell(trial.number, state=TrialState.FAIL)
                if (plan := self._plan(trial)) is not None:
                    lost.append(plan)
        return lost

    def finished(self) -> list[Finished]:
        """Every trial whose outcome says something about its plan, in the order they began.

        A plan whose launches failed is as good as never tried: a search that goes on tries it again.
        """
        with _database_errors():
            trials = self._study.get_trials(deepcopy=False)
        found = [
            Finished(trial.number, plan, _outcome(trial))
            for trial in trials
            if _OUTCOME in trial.user_attrs and (plan := self._plan(trial)) is not None
        ]
        return [one for one in found if one.outcome.state != "launcher"]

    def begin(self, plan: Plan, fingerprint: str) -> int:
        """Open a trial of `plan`; its number."""
        with _database_errors():
            waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if not any(trial.user_attrs.get(_PLAN) == fingerprint for trial in waiting):
                self._study.enqueue_trial(fields_of(plan), user_attrs={_PLAN: fingerprint})
            while True:
                trial = self._study.ask()
                for name, values in self._choices.items():
                    trial.suggest_categorical(name, values)
                if trial.user_attrs.get(_PLAN) == fingerprint:
                    self._open[trial.number] = trial
                    return trial.number
                # Queued by a tuner that died before it began it; its plan is still among those left.
                self._study.tell(trial, state=TrialState.FAIL)

    def finish(self, number: int, outcome: TrialOutcome, tokens_per_s: float | None) -> None:
        """Write the outcome of a trial and close it."""
        with _database_errors():
            trial = self._trial(number)
            trial.set_user_attr("tokens_per_s", tokens_per_s)
            trial.set_user_attr(_OUTCOME, asdict(outcome))
            self._close(number, outcome)

    def abandon(self, number: int) -> None:
        """Close a trial that was interrupted: its plan is as good as never tried."""
        with _database_errors():
            self._study.tell(number, state=TrialState.FAIL)
            self._open.pop(number, None)

    def final(self) -> dict[str, Any] | None:
        """What `save_final` stored last."""
        with _database_errors():
            values: dict[str, Any] | None = self._study.user_attrs.get(_FINAL)
        return values

    def save_final(self, values: dict[str, Any]) -> None:
        """Store the study's final, in place of the one before."""
        with _database_errors():
            self._study.set_user_attr(_FINAL, values)

    def observations(self, finished: list[Finished], tokens_per_s: Mapping[int, float | None]) -> list[Observation]:
        """What the finished trials (by number: their throughput) tell a sampler."""
        return [
            Observation(
                plan=one.plan,
                value=tokens_per_s.get(one.number) if one.outcome.state in _VALUED else None,
                constraint=self._over_limit(one.outcome),
                failed=one.outcome.state in _UNINFORMATIVE,
                peak_bytes=_peak_bytes(one.outcome),
            )
            for one in finished
        ]

    def _close(self, number: int, outcome: TrialOutcome) -> None:
        trial = self._trial(number)
        if (over := self._over_limit(outcome)) is not None:
            trial.set_constraint(_CONSTRAINT, over)
        if outcome.state in _VALUED:
            self._study.tell(number, trial.user_attrs["tokens_per_s"])
        else:
            uninformative = outcome.state in _UNINFORMATIVE
            self._study.tell(number, state=TrialState.FAIL if uninformative else TrialState.PRUNED)
        self._open.pop(number, None)

    def _over_limit(self, outcome: TrialOutcome) -> float | None:
        """Bytes over the memory limit, negative below it; 1 for an out-of-memory that nobody measured."""
        peak = _peak_bytes(outcome)
        if peak is not None and self._limit is not None:
            return float(peak - self._limit)
        return 1.0 if outcome.state == "oom" else None

    def _plan(self, trial: FrozenTrial) -> Plan | None:
        return self._plans.get(trial.user_attrs.get(_PLAN, ""))

    def _trial(self, number: int) -> optuna.Trial:
        if number in self._open:
            return self._open[number]
        frozen = self._study.get_trials(deepcopy=False)[number]
        return optuna.Trial(self._study, frozen._trial_id)


def sqlite_url(path: Path) -> str:
    """The database URL of a file."""
    return f"sqlite:///{path.absolute()}"


def open_store(
    url: str,
    name: str,
    identity: dict[str, Any],
    plans: Mapping[str, Plan],
    memory_limit_bytes: int | None,
    resume: bool,
    fresh: bool = False,
    must_exist: bool = False,
) -> Store:
    """Begin the study `name` in the database at `url`, or go on with it.

    Args:
        identity: of `autotune.search.identity`; a stored study must have the same.
        plans: the legal plans by fingerprint.
        resume: go on with a study that exists; False refuses one that does.
        fresh: delete a study that exists first.
        must_exist: there are results of this study, so a database without it is another one or a damaged one.

    Raises:
        UserError: the database can't be opened or is damaged, the study exists though it must not, or it is about
            something else; the message names what differs.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    check_url(url)
    shown = shown_url(url)
    with _database_errors(url):
        storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None)
        existing = name in optuna.get_all_study_names(storage)
        if existing and fresh:
            optuna.delete_study(study_name=name, storage=storage)
            existing = False
        if existing and not resume:
            raise UserError(
                f"study {name!r} exists in {shown}; --resume goes on with it, --fresh deletes it and starts anew"
            )
        if must_exist and not existing:
            held = ", ".join(map(repr, optuna.get_all_study_names(storage))) or "no study"
            raise UserError(
                f"{shown} holds {held}, not {name!r}, so the results that are there can't be continued; "
                "give the study its own name and database again, or start anew with --fresh or another --name"
            )
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(),
            load_if_exists=True,
        )
        stored = study.user_attrs.get(_IDENTITY)
        if stored is None:
            study.set_user_attr(_STUDY_ID, uuid.uuid4().hex)
            study.set_user_attr(_IDENTITY, identity)
        elif changes := differences(stored, identity):
            listed = "\n  ".join(changes)
            raise UserError(
                f"study {name!r} was about something else, so its results can't be continued:\n  {listed}\n"
                "change it back, or start anew with --fresh or another --name"
            )
    return Store(study, plans, memory_limit_bytes)


def _peak_bytes(outcome: TrialOutcome) -> int | None:
    """Peak of the heaviest device, profiled or measured."""
    if outcome.predicted is not None:
        return outcome.predicted.peak_memory_bytes
    return outcome.measurement.peak_memory_bytes if outcome.measurement else None


def _outcome(trial: FrozenTrial) -> TrialOutcome:
    values = dict(trial.user_attrs[_OUTCOME])
    if (measured := values["measurement"]) is not None:
        ranks = measured["peak_memory_bytes_per_rank"]
        measured = Measurement(**{**measured, "peak_memory_bytes_per_rank": tuple(ranks) if ranks else None})
    if (predicted := values.get("predicted")) is not None:
        predicted = Predicted(**predicted)
    return TrialOutcome(**{**values, "measurement": measured, "predicted": predicted})


@contextlib.contextmanager
def _database_errors(url: str | None = None) -> Iterator[None]:
    """Turn what a database can do to us into a message; a password in its URL is never part of it."""
    shown = "the study's database" if url is None else shown_url(url)
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        message = f"{shown}: {_root(error)}"
    except (SQLAlchemyError, ImportError) as error:
        message = f"cannot use {shown}: {_root(error)}"
    else:
        return
    # no cause: what a driver says of the connection may hold the password
    raise UserError(message if url is None else without_secrets(message, url))


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    original = getattr(error, "orig", None) or error
    return str(original).splitlines()[0] if str(original) else type(original).__name__
