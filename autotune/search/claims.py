"""Which tuner measures which plan: tables of our own beside those of Optuna.

A plan has at most one claim. It begins as `held` by a tuner and ends as `done`, with the one trial that counts, or as
`launcher`: the launches failed for reasons outside of the plan, so another tuner, or a resume, may claim it again. A
claim that is `done` is taken again only in place of its trial; that trial counts until there is another.

Every change is made in a transaction that first raises a counter in the row of the study. That makes all changes of one
study come one after the other, on every database, so that what a transaction counts stays true until its end. All
operations can be repeated: of one that was cut short nobody knows whether it took place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from sqlalchemy import delete, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from autotune.errors import UserError
from autotune.search.database import Database
from autotune.search.tables import CLAIMS, FINALS, STUDIES, TUNERS
from autotune.search.tuners import Tuner

__all__ = ["Claim", "ClaimState", "Claims", "StudyRow"]

ClaimState = Literal["held", "done", "launcher"]


@dataclass(frozen=True)
class StudyRow:
    """What the tables say of a study.

    Attributes:
        mark: of this study alone; on its processes.
        identity: of `autotune.search.identity`.
    """

    mark: str
    identity: dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """Of one plan. `trial` is the trial that counts, once there is one; while held, the one that is to be replaced."""

    fingerprint: str
    owner: str
    state: ClaimState
    trial: int | None


class Claims:
    """The claims and tuners of one study, as one tuner sees and makes them.

    Args:
        study: number of the study in Optuna's tables.
        me: this tuner; `join` makes it known.
    """

    def __init__(self, database: Database, study: int, me: Tuner) -> None:
        self._database, self._study, self.me = database, study, me

    def begin_study(self, row: StudyRow) -> StudyRow:
        """Make the study known with `row`, unless it is; the row that holds."""

        def operation() -> StudyRow:
            values = {"study": self._study, "mark": row.mark, "identity": json.dumps(row.identity), "turn": 0}
            try:
                with self._database.transaction() as connection:
                    connection.execute(insert(STUDIES).values(values))
            except IntegrityError:
                pass  # somebody else was first
            held = self.study_row()
            assert held is not None
            return held

        return self._database.run(operation)

    def study_row(self) -> StudyRow | None:
        """What is known of the study; None before `begin_study`."""

        def operation() -> StudyRow | None:
            with self._database.transaction() as connection:
                found = connection.execute(
                    select(STUDIES.c.mark, STUDIES.c.identity).where(STUDIES.c.study == self._study)
                ).first()
            return None if found is None else StudyRow(found.mark, json.loads(found.identity))

        return self._database.run(operation)

    def forget_study(self, mark: str) -> None:
        """Delete all that is known of the study, if it still has this mark."""

        def operation() -> None:
            with self._database.transaction() as connection:
                row = (STUDIES.c.study == self._study, STUDIES.c.mark == mark)
                if connection.execute(update(STUDIES).where(*row).values(turn=STUDIES.c.turn + 1)).rowcount == 1:
                    for table in (FINALS, CLAIMS, TUNERS, STUDIES):
                        connection.execute(delete(table).where(table.c.study == self._study))

        self._database.run(operation)

    def set_identity(self, identity: Mapping[str, Any], dead: Collection[str]) -> bool:
        """Replace the study's identity, unless tuners other than the `dead` ones are known; whether it was."""

        def change(connection: Connection) -> bool:
            if any(tuner.key not in dead for tuner in self._tuners(connection)):
                return False
            rows = update(STUDIES).where(STUDIES.c.study == self._study)
            connection.execute(rows.values(identity=json.dumps(dict(identity))))
            return True

        return self._changed(change)

    def join(self, identity: Mapping[str, Any] | None = None) -> None:
        """Make this tuner known.

        Args:
            identity: what the study must still be about; None: whatever it is.

        Raises:
            UserError: another tuner changed what the study is about since it was looked at.
        """

        def change(connection: Connection) -> None:
            stored = connection.execute(select(STUDIES.c.identity).where(STUDIES.c.study == self._study)).scalar_one()
            if identity is not None and json.loads(stored) != json.loads(json.dumps(dict(identity))):
                raise UserError(
                    "another search changed what this study searches in this moment; start this one again to see what"
                )
            connection.execute(delete(TUNERS).where(TUNERS.c.key == self.me.key))
            connection.execute(insert(TUNERS).values(study=self._study, **asdict(self.me)))

        self._changed(change)

    def rejoin(self, key: str, identity: Mapping[str, Any] | None = None) -> None:
        """Come back under a new key, after others took this tuner for dead; what `join` takes and raises."""
        self.me = replace(self.me, key=key)
        self.join(identity)

    def leave(self) -> None:
        """End: this tuner's claims that have no outcome are free again."""

        def change(connection: Connection) -> None:
            self._drop(connection, self.me.key)
            connection.execute(delete(TUNERS).where(TUNERS.c.key == self.me.key))

        self._changed(change)

    def beat(self) -> bool:
        """Raise this tuner's number; False if others took it for dead. One try: raises what the database raises."""
        with self._database.transaction() as connection:
            mine = update(TUNERS).where(TUNERS.c.key == self.me.key)
            return connection.execute(mine.values(beat=TUNERS.c.beat + 1)).rowcount == 1

    def tuners(self) -> list[Tuner]:
        """All that are known, this one included."""

        def operation() -> list[Tuner]:
            with self._database.transaction() as connection:
                return self._tuners(connection)

        return self._database.run(operation)

    def all(self) -> dict[str, Claim]:
        """Every claim, by the plan's fingerprint."""

        def operation() -> dict[str, Claim]:
            with self._database.transaction() as connection:
                return self._all(connection)

        return self._database.run(operation)

    def take(self, fingerprint: str, may: Callable[[Mapping[str, Claim]], bool], instead_of: int | None = None) -> bool:
        """Claim a plan; False if somebody has it, if it is done, if `may` says no, or others took this tuner for dead.

        Args:
            may: decides from all claims before this one; they don't change meanwhile.
            instead_of: a trial: while it is the one that counts, the plan may be claimed though it is done.
        """

        def change(connection: Connection) -> bool:
            claims = self._all(connection)
            held = claims.get(fingerprint)
            if held is not None and held.state == "held":
                return held.owner == self.me.key
            before = held.trial if held is not None and held.state == "done" else None
            if (before is not None and before != instead_of) or not may(claims):
                return False
            if all(tuner.key != self.me.key for tuner in self._tuners(connection)):
                return False  # a claim of a tuner that nobody knows would never be freed
            connection.execute(delete(CLAIMS).where(*self._of(fingerprint)))
            values = {"study": self._study, "fingerprint": fingerprint, "owner": self.me.key}
            connection.execute(insert(CLAIMS).values(**values, state="held", trial=before))
            return True

        return self._changed(change)

    def settle(self, fingerprint: str, trial: int, state: ClaimState) -> bool:
        """End this tuner's claim by a trial; False if the claim is no longer its own: then the trial doesn't count."""

        def change(connection: Connection) -> bool:
            held = self._all(connection).get(fingerprint)
            if held is None or held.owner != self.me.key:
                return False
            if held.state == "held":
                mine = update(CLAIMS).where(*self._of(fingerprint))
                connection.execute(mine.values(state=state, trial=trial))
                return True
            return held.trial == trial

        return self._changed(change)

    def while_mine(self, fingerprint: str, write: Callable[[Connection], None]) -> bool:
        """Let `write` write, in one transaction with the proof that this tuner holds the claim; False if it doesn't."""

        def change(connection: Connection) -> bool:
            held = self._all(connection).get(fingerprint)
            if held is None or held.owner != self.me.key or held.state != "held":
                return False
            write(connection)
            return True

        return self._changed(change)

    def drop(self, fingerprint: str) -> None:
        """Give up this tuner's claim of a plan without an outcome."""

        def change(connection: Connection) -> None:
            self._drop(connection, self.me.key, fingerprint)

        self._changed(change)

    def bury(self, tuner: Tuner, outcomes: Mapping[str, int]) -> list[str] | None:
        """Free what a dead tuner held; the fingerprints. None if it moved meanwhile, or somebody else buried it.

        Args:
            tuner: as it was seen: a beat since then proves that it lives.
            outcomes: plans it had finished, though its claim doesn't say so yet, with their trials: these count.
        """

        def change(connection: Connection) -> list[str] | None:
            dead = delete(TUNERS).where(TUNERS.c.key == tuner.key, TUNERS.c.beat == tuner.beat)
            if connection.execute(dead).rowcount != 1:
                return None
            return self._free(connection, tuner.key, outcomes)

        return self._changed(change)

    def bury_unknown(self, owner: str, outcomes: Mapping[str, int]) -> list[str] | None:
        """Free what is held in the name of a tuner that nobody knows; the fingerprints. None if it is known by now.

        No change leaves such a claim, but a database that was repaired, copied or edited by hand may hold one.
        """

        def change(connection: Connection) -> list[str] | None:
            if any(tuner.key == owner for tuner in self._tuners(connection)):
                return None
            return self._free(connection, owner, outcomes)

        return self._changed(change)

    def adopt(self, outcomes: Mapping[str, int]) -> None:
        """Claims for finished trials that have none, and none for plans of tuners that no longer are.

        Nothing happens while another tuner is known: what it holds is its own.

        Args:
            outcomes: the first finished trial of every plan.
        """

        def change(connection: Connection) -> None:
            known = {tuner.key for tuner in self._tuners(connection)}
            if known - {self.me.key}:
                return
            claims = self._all(connection)
            gone = {claim.owner for claim in claims.values() if claim.state == "held"} - known
            lost = {fingerprint for owner in gone for fingerprint in self._drop(connection, owner)}
            for fingerprint, trial in outcomes.items():
                if fingerprint not in claims or fingerprint in lost:
                    values = {"study": self._study, "fingerprint": fingerprint, "owner": "", "trial": trial}
                    connection.execute(insert(CLAIMS).values(**values, state="done"))

        self._changed(change)

    def _changed(self, change: Callable[[Connection], Any]) -> Any:
        def operation() -> Any:
            with self._turn() as connection:
                return change(connection)

        return self._database.run(operation)

    @contextmanager
    def _turn(self) -> Iterator[Connection]:
        """A transaction while which no other tuner changes the claims of this study."""
        with self._database.transaction() as connection:
            row = update(STUDIES).where(STUDIES.c.study == self._study)
            if connection.execute(row.values(turn=STUDIES.c.turn + 1)).rowcount != 1:
                raise UserError(f"the study was deleted from {self._database.shown} while this search was at it")
            yield connection

    def _of(self, fingerprint: str) -> tuple[Any, Any]:
        return CLAIMS.c.study == self._study, CLAIMS.c.fingerprint == fingerprint

    def _all(self, connection: Connection) -> dict[str, Claim]:
        columns = (CLAIMS.c.fingerprint, CLAIMS.c.owner, CLAIMS.c.state, CLAIMS.c.trial)
        rows = connection.execute(select(*columns).where(CLAIMS.c.study == self._study))
        return {row.fingerprint: Claim(row.fingerprint, row.owner, row.state, row.trial) for row in rows}

    def _tuners(self, connection: Connection) -> list[Tuner]:
        rows = connection.execute(select(TUNERS).where(TUNERS.c.study == self._study))
        return [Tuner(r.key, r.host, r.place, r.pid, r.created, r.devices, r.beat) for r in rows]

    def _free(self, connection: Connection, owner: str, outcomes: Mapping[str, int]) -> list[str]:
        """End the claims of a tuner that is no more: by its outcomes, or else they are dropped."""
        for fingerprint, trial in outcomes.items():
            its = (CLAIMS.c.owner == owner, CLAIMS.c.state == "held")
            done = update(CLAIMS).where(*self._of(fingerprint), *its)
            connection.execute(done.values(state="done", trial=trial))
        return self._drop(connection, owner)

    def _drop(self, connection: Connection, owner: str, fingerprint: str | None = None) -> list[str]:
        """Give up what a tuner holds, or one plan of it; those that nothing is known of now."""
        its = [CLAIMS.c.study == self._study, CLAIMS.c.owner == owner, CLAIMS.c.state == "held"]
        if fingerprint is not None:
            its.append(CLAIMS.c.fingerprint == fingerprint)
        # The trial that was to be replaced counts on.
        connection.execute(update(CLAIMS).where(*its, CLAIMS.c.trial.is_not(None)).values(state="done"))
        dropped = list(connection.execute(select(CLAIMS.c.fingerprint).where(*its)).scalars())
        connection.execute(delete(CLAIMS).where(*its))
        return dropped
