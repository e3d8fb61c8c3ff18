"""Reads a space file into checked sections, and writes a space back as a file that stands alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.space.cluster_file import with_cluster_file
from autotune.space.problems import Problems, explain_all, show, unknown_key
from autotune.space.sections import (
    SECTIONS,
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
    from autotune.space.machine import Machine
    from autotune.space.space import Space

__all__ = ["NAME_RULE", "TOP_KEYS", "SpaceFile", "can_name_a_study", "read_space_file", "space_to_yaml"]

TOP_KEYS = ("name", *SECTIONS)
NAME_RULE = "use letters, digits, '.', '_' and '-', at most 100"
_REQUIRED = ("model", "cluster", "training")
_OPTIONAL = ("worker",)  # there is none where the file has none; the others have their defaults


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
            problems.add((str(key),), unknown_key(key, TOP_KEYS))
    values = {**file.values}
    if (cluster := with_cluster_file(values.get("cluster"), path.parent, problems)) is not None:
        values["cluster"] = cluster
    sections = {name: _read_section(name, values, problems) for name in SECTIONS}
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
        for place, message in explain_all(error, section, (name,)):
            problems.add(place, message)
    return None


def can_name_a_study(name: object) -> bool:
    """Whether a study can be called so: its name is a folder's, too."""
    legal = isinstance(name, str) and name[:1].isalnum() and all(c.isalnum() or c in "._-" for c in name)
    return legal and len(str(name)) <= 100


def _read_name(file: YamlFile, problems: Problems) -> str:
    """The study's name: the file's `name`, or the file name without its ending. It becomes a folder name."""
    name = file.values.get("name", file.path.stem)
    if not can_name_a_study(name):
        place: Place = ("name",) if "name" in file.values else ()
        problems.add(place, f"{show(name)} can't name a study: {NAME_RULE}")
        return "space"
    return str(name)


def _summary(doc: str | None) -> str:
    return (doc or "").split(".")[0].strip().lower()


def space_to_yaml(space: Space) -> str:
    """The space as YAML with every default filled in and the Hugging Face config and the cluster file inlined.

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
            **({} if space.machine is None else {"machine": _machine_values(space.machine)}),
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


def _machine_values(figures: Machine) -> dict[str, Any]:
    return {key: value for key, value in asdict(figures).items() if value is not None}


def _link_values(link: Any) -> dict[str, float]:
    return {"latency": link.latency_s, "bandwidth": link.bandwidth_bytes_per_s}
