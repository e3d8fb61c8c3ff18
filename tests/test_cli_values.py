"""Every option of every command refuses numbers that are none, and texts and paths that are empty.

The options are read from the command line itself: a new one is tested too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from autotune.cli import app
from autotune.errors import UserError

ROOT = Path(__file__).parents[1]
SPACE = str(ROOT / "search_spaces" / "quickstart.yaml")
STUDY = str(ROOT / "results" / "example")
PIPELINE = ("--devices", "2", "--microbatches", "2")

COMMANDS = {
    "search": ("search", SPACE, "--dry-run"),
    "results": ("results", STUDY),
    "compare": ("compare", STUDY),
    "export": ("export", STUDY, "--to", "torchrun", "--out", "none"),
    "predict": ("predict", SPACE),
    "validate": ("validate",),
    "calibrate": ("calibrate", "--no-links", "--seconds", "0.01"),
    "schedule best": ("schedule", "best", "--quick", *PIPELINE),
    "schedule list": ("schedule", "list"),
    "schedule show": ("schedule", "show", "1f1b", *PIPELINE),
}
NO_NUMBERS = ("nan", "inf", "-inf", "1e400", "-1")
EMPTY_CHANGES_NOTHING = {("search", "--assume"), ("predict", "--assume"), ("predict", "--machine")}
LEGAL = {("schedule best", "--seed", "-1")}


def options(*kinds: type) -> Iterator[tuple[str, str]]:
    """(command, option or argument) of everything whose value is of one of the kinds."""
    for name, command in _commands(get_command(app), ()):
        for parameter in command.params:
            descriptor = getattr(parameter, "type_descriptor", None)
            if descriptor is not None and descriptor.annotation in kinds:
                yield name, parameter.opts[0]


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def told(*arguments: str) -> str:
    """The mistake that a command line is refused for; empty if it isn't."""
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, UserError):  # exit code 2
        return str(result.exception)
    assert result.exit_code == 0, (result.exception, result.output)
    return ""


def test_every_command_is_here() -> None:
    assert [name for name, _ in _commands(get_command(app), ())] == list(COMMANDS)


@pytest.mark.parametrize(("command", "option"), list(options(int, float)))
def test_no_option_takes_a_number_that_is_none(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in NO_NUMBERS:
        refused = told(*COMMANDS[command], f"{option}={value}")
        assert bool(refused) != ((command, option, value) in LEGAL), (value, refused)
        assert "\n" not in refused
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeout", "inf"), "--timeout must be above 0 seconds and finite, not inf; leave it out for no limit"),
        (("--timeout", "1e400"), "--timeout must be above 0 seconds and finite, not inf"),
        (("--device-hours", "inf"), "--device-hours must be above 0 hours and finite, not inf"),
        (("--trial-timeout", "inf"), "finite, not inf; leave it out for the space's trial.timeout_s"),
        (("--hang-timeout", "nan"), "finite, not nan; leave it out for the space's trial.hang_timeout_s"),
        (("--takeover-after", "inf"), "--takeover-after must be at least 1 second and finite, not inf"),
        (("--seed", "-1"), "--seed must be a whole number from 0 to 2147483647, not -1"),
        (("--seed", "99999999999999999999"), "--seed must be a whole number from 0 to 2147483647, not 999999"),
    ],
)
def test_a_limit_without_end_is_told_by_what_is_legal(arguments: tuple[str, ...], message: str) -> None:
    assert message in told(*COMMANDS["search"], *arguments)


@pytest.mark.parametrize(
    ("command", "option", "text"),
    [
        ("schedule best", "--pass-times", "1,{},1"),
        ("schedule show", "--pass-times", "1,{},1"),
        ("schedule best", "--memory-limit", "{}"),
        ("schedule best", "--memory-limit", "4,{}"),
        ("predict", "--machine", "efficiency={}"),
        ("search", "--assume", "dp_overlap={}"),
        ("predict", "--assume", "dp_overlap={}"),
    ],
)
def test_no_number_within_a_text_is_none(command: str, option: str, text: str) -> None:
    for value in NO_NUMBERS:
        assert told(*COMMANDS[command], f"{option}={text.format(value)}"), value


@pytest.mark.parametrize(("command", "option"), list(options(str, Path)))
def test_no_text_and_no_path_is_empty(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("", " ", "\t"):
        given = list(COMMANDS[command])
        if option.startswith("--"):
            given.append(f"{option}={value}")
        else:  # the argument follows the names of the command
            given[len(command.split())] = value
        refused = told(*given)
        if (command, option) in EMPTY_CHANGES_NOTHING:
            assert not refused
        else:
            assert "must be" in refused
            assert f"not {value!r}" in refused
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("worker", ["''", "'' {out}", "' ' --request {request}"])
def test_a_command_has_a_program(worker: str) -> None:
    assert "its first word, the program to run, is empty" in told(*COMMANDS["search"], "--worker", worker)
    shell = ("--hosts", "a", "--remote-shell", f"{worker} {{host}}")
    assert "its first word, the program to run, is empty" in told(*COMMANDS["search"], *shell)


@pytest.mark.parametrize("command", ["\"''\"", "['']", "[' ', '{out}']"])
def test_a_command_of_a_space_has_a_program(command: str, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(Path(SPACE).read_text() + f"\nworker: {{command: {command}}}\n")
    assert "worker.command" in (message := told("search", str(space), "--dry-run"))
    assert "has no program to run: its first word is empty" in message
