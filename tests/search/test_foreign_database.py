"""A database of other software is told by what is in it, and not a byte of it changes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from conftest import Bench, Notes

from autotune.errors import UserError
from autotune.search.sqlite_file import require_usable


def database(path: Path, *statements: str) -> dict[str, bytes]:
    """Make a SQLite file; the files that are there then, with what is in them."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return contents(path.parent)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        (("CREATE TABLE studies (a)",), "table 'studies'"),
        (("CREATE TABLE customers (a)", "CREATE VIEW orders AS SELECT 1"), "tables 'customers', 'orders'"),
        (("PRAGMA journal_mode=WAL", "CREATE TABLE customers (a)"), "table 'customers'"),
        (("CREATE TABLE version_info (version_info_id)", "CREATE TABLE trials (a)"), "table 'trials'"),
    ],
)
@pytest.mark.parametrize("start", [{}, {"resume": True}, {"fresh": True}])
def test_a_database_of_other_software_is_refused_and_left_as_it_is(
    bench: Bench, statements: tuple[str, ...], named: str, start: dict[str, bool]
) -> None:
    file = bench.path / "mine.db"
    before = database(file, *statements)
    with pytest.raises(UserError, match=f"mine.db: it is a database of other software .{named}. and is left as it is"):
        bench.here(storage=f"sqlite:///{file}", **start)
    assert contents(bench.path) == before
    assert not bench.study.exists()


def test_a_results_folder_with_a_foreign_database_is_left_as_it_is(bench: Bench) -> None:
    bench.study.mkdir(parents=True)
    before = database(bench.study / "study.db", "CREATE TABLE customers (a)")
    with pytest.raises(UserError, match="'customers'"):
        bench.here(resume=True)
    assert contents(bench.study) == {name: data for name, data in before.items() if "study.db" in name}


def test_an_empty_database_of_a_folder_is_no_study_to_go_on_with(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.search.search._BIRTH_S", 0.0)
    bench.study.mkdir(parents=True)
    (bench.study / "study.db").touch()
    with pytest.raises(UserError, match=r"study\.db is empty.*--fresh"):
        bench.here(resume=True)
    assert contents(bench.study) == {str(bench.study / "study.db"): b""}


def test_files_that_are_not_there_empty_or_of_optuna_can_be_used(tmp_path: Path) -> None:
    require_usable(f"sqlite:///{tmp_path / 'new.db'}")
    assert not (tmp_path / "new.db").exists()
    (tmp_path / "empty.db").touch()
    require_usable(f"sqlite:///{tmp_path / 'empty.db'}")
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    optuna.create_study(storage=url)
    database(tmp_path / "optuna.db", "CREATE TABLE notes (a)")  # beside a study everybody may keep their own
    require_usable(url)


def test_a_new_study_is_announced_once_its_database_is_reached(bench: Bench) -> None:
    notes = Notes()
    with pytest.raises(UserError, match="cannot use"):
        bench.here(notes, resume=True, storage="sqlite:////no/such/folder/x.db")
    assert "starting a new one" not in notes
    bench.here(notes, resume=True, trials=1)
    assert f"no study 'tiny' in {bench.study} to go on with; starting a new one" in notes


def test_results_whose_study_is_in_another_database_are_told_in_whole_sentences(bench: Bench) -> None:
    bench.here(trials=1)
    url = f"sqlite:///{bench.path / 'other.db'}"
    optuna.create_study(storage=url, study_name="another")
    with pytest.raises(UserError, match="holds the studies 'another', but not 'tiny', so the results that are in"):
        bench.here(resume=True, storage=url)
    optuna.delete_study(storage=url, study_name="another")
    with pytest.raises(UserError, match="holds no study 'tiny', so the results that are in"):
        bench.here(resume=True, storage=url)
