"""Reads a space file into checked sections, and writes a space back as a file that stands alone."""

from __future__ import annotations

import difflib
import reprlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.space.sections import (
    SECTIONS,
    TOLD,
    ClusterSection,
    ModelSection,
    SearchSection,
    TrainingSection,
    TrialSection,
    WorkerSection,
)
from autotune.space.settings import WorkerSettings
from autotune.space.yaml_reader import Place, YamlFile, read_yaml

if TYPE_CHECKING:
    from autotune.space.space import Space

__all__ = ["TOP_KEYS", "Problems", "SpaceFile", "read_space_file", "space_to_yaml"]

TOP_KEYS = ("name", *SECTIONS)
_REQUIRED = ("model", "cluster", "training")
_OPTIONAL = ("worker",)  # there is none where the file has none; the others have their defaults


@dataclass
class Problems:
    """Every mistake found in one file, so that the user reads them all at once."""

    file: YamlFile
    found: list[str] = field(default_factory=list)

    def add(self, place: Place, message: str) -> None:
        """Notes that the value at `place` is wrong; the message goes on after `file:line: path.in.file`."""
        self.found.append(f"{self.file.where(place)}: {message}")

    def stop_if_any(self) -> None:
        """Raises UserError listing everything found so far."""
        if len(self.found) == 1:
            raise UserError(self.found[0])
        if self.found:
            raise UserError(f"{len(self.found)} problems in the space file:\n" + "\n".join(self.found))


@dataclass(frozen=True)
class SpaceFile:
    """The sections of one file, each valid by itself; None for a section in which `problems` has found mistakes.

    `worker` is also None where the file has no such section.
    """

    path: Path
    name: str
    model: ModelSection | None
    cluster: ClusterSection | None
    training: TrainingSection | None
    search: SearchSection | None
    trial: TrialSection | None
    worker: WorkerSection | None
    problems: Problems


def read_space_file(path: Path) -> SpaceFile:
    """The sections of the space file at `path`.

    What is wrong with one section doesn't hide what is wrong with another: mistakes are gathered in `problems`, to
    which the caller adds those that span keys.

    Raises:
        UserError: the file can't be read, is no YAML mapping, or sets a key twice.
    """
    file = read_yaml(path)
    problems = Problems(file)
    for key in file.values:
        if key not in TOP_KEYS:
            problems.add((str(key),), _unknown_key(key, TOP_KEYS))
    sections = {name: _read_section(name, file.values, problems) for name in SECTIONS}
    return SpaceFile(path=path, name=_read_name(file, problems), problems=problems, **sections)


def _read_section(name: str, values: dict[Any, Any], problems: Problems) -> Any:
    from pydantic import ValidationError

    section = SECTIONS[name]
    if name not in values and name in _REQUIRED:
        problems.add((name,), f"missing; {_summary(section.__doc__)}")
        return None
    given = values.get(name)
    if given is None and name in _OPTIONAL:
        return None
    try:
        return section.model_validate({} if given is None else given)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            place: Place = (name, *(step for step in detail["loc"] if isinstance(step, (str, int))))
            problems.add(place, _explain(dict(detail), section))
    return None


def _read_name(file: YamlFile, problems: Problems) -> str:
    """The study's name: the file's `name`, or the file name without its ending. It becomes a folder name."""
    name = file.values.get("name", file.path.stem)
    legal = isinstance(name, str) and name[:1].isalnum() and all(c.isalnum() or c in "._-" for c in name)
    if not legal or len(name) > 100:
        place: Place = ("name",) if "name" in file.values else ()
        problems.add(place, f"{_show(name)} can't name a study: use letters, digits, '.', '_' and '-', at most 100")
        return "space"
    return name


def _explain(detail: dict[str, Any], section: Any) -> str:
    """One message from one pydantic error: the value, the rule, the legal values."""
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    shown = _show(value)
    if kind == "extra_forbidden":
        return _unknown_key(detail["loc"][-1], _keys_at(section, detail["loc"][:-1]))
    if kind == "missing":
        return f"missing; {_description(section, detail['loc'])}"
    if kind == "literal_error":
        legal = [part.strip().strip("'") for part in context["expected"].replace(" or ", ", ").split(",")]
        return f"{shown} is not one of {', '.join(legal)}{_nearest(value, legal)}"
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
    for step in loc:
        section = section.model_fields[step].annotation
    return tuple(section.model_fields)


def _description(section: Any, loc: tuple[Any, ...]) -> str:
    info = section.model_fields.get(loc[-1])
    return str(info.description) if info else "a value is needed"


def _summary(doc: str | None) -> str:
    return (doc or "").split(".")[0].strip().lower()


def _unknown_key(key: object, known: tuple[str, ...]) -> str:
    return f"unknown key {_show(key)}{_nearest(key, known)}; known: {', '.join(known)}"


def _nearest(value: object, known: Any) -> str:
    close = difflib.get_close_matches(str(value).lower().replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""


def _show(value: object) -> str:
    return reprlib.repr(value)


def space_to_yaml(space: Space) -> str:
    """The space as YAML with every default filled in and the Hugging Face config inlined.

    Reading it back gives an equal space, wherever the file lies.
    """
    import yaml

    model, cluster, training, lists = space.model, space.cluster, space.training, space.search
    values = {
        "name": space.name,
        "model": _model_values(model),
        "cluster": {
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
            "device": cluster.device,
            "memory_limit": cluster.memory_limit_bytes,
            "links": {
                "intra_node": _link_values(cluster.intra_node),
                "inter_node": _link_values(cluster.inter_node),
            },
        },
        "training": {key: getattr(training, key) for key in TrainingSection.model_fields},
        "search": {
            "pp": list(lists.pp),
            "tp": list(lists.tp),
            "micro_batch_size": list(lists.micro_batch_size),
            "schedule": list(lists.schedule),
            "stages_per_device": list(lists.stages_per_device),
            "recompute": list(lists.recompute),
            "baseline": False,  # what it adds is in the list already
        },
        "trial": {key: getattr(space.trial, key) for key in TrialSection.model_fields},
    }
    if space.worker is not None:
        values["worker"] = _worker_values(space.worker)
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)


def _model_values(model: Any) -> dict[str, Any]:
    values = {key: getattr(model, key) for key in ModelSection.model_fields if key != "hf_config"}
    if model.positions == "rope":
        del values["max_positions"]
        values["rope_scaling"] = asdict(model.rope_scaling) if model.rope_scaling else None
    else:
        del values["rotary_fraction"], values["rope_theta"], values["rope_scaling"]
    if model.activation == "swiglu":
        del values["gelu_tanh"]
    return values


def _worker_values(worker: WorkerSettings) -> dict[str, Any]:
    reader = worker.reader
    read: dict[str, Any] = {"kind": reader.kind}
    if reader.kind != "json":
        read |= {"log": reader.log, "skip_steps": reader.skip_steps}
    if reader.kind == "regex":
        read["pattern"] = list(reader.patterns)
    return {
        "command": worker.command[0] if worker.shell else list(worker.command),
        "shell": worker.shell,
        "starter": worker.starter,
        "env": dict(worker.env),
        "cwd": worker.cwd,
        "reader": read,
        "python_hooks": worker.python_hooks,
    }


def _link_values(link: Any) -> dict[str, float]:
    return {"latency": link.latency_s, "bandwidth": link.bandwidth_bytes_per_s}
