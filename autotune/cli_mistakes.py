"""Options whose value can't be: told as every other mistake, by the option, its rule and the value given."""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

from typer import BadParameter
from typer.core import TyperGroup

from autotune.errors import UserError

__all__ = ["Commands"]

_KINDS = {int: "a whole number", float: "a number"}


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


def _told(error: BadParameter) -> str | None:
    """`--trials must be a whole number of at least 1, not 'abc'`; None for what isn't about a value."""
    option, given = error.param, _given(error)
    if option is None or given is None:
        return None
    rule = _rule(option)
    if rule is None:
        return None
    names = [name for name in getattr(option, "opts", ()) if name.startswith("--")]
    return f"{names[0] if names else option.name} must be {rule}, not {_shown(given)}"


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
