"""What a study is about, as plain values that can be stored and compared when it is resumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autotune import __version__
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.cores import usable_cores
from autotune.results.measurement import Fidelity
from autotune.search.sealed import SALT, Secret
from autotune.space.space import Space

__all__ = ["Changes", "changes", "identity"]

# Lists decide which plans there are, not what a trial of one measures.
_LISTS = "search."
# In the command of the worker of this package, and of one that wraps it.
_BUILT_IN = "autotune.profiling.worker"
# The fingerprint of a plan leaves these out (autotune.space.plan): its numbers hold, whatever they are.
_HARMLESS = ("cluster.memory_limit_bytes", "model.name")
_PREDICTOR = "predictor."
_FIDELITY, _CLOCK, _NODES = "fidelity", "clock", "nodes"
_MOST_PREDICTOR_LINES = 3
_ENVIRONMENT = "worker.env."


def identity(
    space: Space,
    worker: WorkerCommand,
    fidelity: Fidelity = "run",
    predictor: dict[str, Any] | None = None,
    nodes: int | None = None,
) -> dict[str, Any]:
    """Everything that decides what a trial of this study measures, flat: dotted name -> plain JSON value, or a secret
    that `autotune.search.sealed` makes one of.

    A trial's time limit isn't in it: it decides only how long a plan may take.

    Args:
        predictor: what predictions rest on, where they are all that a study does.
        nodes: machines that a trial spans; None or 1: all ranks run on one, whatever the space says.
    """
    tree: dict[str, Any] = {
        "fidelity": fidelity,
        "model": asdict(space.model),
        "cluster": asdict(space.cluster),
        "training": asdict(space.training),
        "search": asdict(space.search),
        "trial": {"warmup_steps": space.trial.warmup_steps, "measured_steps": space.trial.measured_steps},
        "worker": {
            "command": worker.argv,
            "starter": worker.starter,
            **_beside_the_default(worker),
        },
    }
    if fidelity != "predict" and space.cluster.device == "cpu":
        if fidelity != "run" or _times_passes(worker):
            # Times of the two clocks must not compete in one study.
            tree[_CLOCK] = "virtual" if space.cluster.devices > usable_cores() * (nodes or 1) else "wall"
        if space.machine is not None:
            tree["link_efficiency"] = space.machine.link_efficiency
    if nodes is not None and nodes > 1:
        tree[_NODES] = nodes
    if predictor is not None:
        tree["predictor"] = {"version": __version__, **predictor}
    return dict(_flatten(tree, ""))


@dataclass(frozen=True)
class Changes:
    """How a study would differ from what is stored of it, a line for each value: `model.layers: 8 -> 12`.

    Attributes:
        lists: of the search: which plans there are.
        harmless: values that no measurement depends on, though the judgement of one may.
        others: all that makes measurements incomparable, many predictor values in one line; another fidelity alone,
            since nothing else matters then.
    """

    lists: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lists or self.harmless or self.others)


def changes(stored: dict[str, Any], now: dict[str, Any]) -> Changes:
    """What differs between two identities, sorted by what follows from it.

    Args:
        now: sealed with the salt of `stored`.
    """
    lists, harmless, others, predictor = [], [], [], []
    stored, now = _comparable(stored, now), _comparable(now, stored)
    if stored.get(_FIDELITY) != now.get(_FIDELITY):
        return Changes(others=(f"{_FIDELITY}: {_shown(stored, _FIDELITY)} -> {_shown(now, _FIDELITY)}",))
    for name in sorted(stored.keys() | now.keys()):
        if name == SALT or stored.get(name, ...) == now.get(name, ...):
            continue
        if name.startswith(_ENVIRONMENT) and name in stored and name in now:
            line = f"{name}: another value"
        else:
            line = f"{name}: {_shown(stored, name)} -> {_shown(now, name)}"
        if name.startswith(_LISTS):
            lists.append(line)
        elif name in _HARMLESS:
            harmless.append(line)
        elif name.startswith(_PREDICTOR):
            predictor.append(line)
        else:
            others.append(line)
    if len(predictor) > _MOST_PREDICTOR_LINES:
        predictor = [f"the predictor changed: {len(predictor)} values"]
    return Changes(tuple(lists), tuple(harmless), (*others, *predictor))


def _times_passes(worker: WorkerCommand) -> bool:
    """Whether the ranks report the times of their passes, without which any plan is judged by the wall clock."""
    return worker.reader.kind == "json" and any(_BUILT_IN in word for word in worker.argv)


def _comparable(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`one` as the other would be written: earlier versions stored a clock of every worker, and one node as such."""
    left_out = {_CLOCK} if _CLOCK not in other else set()
    if one.get(_NODES) == 1:
        left_out.add(_NODES)
    return {name: value for name, value in one.items() if name not in left_out}


def _beside_the_default(worker: WorkerCommand) -> dict[str, Any]:
    """What a worker sets of the rest. Values of its environment may be secrets."""
    found: dict[str, Any] = {}
    if worker.shell:
        found["shell"] = True
    if worker.cwd is not None:
        found["cwd"] = worker.cwd
    if worker.reader != DEFAULT_WORKER.reader:
        found["reader"] = asdict(worker.reader)
    if worker.env:
        found["env"] = {name: Secret(value) for name, value in worker.env}
    return found


def _flatten(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flatten(item, f"{name}.{key}" if name else str(key))]
    return [(name, list(value) if isinstance(value, tuple) else value)]


def _shown(values: dict[str, Any], name: str) -> str:
    if name not in values:
        return "(not there)"
    # A digest would tell nobody anything.
    return "(a value)" if name.startswith(_ENVIRONMENT) else repr(values[name])
