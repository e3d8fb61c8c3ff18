"""Rows to trials.csv and trials.parquet and back. A file is replaced as a whole, never half written."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autotune.errors import UserError
from autotune.results.checks import problems_of
from autotune.results.columns import COLUMNS, Column, Row

if TYPE_CHECKING:
    import pandas

__all__ = ["read_csv", "read_parquet", "replace_file", "to_frame", "write_csv", "write_parquet"]

_FLAGS = {"true": True, "false": False}
_DTYPES = {"integer": "Int64", "number": "Float64", "text": "string", "flag": "boolean", "integers": "object"}

_TYPE_NAMES = {
    "integer": "a whole number",
    "number": "a number",
    "text": "a text",
    "flag": "true or false",
    "integers": "a list of whole numbers",
}

# A reason may quote a whole traceback; the csv module refuses fields above 128 KiB unless told.
csv.field_size_limit(2**31 - 1)


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write the table; missing values are empty fields. Raises UserError if the file can't be written."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([column.name for column in COLUMNS])
    for row in rows:
        writer.writerow([_to_text(getattr(row, column.name), column) for column in COLUMNS])
    data = text.getvalue().encode("utf-8")
    replace_file(path, lambda file: Path(file).write_bytes(data))


def read_csv(path: Path) -> list[Row]:
    """The rows that `write_csv` wrote.

    Raises:
        UserError: the file is missing, not such a table, or damaged; the message names line and column.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = list(_numbered(file))
    except FileNotFoundError:
        raise UserError(f"there is no results table {path}") from None
    except NotADirectoryError:
        raise UserError(f"{path.parent} is a file; give the folder of the study, {path.parent.parent}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if (problem := _header_problem(lines[0][1] if lines else [])) is not None:
        raise UserError(f"{path} is not a results table of this version: {problem}")
    return [_row_of(fields, f"{path} is damaged: line {number}") for number, fields in lines[1:]]


def _numbered(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """The records of a CSV file, each with the line (from 1) on which it begins: a text may hold line breaks."""
    reader, first = csv.reader(file), 1
    for fields in reader:
        yield first, fields
        first = reader.line_num + 1


def _header_problem(found: list[str]) -> str | None:
    """The first difference of a header from that of the table; None if there is none."""
    if not found:
        return "it is empty"
    wanted = [column.name for column in COLUMNS]
    for number, (name, other) in enumerate(zip_longest(wanted, found), start=1):
        if other is None:
            return f"column {number}, {name}, is missing"
        if name is None:
            return f"column {number}, {other!r}, is unknown"
        if name != other:
            return f"column {number} must be {name}, not {other!r}"
    return None


def _row_of(fields: list[str], where: str) -> Row:
    if len(fields) != len(COLUMNS):
        raise UserError(f"{where} has {len(fields)} fields, not {len(COLUMNS)}")
    values = {}
    for column, text in zip(COLUMNS, fields, strict=True):
        try:
            values[column.name] = _from_text(text, column)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}, column {column.name}: {error}") from None
    row = Row(**values)
    for name, problem in problems_of(row):
        raise UserError(f"{where}, column {name}: {problem}")
    return row


def to_frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """The table as a pandas frame with nullable types: a missing value is NA in every column, never 0 or NaN."""
    import pandas

    columns: dict[str, Any] = {}
    for column in COLUMNS:
        values = [_storable(getattr(row, column.name), column) for row in rows]
        columns[column.name] = pandas.Series(values, dtype=_DTYPES[column.type])
    return pandas.DataFrame(columns)


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write the table with the types of `to_frame`. Raises UserError if the file can't be written."""
    import pyarrow

    types = {
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "text": pyarrow.string(),
        "flag": pyarrow.bool_(),
        "integers": pyarrow.list_(pyarrow.int64()),
    }
    # The types are told, not guessed: a column in which everything is missing keeps its type.
    schema = pyarrow.schema([(column.name, types[column.type]) for column in COLUMNS])
    frame = to_frame(rows)
    replace_file(path, lambda file: frame.to_parquet(file, index=False, schema=schema))


def read_parquet(path: Path) -> list[Row]:
    """The rows that `write_parquet` wrote.

    Raises:
        UserError: the file is missing, not such a table, or damaged; the message names row and column.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # Given a path, pyarrow opens it twice, and a search may have replaced the file in between.
        table = parquet.read_table(pyarrow.BufferReader(path.read_bytes()))
        if (problem := _header_problem(table.column_names)) is not None:
            raise UserError(f"{path} is not a results table of this version: {problem}")
        records = table.to_pylist()
    except FileNotFoundError:
        raise UserError(f"there is no results table {path}") from None
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None
    return [_checked_row(record, f"{path} is damaged: row {number}") for number, record in enumerate(records, 1)]


def _checked_row(record: dict[str, Any], where: str) -> Row:
    """The row of a record with types. Raises UserError."""
    for column in COLUMNS:
        if not _has_type(record[column.name], column):
            told = reprlib.repr(record[column.name])
            raise UserError(f"{where}, column {column.name}: must be {_TYPE_NAMES[column.type]}, not {told}")
    row = Row(**{column.name: _restored(record[column.name], column) for column in COLUMNS})
    for name, problem in problems_of(row):
        raise UserError(f"{where}, column {name}: {problem}")
    return row


def _has_type(value: Any, column: Column) -> bool:
    if value is None:
        return True
    if column.type == "integers":
        return isinstance(value, list) and all(type(item) is int for item in value)
    return type(value) in {"integer": (int,), "number": (float, int), "text": (str,), "flag": (bool,)}[column.type]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def replace_file(path: Path, write: Callable[[str], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in its place in one step.

    Raises:
        UserError: the folder can't be written or the disk is full; what was at `path` is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(str(temporary))
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _to_text(value: Any, column: Column) -> str:
    value = _storable(value, column)
    if value is None:
        return ""
    if column.type == "flag":
        return "true" if value else "false"
    if column.type == "integers":
        return json.dumps(value, separators=(",", ":"))
    return repr(value) if column.type == "number" else str(value)


def _from_text(text: str, column: Column) -> Any:
    if column.type == "text":
        return text
    if text == "":
        return None
    if column.type == "flag":
        if text not in _FLAGS:
            raise ValueError(f"must be true or false, not {reprlib.repr(text)}")
        return _FLAGS[text]
    if column.type == "integers":
        return _integers(text)
    try:
        return int(text) if column.type == "integer" else float(text)
    except ValueError:
        kind = "a whole number" if column.type == "integer" else "a number"
        raise ValueError(f"must be {kind}, not {reprlib.repr(text)}") from None


def _integers(text: str) -> tuple[int, ...]:
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise ValueError(f"must be a JSON list of whole numbers, not {reprlib.repr(text)}")
    return tuple(items)


def _storable(value: Any, column: Column) -> Any:
    """A value as it is stored: None if missing, no NaN or infinity, text that UTF-8 can hold, whole lists."""
    if value is None or value == "":
        return None
    if column.type == "number":
        return float(value) if math.isfinite(value) else None
    if column.type == "text":
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return list(value) if column.type == "integers" else value


def _restored(value: Any, column: Column) -> Any:
    if column.type == "text":
        return "" if value is None else value
    return tuple(value) if column.type == "integers" and value is not None else value
