"""Where the `schedule` commands write, and in which format: one that is given, or the one a file's ending names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import typer

from autotune.errors import UserError

__all__ = ["Format", "check_file", "choose_format", "emit"]


class Format(StrEnum):
    """How a schedule is printed."""

    text = "text"
    json = "json"
    svg = "svg"
    csv = "csv"
    chrome = "chrome"


_ENDINGS = {
    Format.text: ".txt",
    Format.json: ".json",
    Format.svg: ".svg",
    Format.csv: ".csv",
    Format.chrome: ".json",
}


def choose_format(given: Format | None, out: Path | None, possible: Iterable[Format] = Format) -> Format:
    """The format of the output: `given`, else the one that the ending of `out` names, else text.

    Args:
        possible: formats that the command prints here.

    Raises:
        UserError: the file ends as another format's do, or as none's; or the format isn't possible.
    """
    ending = "" if out is None else out.suffix.lower()
    named = [kind for kind, known in _ENDINGS.items() if known == ending]
    if given is not None and named and given not in named:
        raise UserError(f"--format {given.value} and --out {out} contradict each other: {ending} is {named[0].value}")
    if given is None and ending and not named:
        endings = ", ".join(dict.fromkeys(_ENDINGS.values()))
        raise UserError(f"--out {out}: no format is known by the ending {ending!r}; give --format, or one of {endings}")
    chosen = given or (named[0] if named else Format.text)
    names = [kind.value for kind in possible]
    if chosen.value not in names:
        raise UserError(f"this can be printed as {', '.join(names[:-1])} or {names[-1]}, not {chosen.value}")
    return chosen


def check_file(out: Path | None) -> None:
    """Refuse a file that can't be written before anything is worked out for it.

    Raises:
        UserError: it is a folder, or its folder is not there.
    """
    if out is None:
        return
    if out.is_dir():
        raise UserError(f"can't write {out}: it is a folder")
    if not out.parent.is_dir():
        raise UserError(f"can't write {out}: there is no folder {out.parent}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(f"can't write {out}: permission denied")


def emit(text: str, out: Path | None) -> None:
    """Print the text, or write it to `out` and say so.

    Raises:
        UserError: the file can't be written.
    """
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"can't write {out}: {error.strerror or error}") from error
    typer.echo(f"wrote {out}")
