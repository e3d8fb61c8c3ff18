"""What a study is about, as plain values that can be stored and compared when it is resumed."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from autotune import __version__
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.cores import usable_cores
from autotune.results.measurement import Fidelity
from autotune.space.space import Space

__all__ = ["differences", "identity"]


def identity(
    space: Space, worker: WorkerCommand, fidelity: Fidelity = "run", predictor: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that decides what a trial of this study measures, flat: dotted name -> plain JSON value.

    A trial's time limit isn't in it: it decides only how long a plan may take.

    Args:
        predictor: what predictions rest on, where they are all that a study does.
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
        # Times of the two clocks must not compete in one study.
        tree["clock"] = "virtual" if space.cluster.devices > usable_cores() else "wall"
    if predictor is not None:
        tree["predictor"] = {"version": __version__, **predictor}
    return dict(_flatten(tree, ""))


def differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per value that differs, naming it: `model.layers: 8 -> 12`."""
    return [
        f"{name}: {_shown(stored, name)} -> {_shown(now, name)}"
        for name in sorted(stored.keys() | now.keys())
        if stored.get(name, ...) != now.get(name, ...)
    ]


def _beside_the_default(worker: WorkerCommand) -> dict[str, Any]:
    """What a worker sets of the rest. Values of its environment may be secrets, so a digest stands for them."""
    found: dict[str, Any] = {}
    if worker.shell:
        found["shell"] = True
    if worker.cwd is not None:
        found["cwd"] = worker.cwd
    if worker.reader != DEFAULT_WORKER.reader:
        found["reader"] = asdict(worker.reader)
    if worker.env:
        found["env"] = {name: f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:16]}" for name, value in worker.env}
    return found


def _flatten(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flatten(item, f"{name}.{key}" if name else str(key))]
    return [(name, list(value) if isinstance(value, tuple) else value)]


def _shown(values: dict[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "(not there)"
