"""Files of one's own runs: whatever stands in them, the mistake is told by file, line and column."""

from __future__ import annotations

import csv
import shutil
from importlib import resources
from pathlib import Path

import pytest

from autotune.cost.published import load_tables
from autotune.errors import UserError

NAMES = ("tables.csv", "models.csv", "runs.csv", "pass_times.csv")
TEXTS = ("", "x", "-1", "0", "1.5", "nan", "1e999", "9" * 30, "a=b;c", 'half "quoted', "\x00")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        with resources.as_file(resources.files("autotune.cost").joinpath(f"data/{name}")) as path:
            shutil.copy(path, tmp_path / name)
    return tmp_path


def table_of(path: Path) -> tuple[list[str], int]:
    """Its lines, and the number (from 0) of the header."""
    lines = path.read_text().splitlines()
    return lines, next(number for number, line in enumerate(lines) if not line.startswith("#"))


def with_cell(path: Path, column: str, text: str) -> int:
    """Put `text` into a column of the first row; the line (from 1) it stands on."""
    lines, head = table_of(path)
    header, row = (next(csv.reader([line])) for line in lines[head : head + 2])
    row[header.index(column)] = text
    out = path.with_suffix(".new")
    with open(out, "w", newline="") as file:
        csv.writer(file).writerow(row)
    lines[head + 1] = out.read_text().rstrip("\r\n")
    path.write_text("\n".join(lines) + "\n")
    return head + 2


@pytest.mark.parametrize(
    ("name", "column", "text", "told"),
    [
        ("runs.csv", "tp", "two", "must be a whole number of at least 1, not 'two'"),
        ("runs.csv", "step_time_s", "nan", "must be a finite number above 0, not 'nan'"),
        ("runs.csv", "schedule", "1f2b", "must be one of "),
        ("runs.csv", "model", "mine", "must be one of "),
        ("runs.csv", "table", "mine", "must be one of "),
        ("runs.csv", "recompute", "some", "must be one of full, none, selective, not 'some'"),
        ("runs.csv", "assumptions", "attention=none", "attention must be one of"),
        ("runs.csv", "pp", "4000", "4000 devices with 1 stages each need 3998 layers"),
        ("models.csv", "heads", "5", "5 doesn't divide"),
        ("models.csv", "style", "bert", "must be one of gpt, llama, not 'bert'"),
        ("tables.csv", "device", "abacus", "no figures for device 'abacus'"),
        ("tables.csv", "stack", "mine", "no stack 'mine'"),
        ("tables.csv", "intra_bandwidth", "", "is empty"),
        ("tables.csv", "memory_unit", "kB", "must be one of GB, GiB, not 'kB'"),
        ("tables.csv", "fitted", "luck", "no machine number 'luck'; known: "),
        ("pass_times.csv", "forward_ms", "-3", "must be a finite number of at least 0, not '-3'"),
    ],
)
def test_wrong_cell_is_told_by_file_line_and_column(folder: Path, name: str, column: str, text: str, told: str) -> None:
    line = with_cell(folder / name, column, text)
    with pytest.raises(UserError) as caught:
        load_tables(folder)
    assert f"{folder / name}, line {line}, column {column}: " in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_in_a_cell_is_more_than_a_mistake(folder: Path, name: str) -> None:
    whole = (folder / name).read_text()
    lines, head = table_of(folder / name)
    for column in lines[head].split(","):
        for text in TEXTS:
            with_cell(folder / name, column, text)
            try:
                load_tables(folder)
            except UserError as error:
                assert "line " in str(error)  # noqa: PT017
            (folder / name).write_text(whole)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: "", "is empty"),
        (lambda text: text.replace(",tp,", ",tp,tp,"), "column 'tp' stands there twice"),
        (lambda text: text.replace(",tp,", ",width,"), "there is no column tp; there are table, model, width"),
        (lambda text: text + "a,b\n", "2 cells, but the header has 14 columns"),
        (lambda text: text + 'a,"b', "no CSV"),
    ],
)
def test_file_that_is_no_table_is_told(folder: Path, damage, told: str) -> None:  # type: ignore[no-untyped-def]
    path = folder / "runs.csv"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError) as caught:
        load_tables(folder)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_file_that_is_no_text_is_told(folder: Path) -> None:
    (folder / "models.csv").write_bytes(b"model,style\n\xff\xfe\n")
    with pytest.raises(UserError, match=r"models\.csv: not a UTF-8 text file"):
        load_tables(folder)
