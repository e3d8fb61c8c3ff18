"""The mistakes of a file: gathered, placed by line and path, and told with the value and the legal values."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from autotune.errors import UserError
from autotune.space.sections import TOLD
from autotune.space.yaml_reader import Place, YamlFile

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["Problems", "explain_all", "show", "unknown_key"]


@dataclass
class Problems:
    """Every mistake found in one file, so that the user reads them all at once."""

    file: YamlFile
    found: list[str] = field(default_factory=list)

    def add(self, place: Place, message: str) -> None:
        """Notes that the value at `place` is wrong; the message goes on after `file:line: path.in.file`."""
        self.found.append(f"{self.file.where(place)}: {message}")

    def stop_if_any(self, what: str = "space file") -> None:
        """Raises UserError listing everything found so far."""
        if len(self.found) == 1:
            raise UserError(self.found[0])
        if self.found:
            raise UserError(f"{len(self.found)} problems in the {what}:\n" + "\n".join(self.found))


def explain_all(error: ValidationError, section: Any, place: Place) -> Iterator[tuple[Place, str]]:
    """Place and message of every mistake in the section that stands at `place`."""
    for detail in error.errors(include_url=False):
        inside = (step for step in detail["loc"] if isinstance(step, (str, int)))
        yield (*place, *inside), _explain(dict(detail), section)


def _explain(detail: dict[str, Any], section: Any) -> str:
    """One message from one pydantic error: the value, the rule, the legal values."""
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    shown = show(value)
    if kind == "extra_forbidden":
        return unknown_key(detail["loc"][-1], _keys_at(section, detail["loc"][:-1]))
    if kind == "missing":
        return f"missing; {_description(section, detail['loc'])}"
    if kind == "literal_error":
        legal = [part.strip().strip("'") for part in context["expected"].replace(" or ", ", ").split(",")]
        return f"{shown} is not one of {', '.join(legal)}{nearest(value, legal)}"
    if kind == TOLD:
        return str(detail["msg"])
    if kind == "value_error":
        return f"{shown} {context['error']}"
    texts = {
        "int_type": "is not a whole number",
        "float_type": "is not a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "greater_than": f"must be above {context.get('gt')}",
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "too_short": "must list at least one value",
        "finite_number": "must be a finite number",
        "model_type": "must be a mapping of keys",
        "model_attributes_type": "must be a mapping of keys",
        "dict_type": "must be a mapping of names to values",
        "list_type": "must be a list or a text",
    }
    return f"{shown} {texts[kind]}" if kind in texts else f"{shown}: {detail['msg']}"


def _keys_at(section: Any, loc: tuple[Any, ...]) -> tuple[str, ...]:
    """Known keys of the mapping at `loc` inside `section`."""
    return tuple(_section_at(section, loc).model_fields)


def _section_at(section: Any, loc: tuple[Any, ...]) -> Any:
    """The section model of the mapping at `loc` inside `section`; of an optional one, the model that it is if given."""
    for step in loc:
        annotation = section.model_fields[step].annotation
        while get_args(annotation):  # X | None, Annotated[X, ...]
            annotation = get_args(annotation)[0]
        section = annotation
    return section


def _description(section: Any, loc: tuple[Any, ...]) -> str:
    info = _section_at(section, loc[:-1]).model_fields.get(loc[-1])
    return str(info.description) if info else "a value is needed"


def unknown_key(key: object, known: tuple[str, ...]) -> str:
    return f"unknown key {show(key)}{nearest(key, known)}; known: {', '.join(known)}"


def nearest(value: object, known: Any) -> str:
    close = difflib.get_close_matches(str(value).lower().replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""


def show(value: object) -> str:
    return reprlib.repr(value)
