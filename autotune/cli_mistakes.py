"""Options whose value can't be: told as every other mistake, by the option, its rule and the value given."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from typer import BadParameter
from typer.core import TyperGroup
from typer.exceptions import TyperException

from autotune.errors import UserError

__all__ = ["Commands"]

_KINDS = {int: "a whole number", float: "a number"}
_TEXTS = {str: "a text that isn't empty", Path: "a path that isn't empty"}


class Commands(TyperGroup):
    """All commands. Whichever of them is given an illegal value, `UserError` says so."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for. Raises UserError where an option's value breaks the option's rule."""
        try:
            return super().invoke(ctx)
        except BadParameter as error:
            told = _told(error)
            if told is None:
                raise
            raise UserError(told) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begin with. Raises UserError where a text or a path in the others is empty."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, TyperGroup):
            _refuse_empty(command, ctx, rest)
        return name, command, rest


def _refuse_empty(command: Any, ctx: Any, words: list[str]) -> None:
    """Looks at the words themselves: as a path the empty text would be the current folder."""
    given: dict[str, object] = {}
    with suppress(TyperException):  # whatever else is wrong with them is told when they are read for good
        parser = command.make_parser(ctx)
        parser.allow_interspersed_args = True  # unlike in the context of a group: options may follow an argument
        given, _, _ = parser.parse_args(args=list(words))
    for parameter in command.params:
        value, described = given.get(parameter.name), getattr(parameter, "type_descriptor", None)
        if described is None or not isinstance(value, str) or value.strip():
            continue
        # Where no text at all is the default, an empty one says the same.
        if described.annotation in _TEXTS and parameter.default != "":
            without = "" if parameter.required else "; leave it out for the default"
            raise UserError(f"{_name(parameter)} must be {_TEXTS[described.annotation]}, not {value!r}{without}")


def _told(error: BadParameter) -> str | None:
    """`--trials must be a whole number of at least 1, not 'abc'`; None for what isn't about a value."""
    option, given = error.param, _given(error)
    if option is None or given is None:
        return None
    rule = _rule(option)
    if rule is None:
        return None
    return f"{_name(option)} must be {rule}, not {_shown(given)}"


def _name(parameter: Any) -> str:
    """As a user knows it: `--trials`, or an argument as the usage line shows it."""
    names = [name for name in parameter.opts if name.startswith("--")]
    return str(names[0] if names else parameter.metavar or parameter.name.upper())


def _given(error: BadParameter) -> object:
    """The value that was refused, as the check of its type remembers it; None if it doesn't."""
    told = getattr(error.__cause__, "errors", None)
    found = told() if callable(told) else []
    return found[0].get("input") if found else None


def _rule(option: Any) -> str | None:
    """What an option's value must be, by its type and its limits; None for a type without a rule."""
    described = getattr(option, "type_descriptor", None)
    if described is None:
        return None
    for kind in (described.annotation, *get_args(described.annotation)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            return f"one of {', '.join(str(member.value) for member in kind)}"
        if kind in _KINDS:
            return f"{_KINDS[kind]}{_limits(described.parameter_info)}"
    return None


def _limits(info: Any) -> str:
    least, most = info.min, info.max
    if least is None:
        return "" if most is None else f" of at most {most}"
    return f" of at least {least}" if most is None else f" from {least} to {most}"


def _shown(given: object) -> str:
    """A number as it is, any other text in quotes."""
    try:
        float(str(given))
    except ValueError:
        return repr(given)
    return str(given).strip()
