"""A SQLite file is looked through before anything is written to it: what is damaged, or not ours, is left as it is."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from optuna.storages._rdb.models import BaseModel
from sqlalchemy.engine import make_url

from autotune.errors import UserError
from autotune.search.storage_url import shown_url
from autotune.search.tables import TABLES

__all__ = ["require_usable", "sqlite_path"]

_LOCK_S = 60
_NOT_DAMAGE = ("locked", "busy", "unable to open", "readonly")
_MOST_NAMED = 5
# Of a SQLite file: bytes 18 and 19 of its header are 2 where it has a write-ahead log.
_WRITE_AHEAD = b"\x02\x02"

# Table -> columns of its primary key, which no version of Optuna or of ours lacks.
_OWN = {
    table.name: {column.name for column in table.primary_key}
    for table in (*BaseModel.metadata.tables.values(), *TABLES)
} | {"alembic_version": {"version_num"}}


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for another database, or a name that only SQLite itself can read."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database.startswith("file:"):
        return None
    return Path(parsed.database)


def require_usable(url: str) -> None:
    """Look a SQLite file through by reading alone; one that is not there, and another database, pass.

    Raises:
        UserError: it is no database, damaged, or holds tables of other software; the message names what is there.
    """
    path = sqlite_path(url)
    if path is None or not path.exists():
        return
    if not path.is_file():
        raise UserError(f"cannot use {shown_url(url)}: {path} is no file")
    try:
        _require_ours(_tables_in(path), url)
        with closing(_connect(path)) as database:
            found = [str(row[0]) for row in database.execute("PRAGMA quick_check(1)")]
    except OSError:
        return  # as below
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in _NOT_DAMAGE):
            return  # opening it for good will tell
        raise UserError(f"cannot use {shown_url(url)}: {error}; it is damaged and is left as it is") from None
    if found != ["ok"]:
        raise UserError(f"cannot use {shown_url(url)}: it is damaged and is left as it is: {found[0].splitlines()[-1]}")


def _tables_in(path: Path) -> dict[str, set[str]]:
    """Names of the tables and views in a file, with their columns."""
    try:
        return _read_tables(path, leave_no_log=True)
    except sqlite3.DatabaseError:  # another search began to write to it in this moment, perhaps
        return _read_tables(path, leave_no_log=False)


def _read_tables(path: Path, leave_no_log: bool) -> dict[str, set[str]]:
    with closing(_connect(path, leave_no_log)) as database:
        listed = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        names = [str(row[0]) for row in listed if not str(row[0]).startswith("sqlite_")]
        columns = "SELECT name FROM pragma_table_info(?)"
        return {name: {str(row[0]) for row in database.execute(columns, (name,))} for name in names}


def _require_ours(tables: dict[str, set[str]], url: str) -> None:
    foreign = [name for name, columns in tables.items() if not _OWN.get(name, {""}) <= columns]
    impostors = [name for name in foreign if name in _OWN]
    # Tables of other software beside a study of Optuna's are no reason to refuse that study.
    if impostors or (foreign and len(foreign) == len(tables)):
        raise UserError(
            f"cannot use {shown_url(url)}: it is a database of other software ({_listed(impostors or foreign)}) and is "
            "left as it is; give a study a file of its own, which need not be there yet"
        )


def _listed(names: Collection[str]) -> str:
    shown = [repr(name) for name in sorted(names)]
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    return f"table{'s' if len(shown) > 1 else ''} {', '.join(shown[:_MOST_NAMED])}{more}"


def _connect(path: Path, leave_no_log: bool = False) -> sqlite3.Connection:
    """Open for reading. That makes a write-ahead log where there was one, unless it is read as a file of no changes."""
    with path.open("rb") as file:
        is_logged = file.read(20)[18:] == _WRITE_AHEAD
    still = leave_no_log and is_logged and not path.with_name(path.name + "-wal").exists()
    mode = "immutable=1" if still else "mode=ro"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=_LOCK_S)
