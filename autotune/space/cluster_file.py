"""A cluster file, which `autotune calibrate` writes: the machines of a space, and what one of their devices can do.

Its sections: `cluster` with the keys of a space file's, `machine` with the figures of a device, and `measured`, what
they were fitted to, which nothing here reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.space.problems import Problems, explain_all, unknown_key
from autotune.space.sections import ClusterSection, MachineSection
from autotune.space.yaml_reader import read_yaml

__all__ = ["read_device", "read_machine_section", "with_cluster_file"]

_SECTIONS = ("cluster", "machine", "measured")


def with_cluster_file(given: Any, folder: Path, problems: Problems) -> dict[str, Any] | None:
    """The section `cluster` of a space file with the file that it names inlined; the keys beside `file` win.

    Args:
        given: the section as the space file has it.
        folder: where the space file lies.
        problems: gets the mistakes of the cluster file, each with its own file and line.

    Returns:
        None where the section names no file, or one with mistakes.
    """
    if not isinstance(given, dict) or not isinstance(given.get("file"), str):
        return None
    path = folder / given["file"]
    beside = {key: value for key, value in given.items() if key != "file"}
    try:
        inside = _read(path)
    except UserError as error:
        problems.add(("cluster", "file"), str(error))
        return None
    named, measured = beside.get("device"), inside.get("device")
    has_figures = "machine" in inside or "links" in inside
    if has_figures and named is not None and measured is not None and named != measured:
        problems.add(("cluster", "device"), f"{named!r}, but the figures of {path} are of {measured!r}")
    return _merged(inside, beside)


def read_machine_section(path: Path) -> MachineSection:
    """The figures of a device in the cluster file at `path`.

    Raises:
        UserError: the file can't be read, has mistakes, or no section `machine`.
    """
    found = _read(path).get("machine")
    if found is None:
        raise UserError(f"{path}: it has no section `machine`; `autotune calibrate` writes one")
    return MachineSection.model_validate(found)


def read_device(path: Path) -> str | None:
    """The device that the cluster file at `path` is of; None if it doesn't say.

    Raises:
        UserError: the file can't be read, or has mistakes.
    """
    return _read(path).get("device")


def _read(path: Path) -> dict[str, Any]:
    """The keys of a section `cluster`, with `machine` among them, that the file gives.

    Raises:
        UserError: the file can't be read, or has mistakes; all of them are listed.
    """
    from pydantic import ValidationError

    file = read_yaml(path, "cluster file", "cluster, machine, measured")
    problems = Problems(file)
    for key in file.values:
        if key not in _SECTIONS:
            problems.add((str(key),), unknown_key(key, _SECTIONS))
    values: dict[str, Any] = {}
    for name, section in (("cluster", ClusterSection), ("machine", MachineSection)):
        given = file.values.get(name)
        if given is None:
            continue
        if name == "cluster" and isinstance(given, dict) and "file" in given:
            problems.add((name, "file"), "a cluster file can't name another one")
        try:
            section.model_validate(given)
        except ValidationError as error:
            # The space file may give what the cluster file leaves out; it is told of what then is still missing.
            left_out = ("cluster", "devices_per_node")
            missing = [place for place in (left_out,) if isinstance(given, dict) and place[1] not in given]
            for place, message in explain_all(error, section, (name,)):
                if place not in missing:
                    problems.add(place, message)
        if isinstance(given, dict):
            values = {**values, "machine": given} if name == "machine" else dict(given)
    problems.stop_if_any("cluster file")
    return values


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`under` with the values of `over`; mappings are merged key by key."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
