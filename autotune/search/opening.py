"""Begin a study in its database, or go on with it: what it was about is checked before anything is touched."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection

from autotune.errors import UserError
from autotune.search.claims import Claims, StudyRow
from autotune.search.database import Database
from autotune.search.identity import Changes, changes
from autotune.search.options import SearchOptions
from autotune.search.sealed import is_salted, sealed
from autotune.search.sqlite_file import require_usable, sqlite_path
from autotune.search.storage_url import check_url, shown_url
from autotune.search.store import Store
from autotune.search.tables import create_tables
from autotune.search.tuners import Tuner, Watch, this_tuner
from autotune.space.cluster import ClusterSpec
from autotune.space.plan import Plan

__all__ = ["open_store", "sqlite_url"]

# Names of attributes in Optuna's study. Versions before the claims kept the identity there, too.
_IDENTITY, _MARK = "identity", "study_id"
# How long a tuner on another machine is listened to before a study may be deleted or changed: two of its beats.
_LISTEN_S = 11.0
_NO_DELETE = "--fresh can't delete it"


def sqlite_url(path: Path) -> str:
    """The database URL of a file."""
    return f"sqlite:///{path.absolute()}"


def open_store(
    url: str,
    options: SearchOptions,
    identity: dict[str, Any],
    plans: Mapping[str, Plan],
    cluster: ClusterSpec,
    must_exist: bool = False,
    note: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
) -> Store:
    """Begin the study in the database at `url`, or go on with it.

    Args:
        options: its folder's name is the study's; `resume` goes on with a study that exists, `fresh` deletes it first.
        identity: of `autotune.search.identity`; see `docs/search.md` for what a stored one may differ in.
        plans: the legal plans by fingerprint.
        must_exist: there are results of this study, so a database without it is another one or a damaged one.
        note: told what changed, and when the database is waited for.
        stop: whether to wait for nothing any more.

    Raises:
        UserError: the database can't be opened or is damaged, the study exists though it must not, or it is about
            something else; the message names what differs.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    check_url(url)
    name = options.folder.name
    if must_exist:
        _require_file(url, name)
    database = Database(url, note, stop)
    try:
        database.prepare(create_tables)
        me = this_tuner(cluster, options.hosts.names if options.hosts else ())
        study = _study(database, name, options, me, must_exist, note)
        claims = Claims(database, study._study_id, me)
        row = _study_row(database, study, claims, identity)
        agreed, now = row.identity, sealed(identity, row.identity)
        if found := changes(agreed, now):
            # What an earlier version sealed without a salt is sealed anew when it is written anew.
            agreed = now if is_salted(now) else sealed(identity)
            _accept(found, name, options, claims, agreed, note)
        return Store(database, study, claims, row.mark, plans, cluster.memory_limit_bytes, options.takeover_s, agreed)
    except BaseException:
        database.close()
        raise


def require_deletable(path: Path, name: str, me: Tuner) -> None:
    """Look whether the database file of a study may be deleted; one that can't be read is of no use to anybody.

    Args:
        name: of the study that is to be deleted.
        me: whoever would delete it.

    Raises:
        UserError: another search is at work on the study, or the file holds other studies, too.
    """
    url = sqlite_url(path)
    try:
        require_usable(url)
    except UserError:
        return
    if not path.is_file() or path.stat().st_size == 0:
        return
    database = Database(url)
    try:
        try:
            database.prepare(create_tables)
            names = database.run(lambda: optuna.get_all_study_names(database.storage))
        except UserError:
            return
        if others := sorted(set(names) - {name}):
            raise UserError(
                f"{database.shown} also holds other studies ({', '.join(map(repr, others))}), which --fresh would "
                f"delete with {name!r}; give this search another --name"
            )
        if name in names:
            study = optuna.load_study(study_name=name, storage=database.storage)
            _require_alone(Claims(database, study._study_id, me), _NO_DELETE)
    finally:
        database.close()


def _require_file(url: str, name: str) -> None:
    """A file that is not there, or empty, holds no study; opening it would make it."""
    path = sqlite_path(url)
    if path is None:
        return
    if not path.exists():
        raise UserError(f"there is no {shown_url(url)}, so the results of {name!r} that are there can't be continued")
    if path.is_file() and path.stat().st_size == 0:
        raise UserError(f"{shown_url(url)} is empty, so the results of {name!r} that are there can't be continued")


def _study(
    database: Database, name: str, options: SearchOptions, me: Tuner, must_exist: bool, note: Callable[[str], None]
) -> optuna.Study:
    """Optuna's study of that name, begun if it may be."""
    names = database.run(lambda: optuna.get_all_study_names(database.storage))
    if name in names and options.fresh:
        _delete(database, name, me)
        names.remove(name)
    if name in names and not options.resume:
        raise UserError(
            f"study {name!r} exists in {database.shown}; --resume goes on with it, --fresh deletes it and starts anew"
        )
    if must_exist and name not in names:
        held = f"the studies {', '.join(map(repr, names))}, but not {name!r}" if names else f"no study {name!r}"
        raise UserError(
            f"{database.shown} holds {held}, so the results that are in {options.folder} can't be continued; "
            "give the study its own name and database again, or start anew with --fresh or another --name"
        )
    if name not in names and options.resume:
        where = options.folder if options.storage is None else database.shown
        note(f"no study {name!r} in {where} to go on with; starting a new one")
    study = database.run(
        lambda: optuna.create_study(
            storage=database.storage,
            study_name=name,
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(),
            load_if_exists=True,
        )
    )
    if study.directions != [StudyDirection.MAXIMIZE]:
        kept = ", ".join(direction.name.lower() for direction in study.directions)
        raise UserError(
            f"study {name!r} in {database.shown} has other objectives: {kept}, not to maximize tokens/s; "
            "give this one another --name, or delete that one with --fresh"
        )
    return study


def _delete(database: Database, name: str, me: Tuner) -> None:
    study = optuna.load_study(study_name=name, storage=database.storage)
    claims = Claims(database, study._study_id, me)
    _require_alone(claims, _NO_DELETE)
    if (row := claims.study_row()) is not None:
        claims.forget_study(row.mark)
    database.run(lambda: optuna.delete_study(study_name=name, storage=database.storage))


def _require_alone(claims: Claims, so: str) -> set[str]:
    """The keys of tuners that are known, and dead. Raises UserError while others are at work on the study."""
    watch = Watch(claims.me, grace_s=4 * _LISTEN_S)
    living = _living(watch, claims)
    elsewhere = [tuner for tuner in living if tuner.place != claims.me.place]
    if elsewhere and len(elsewhere) == len(living):
        # Their processes can't be seen from here: whoever lives raises its beat.
        before = {tuner.key: tuner.beat for tuner in elsewhere}
        deadline = time.monotonic() + _LISTEN_S
        while time.monotonic() < deadline:
            living = [t for t in _living(watch, claims) if before.get(t.key) != t.beat]
            if living:
                break
            time.sleep(0.5)
    if living:
        who = ", ".join(tuner.describe() for tuner in living)
        raise UserError(f"another search ({who}) is running on this study, so {so}; end it first")
    return {tuner.key for tuner in claims.tuners()}


def _living(watch: Watch, claims: Claims) -> list[Tuner]:
    tuners = [tuner for tuner in claims.tuners() if tuner.key != claims.me.key]
    dead = {tuner.key for tuner in watch.dead(tuners)}
    return [tuner for tuner in tuners if tuner.key not in dead]


def _study_row(database: Database, study: optuna.Study, claims: Claims, identity: dict[str, Any]) -> StudyRow:
    """What is known of the study; of a new one what `identity` says. Tuners that begin it at once agree on one."""
    row, is_claimed = claims.study_row(), bool(claims.all())
    # Read last: a study gets its mark before its first claim.
    attrs = database.run(lambda: study.user_attrs)
    if row is not None and (attrs[_MARK] != row.mark if _MARK in attrs else is_claimed):
        # Of a study that was deleted behind our back, whose number was given to this one.
        claims.forget_study(row.mark)
        row = claims.study_row()
    if row is None:
        if _IDENTITY not in attrs and database.run(lambda: study.get_trials(deepcopy=False)):
            raise UserError(
                f"study {study.study_name!r} in {database.shown} was not made by autotune; give this one another --name"
            )
        about = attrs[_IDENTITY] if _IDENTITY in attrs else sealed(identity)
        row = claims.begin_study(StudyRow(attrs.get(_MARK, uuid.uuid4().hex), about))
    if attrs.get(_MARK) != row.mark:
        mark = row.mark
        database.run(lambda: study.set_user_attr(_MARK, mark))
    return row


def _accept(
    found: Changes,
    name: str,
    options: SearchOptions,
    claims: Claims,
    identity: dict[str, Any],
    note: Callable[[str], None],
) -> None:
    """Go on although something changed, if the rows hold. Raises UserError if they don't, or nobody allowed it."""
    adoptable = options.fidelity != "predict"
    _refuse(found, name, options.adopt and adoptable, adoptable)
    dead = _require_alone(
        claims, "what it searches can't be changed:\n  " + "\n  ".join((*found.lists, *found.harmless))
    )
    if not claims.set_identity(identity, dead):
        raise UserError("another search joined this study just now, so what it searches can't be changed; end it first")
    if found.lists:
        note("the search lists changed, rows of plans that are still in them hold: " + "; ".join(found.lists))
    if found.harmless:
        note("rows that still hold are taken over and judged anew: " + "; ".join(found.harmless))


def _refuse(found: Changes, name: str, adopt: bool, adoptable: bool) -> None:
    if not found.others and (adopt or not found.harmless):
        return
    listed = "\n  ".join((*found.others, *found.harmless, *found.lists))
    hints = ["change it back", "start a new study with another --name", "delete this one with --fresh"]
    if not adoptable:
        held = ""
    elif found.others:
        held = "\nno row can be taken over by --adopt: what is measured depends on " + ", ".join(
            dict.fromkeys(line.split(":")[0] for line in found.others)
        )
    else:
        held = "\n--adopt takes over the rows, judged anew: no measurement depends on what changed"
    if found.others:
        headline = f"study {name!r} was about something else, so its results can't be continued"
    else:
        headline = f"study {name!r} began with other values, so its results aren't continued unasked"
    raise UserError(f"{headline}:\n  {listed}\n{', '.join(hints[:-1])}, or {hints[-1]}{held}")
