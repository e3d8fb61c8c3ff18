"""Reads a YAML file safely: no Python objects, no duplicate keys, and the line of every value kept for messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import UserError

__all__ = ["Place", "YamlFile", "place_text", "read_yaml"]

_MOST_BYTES = 4 << 20
_MOST_VALUES = 100_000
"""Of a file whose aliases are written out: a few lines of aliases of aliases stand for billions of values."""

Place = tuple[str | int, ...]  # keys and list indexes from the top of the file


@dataclass(frozen=True)
class YamlFile:
    """A parsed file.

    Attributes:
        values: the top-level mapping.
        lines: line (from 1) of every key and list item, by its place.
    """

    path: Path
    values: dict[Any, Any]
    lines: dict[Place, int]

    def where(self, place: Place) -> str:
        """`space.yaml:12: search.pp[2]`, the line of the nearest enclosing value that the file has."""
        known = place
        while known and known not in self.lines:
            known = known[:-1]
        line = f":{self.lines[known]}" if known else ""
        return f"{self.path}{line}: {place_text(place)}" if place else f"{self.path}{line}"


def place_text(place: Place) -> str:
    """`search.pp[2]`"""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def read_yaml(path: Path, what: str = "space file", sections: str = "model, cluster, training, search") -> YamlFile:
    """Parses `path`, one YAML document with a mapping at its top.

    Args:
        what, sections: the file, and what its mapping holds, in messages.

    Raises:
        UserError: the file can't be read or isn't such a document, or a key stands twice in one mapping (every one is
            listed): YAML parsers keep the last silently, which would drop what the user wrote first.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UserError(f"{path}: longer than {_MOST_BYTES >> 20} MiB, which no {what} is")
        text = data.decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: can't read the {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file: {error.reason} at byte {error.start}") from error
    try:
        root, values = _load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}{_yaml_problem(error)}") from error
    except (ValueError, RecursionError) as error:  # an impossible date, or mappings nested without end
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if root is None:
        raise UserError(f"{path}: the file is empty")
    if not isinstance(values, dict):
        raise UserError(f"{path}: the file must hold a mapping of sections ({sections})")
    lines: dict[Place, int] = {}
    twice: list[str] = []
    _walk(root, (), lines, twice, set())
    if twice:
        raise UserError("\n".join(f"{path}{problem}" for problem in twice))
    return YamlFile(path, values, lines)


def _load(text: str) -> tuple[yaml.Node | None, Any]:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None and _written_out(root, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {_MOST_VALUES} values")
        # constructing flattens merge keys in place, so the walk for duplicates reads a tree of its own
        values = None if root is None else yaml.safe_load(text)
    finally:
        loader.dispose()
    return root, values


def _written_out(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node stands for, aliases written out; infinite for one that holds itself."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = math.inf  # until it is known: who meets it now is inside of it
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    known[id(node)] = 1 + sum(_written_out(part, known) for part in inner)
    return known[id(node)]


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], twice: list[str], open_nodes: set[int]) -> None:
    """Notes lines and finds duplicate keys. Aliases are followed once each, so cyclic files end."""
    if id(node) in open_nodes:
        return
    open_nodes.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*place, index)] = item.start_mark.line + 1
            _walk(item, (*place, index), lines, twice, open_nodes)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = key.value if isinstance(key, yaml.ScalarNode) else f"line {line}"
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                twice.append(f":{line}: {place_text((*place, name))}: the key is already set on line {seen[name]}")
            seen[name] = line
            lines[(*place, name)] = line
            _walk(value, (*place, name), lines, twice, open_nodes)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    return f"{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}"
