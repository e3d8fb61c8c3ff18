"""The database of a study: opened once, patient with locks and restarts, its errors told in words.

SQLite serves many tuners of one machine, PostgreSQL and MySQL those of several. Every operation goes through
`Database.run`, which repeats it while the database is busy or away; so an operation must be one that can be repeated.
"""

from __future__ import annotations

import importlib.util
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import optuna
from optuna.storages import RDBStorage
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from autotune.errors import UserError
from autotune.search.sqlite_file import require_usable
from autotune.search.storage_url import check_url, shown_url, without_secrets

__all__ = ["Database"]

T = TypeVar("T")

_WAIT_S = 60.0
"""How long a database that went away is waited for."""
_WAIT_AT_AN_END_S = 5.0
_LOCK_S = 60
_CONNECT_S = 10
# Tuners that start at once create the tables at once; all but one fail at it, and find them there the next time.
_ATTEMPTS_TO_OPEN = 12
_FIRST_NAP_S, _LONGEST_NAP_S = 0.1, 2.0
_SAY_AFTER_S = 1.0

# URL of SQLAlchemy -> (driver, module, extra of this package), where the driver isn't named in the URL.
_DRIVERS = {"postgresql": ("psycopg", "psycopg", "postgresql"), "mysql": ("pymysql", "pymysql", "mysql")}
_OTHER_DRIVERS = {"postgresql": "psycopg2", "mysql": "MySQLdb"}


class Database:
    """A study's database.

    Args:
        url: for SQLAlchemy, such as `sqlite:///study.db` or `postgresql://user:password@host/database`.
        note: told, once for each time, that the database is away and waited for.
        give_up: whether the search is about to end: then it is waited for only a moment.
        wait_s: how long a database that went away is waited for. At the start none is: its URL may be wrong.

    Raises:
        UserError: it can't be opened, is damaged, or its driver is missing; no message holds a password.
    """

    def __init__(
        self,
        url: str,
        note: Callable[[str], None] = lambda text: None,
        give_up: Callable[[], bool] = lambda: False,
        wait_s: float = _WAIT_S,
    ) -> None:
        check_url(url)
        self._url, self._note, self._give_up, self._wait_s = url, note, give_up, wait_s
        self._is_away = False
        self.shown = shown_url(url)
        require_usable(url)
        self.storage = self._open(_with_driver(url))

    @property
    def engine(self) -> Engine:
        """Of SQLAlchemy."""
        return self.storage.engine

    def run(self, operation: Callable[[], T]) -> T:
        """The result of `operation`, repeated while the database is locked or away.

        Raises:
            UserError: the database can't be used, or stayed away for `wait_s`.
        """
        began: float | None = None
        said, nap_s = False, _FIRST_NAP_S
        while True:
            try:
                result = operation()
                self._is_away = False
                return result
            except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
                message = self._message(error)
                if not _passes(error):
                    raise UserError(message) from None
            except (ValueError, LookupError, TypeError, AttributeError) as error:  # a text that is no JSON, no state
                raise UserError(f"{self.shown} holds what no search wrote; it may be damaged: {error!r}") from None
            began = time.monotonic() if began is None else began
            waited_s = time.monotonic() - began
            # Waited for in vain once, it gets one try more for what is left to be tidied up.
            if self._is_away or waited_s >= (_WAIT_AT_AN_END_S if self._give_up() else self._wait_s):
                self._is_away = True
                raise UserError(f"{message}; waited {waited_s:.0f} s for it; nothing is lost, --resume goes on")
            if not said and waited_s >= _SAY_AFTER_S:
                said = True
                self._note(f"{message}; waiting up to {self._wait_s:.0f} s for it")
            time.sleep(nap_s * random.uniform(0.5, 1.0))
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One transaction of plain statements, for use within `run`."""
        with self.engine.begin() as connection:
            yield connection

    def close(self) -> None:
        """Let go of every connection: the last one of SQLite folds its write-ahead log into the file."""
        with suppress(SQLAlchemyError):
            self.storage.scoped_session.remove()
            self.engine.dispose()

    def prepare(self, create: Callable[[Engine], object]) -> None:
        """Let `create` make tables, though other tuners may be making the same ones."""
        self._repeated(lambda: create(self.engine))

    def _open(self, url: str) -> RDBStorage:
        return self._repeated(lambda: _storage(url))

    def _repeated(self, operation: Callable[[], T]) -> T:
        for attempt in range(_ATTEMPTS_TO_OPEN):
            try:
                return operation()
            except ImportError:
                raise UserError(_missing_driver(self._url)) from None
            except (optuna.exceptions.StorageInternalError, SQLAlchemyError, AssertionError) as error:
                if attempt == _ATTEMPTS_TO_OPEN - 1 or not _is_of_a_race(error):
                    raise UserError(self._message(error)) from None
            except RuntimeError as error:  # Optuna: tables of another version
                raise UserError(f"cannot use {self.shown}: {str(error).splitlines()[0]}") from None
            time.sleep(random.uniform(0.0, 0.2) * (attempt + 1))
        raise AssertionError("the last attempt returns or raises")

    def _message(self, error: BaseException) -> str:
        # No cause is chained: what a driver says of the connection may hold the password.
        return without_secrets(f"cannot use {self.shown}: {_root(error)}", self._url)


def _storage(url: str) -> RDBStorage:
    parsed = make_url(url)
    options: dict[str, Any] = {}
    if parsed.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": _LOCK_S}
    else:
        options["pool_pre_ping"] = True  # a connection from before a restart is replaced unseen
        if parsed.get_driver_name() in ("psycopg", "psycopg2", "pymysql"):
            options["connect_args"] = {"connect_timeout": _CONNECT_S}
    storage = RDBStorage(url, engine_kwargs=options)
    if parsed.get_backend_name() == "sqlite":
        event.listen(storage.engine, "connect", _write_ahead)
        storage.engine.dispose()  # connections that were opened without it
    return storage


def _write_ahead(connection: Any, record: object) -> None:
    """Readers and a writer don't wait for each other; where a file system can't do it, they do."""
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA journal_mode=WAL")


def _with_driver(url: str) -> str:
    """The URL with the driver that is installed, where it names none."""
    parsed = make_url(url)
    if parsed.drivername not in _DRIVERS:
        return url
    driver, module, _ = _DRIVERS[parsed.drivername]
    if importlib.util.find_spec(module) is None:
        other = _OTHER_DRIVERS[parsed.drivername]
        if importlib.util.find_spec(other) is None:
            raise UserError(_missing_driver(url))
        driver = other.lower()
    return parsed.set(drivername=f"{parsed.drivername}+{driver}").render_as_string(hide_password=False)


def _missing_driver(url: str) -> str:
    backend = make_url(url).get_backend_name()
    known = _DRIVERS.get(backend)
    if known is None:
        return f"--storage: there is no driver for {shown_url(url)}; sqlite, postgresql and mysql can be used"
    return f"cannot use {shown_url(url)}: its driver is not installed; pip install 'autotune[{known[2]}]' does"


def _passes(error: BaseException) -> bool:
    """Whether the trouble may go by itself: a lock, a deadlock, a server that restarts."""
    driver = next((one for one in _chain(error) if isinstance(one, SQLAlchemyError)), None)
    if isinstance(driver, PoolTimeout):
        return True
    if not isinstance(driver, DBAPIError):
        return False
    if isinstance(driver.orig, sqlite3.Error):
        return "locked" in str(driver.orig) or "busy" in str(driver.orig)
    return driver.connection_invalidated or isinstance(driver, (OperationalError, InterfaceError))


def _is_of_a_race(error: BaseException) -> bool:
    """Whether another tuner that created the same tables may have caused it."""
    return any(
        isinstance(one, (IntegrityError, AssertionError))
        or (isinstance(one, DBAPIError) and ("exist" in str(one.orig) or "locked" in str(one.orig)))
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    original = getattr(error, "orig", None) or error
    return str(original).splitlines()[0] if str(original) else type(original).__name__
