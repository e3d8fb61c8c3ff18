"""The keys of the space file's `worker` section: the command that runs a plan, and how its result is read."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from autotune.space.placeholders import PLACEHOLDERS, unknown_placeholders
from autotune.space.settings import REGEX_GROUPS, REGEX_TIMES, ReaderKind, Starter

__all__ = ["ReaderSection", "WorkerSection"]

_TOLD = "told"  # as in `autotune.space.sections`


def _told(message: str) -> PydanticCustomError:
    # the template mark-up of pydantic would read the braces of a placeholder
    return PydanticCustomError(_TOLD, "{message}", {"message": message})


def _known_placeholders(text: str) -> str:
    if unknown := unknown_placeholders(text):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise _told(f"unknown placeholder {{{unknown[0]}}}; known: {known}; {{{{{unknown[0]}}}}} means the braces")
    return text


def _split_command(value: Any) -> Any:
    """The words of a command; a text is split like a shell would, but no shell runs it."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise _told(f"{value!r} can't be split into words: {error}") from None


def _with_program(words: list[str]) -> list[str]:
    if words and not words[0].strip():
        raise _told(f"{words!r} has no program to run: its first word is empty")
    return words


def _pattern(text: str) -> str:
    try:
        groups = re.compile(text).groupindex
    except re.error as error:
        raise _told(f"{text!r} is no regular expression: {error}") from None
    for name in groups:
        if name not in REGEX_GROUPS:
            raise _told(f"unknown group {name!r} in {text!r}; known: {', '.join(REGEX_GROUPS)}")
    if not groups:
        raise _told(f"{text!r} names no group; known: {', '.join(REGEX_GROUPS)}")
    return text


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Placed = Annotated[StrictStr, AfterValidator(_known_placeholders)]
Command = Annotated[list[Placed], BeforeValidator(_split_command), Field(min_length=1), AfterValidator(_with_program)]
Patterns = Annotated[list[Annotated[StrictStr, AfterValidator(_pattern)]], BeforeValidator(_as_list)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReaderSection(_Section):
    """How the result of a worker is read."""

    kind: ReaderKind = Field(description=f"one of {', '.join(get_args(ReaderKind))}")
    pattern: Patterns = Field([], description=f"of kind regex: expressions with the groups {', '.join(REGEX_GROUPS)}")
    log: Placed = Field("rank-*.log", description="files that are read, seen from the trial's folder")
    skip_steps: Annotated[StrictInt, Field(ge=0)] | None = Field(
        None, description="optimizer steps that don't count; default: trial.warmup_steps"
    )

    @model_validator(mode="after")
    def _complete(self) -> ReaderSection:
        if self.kind == "regex":
            groups = {name for text in self.pattern for name in re.compile(text).groupindex}
            if not groups & set(REGEX_TIMES):
                raise _told(f"a reader of kind regex needs a pattern with one of the groups {', '.join(REGEX_TIMES)}")
        elif self.pattern:
            raise _told(f"pattern needs kind: regex, not {self.kind}")
        if self.kind == "json" and self.model_fields_set & {"log", "skip_steps"}:
            raise _told("a reader of kind json reads no log: leave out log and skip_steps")
        return self


def _reader(value: Any) -> Any:
    """`reader: megatron` is short for a mapping."""
    return {"kind": value} if isinstance(value, str) else value


def _environment(value: Any) -> Any:
    """Numbers are texts in an environment."""
    if not isinstance(value, dict):
        return value
    return {k: str(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v for k, v in value.items()}


class WorkerSection(_Section):
    """The command that runs a plan instead of the built-in worker."""

    command: Command = Field(description="the command of one rank, or of all with starter: none; a list or a text")
    shell: StrictBool = Field(False, description="whether a shell runs the command")
    starter: Starter = Field(
        "torchrun", description="torchrun: started once a rank; none: once a trial, and it starts its ranks"
    )
    env: Annotated[dict[StrictStr, Placed], BeforeValidator(_environment)] = Field(
        {}, description="environment variables beside those of the tuner"
    )
    cwd: StrictStr | None = Field(None, description="folder it runs in, seen from the space file; default: the tuner's")
    reader: Annotated[ReaderSection, BeforeValidator(_reader)] | None = Field(
        None, description="how its result is read; default: json, or the one of {megatron_args} or {torchtitan_args}"
    )
    python_hooks: StrictBool = Field(
        True, description="whether Python ranks write down the type of an error, and their stacks when they hang"
    )

    @field_validator("env")
    @classmethod
    def _names(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise _told(f"{name!r} can't name an environment variable")
        return env

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, values: Any) -> Any:
        """A shell gets the text as it stands."""
        if isinstance(values, dict) and values.get("shell") is True:
            command = values.get("command")
            if isinstance(command, list):
                raise _told("with shell: true the command is one text, no list")
            if isinstance(command, str):
                return {**values, "command": [command] if command.strip() else []}
        return values
