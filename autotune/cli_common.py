"""What the commands share: exit codes, their explanation, common arguments, JSON output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["CTRL_C", "EPILOG", "NOTHING_FEASIBLE", "USER_MISTAKE", "Json", "SpaceFile", "StudyDir", "print_json"]

NOTHING_FEASIBLE = 1
USER_MISTAKE = 2
CTRL_C = 130

EPILOG = (
    "Exit codes: 0 done; 1 no plan ran within its limits; 2 a mistake in what was given, or a folder or database that "
    "can't be used; 129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM (go on with --resume). 1 is of search, compare and "
    "export; results prints the table of such a study, too, and ends with 0."
)

SpaceFile = Annotated[Path, typer.Argument(metavar="SPACE", help="Space file (YAML); see search_spaces/.")]
StudyDir = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study, such as results/quickstart.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]


def print_json(value: Any) -> None:
    """JSON to standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
