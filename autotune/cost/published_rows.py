"""Rows of the CSV files of measured runs, whose cells tell their file, line and column when they are wrong."""

from __future__ import annotations

import csv
import math
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

from autotune.errors import UserError

__all__ = ["PublishedRow", "read_rows"]

T = TypeVar("T")


@dataclass(frozen=True)
class PublishedRow:
    """One row.

    Attributes:
        place: file and line, for messages.
        cells: column -> text.
    """

    place: str
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """The text of a cell, empty if it is."""
        if column not in self.cells:
            raise UserError(f"{self.place}: there is no column {column}; there are {', '.join(self.cells)}")
        return self.cells[column]

    def __getitem__(self, column: str) -> str:
        return self.text(column)

    def integer(self, column: str, least: int = 1) -> int:
        """A whole number."""
        return self._number(column, int, f"a whole number of at least {least}", lambda value: value >= least)

    def number(self, column: str) -> float:
        """A finite number that isn't negative."""
        return self._number(column, float, "a finite number of at least 0", lambda value: 0 <= value < math.inf)

    def positive(self, column: str) -> float | None:
        """A finite number above 0; None for an empty cell."""
        if not self.text(column):
            return None
        return self._number(column, float, "a finite number above 0", lambda value: 0 < value < math.inf)

    def word(self, column: str, legal: Sequence[str]) -> str:
        """One of the legal words."""
        if (text := self.text(column)) not in legal:
            raise self.wrong(column, f"must be one of {', '.join(sorted(legal))}, not {reprlib.repr(text)}")
        return text

    def wrong(self, column: str, problem: str) -> UserError:
        """The error of a cell."""
        return UserError(f"{self.place}, column {column}: {problem}")

    @contextmanager
    def blamed(self, column: str) -> Iterator[None]:
        """What is wrong with the text of a cell is told with its place."""
        try:
            yield
        except UserError as error:
            raise self.wrong(column, str(error)) from None

    def _number(self, column: str, kind: Callable[[str], T], what: str, holds: Callable[[T], bool]) -> T:
        text = self.text(column)
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = None
        if value is None or not holds(value):
            raise self.wrong(column, f"must be {what}, not {reprlib.repr(text)}")
        return value


def read_rows(name: str, folder: Path | None = None) -> list[PublishedRow]:
    """The rows of one CSV file; lines that begin with # are comments.

    Args:
        folder: None: the package's own data.

    Raises:
        UserError: the folder has no such file, or it is no CSV table.
    """
    if folder is None:
        shown, text = name, resources.files("autotune.cost").joinpath(f"data/{name}").read_text(encoding="utf-8")
    else:
        path = folder / name
        shown = str(path)
        if not path.is_file():
            raise UserError(f"{path} is missing: a folder of runs holds tables.csv, models.csv and runs.csv")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not a UTF-8 text file: {error.reason} at byte {error.start}") from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
    return list(_rows(text, shown))


def _rows(text: str, shown: str) -> Iterator[PublishedRow]:
    # Comments and empty lines stay as empty ones, so that lines are counted as an editor counts them.
    lines = ["" if line.startswith("#") else line for line in text.splitlines()]
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    try:
        for fields in reader:
            place = f"{shown}, line {reader.line_num}"
            if not fields:
                continue
            if header is None:
                header = fields
                if twice := [name for name in header if header.count(name) > 1]:
                    raise UserError(f"{place}: column {twice[0]!r} stands there twice")
            elif len(fields) != len(header):
                raise UserError(f"{place}: {len(fields)} cells, but the header has {len(header)} columns")
            else:
                yield PublishedRow(place, dict(zip(header, fields, strict=True)))
    except csv.Error as error:
        raise UserError(f"{shown}, line {reader.line_num}: no CSV: {error}") from None
    if header is None:
        raise UserError(f"{shown} is empty")
