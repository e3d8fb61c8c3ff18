"""A plan: one full hybrid-parallel configuration, in its one canonical form."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from autotune.space.cluster import ClusterSpec
from autotune.space.model import ModelSpec
from autotune.space.training import TrainingSpec

__all__ = ["Plan", "Recompute", "RunIdentity", "describe", "spread_layers"]

Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class Plan:
    """One configuration of pp x tp x dp devices.

    A plan is made by `autotune.space.space.Space`, which derives dp, microbatches and layer_split and collapses
    spellings that mean the same run (pp = 1 has one schedule, `1f1b` with one stage), so equal plans compare equal.

    Attributes:
        microbatches: microbatches of one step and data-parallel replica.
        schedule: name of the pipeline schedule in `autotune.schedules`.
        stages_per_device: stages a device holds (v).
        layer_split: layers of every stage, in model order; sums to the model's layers; length pp * stages_per_device.
    """

    pp: int
    tp: int
    dp: int
    micro_batch_size: int
    microbatches: int
    schedule: str
    stages_per_device: int
    layer_split: tuple[int, ...]
    recompute: Recompute = "none"

    @property
    def devices(self) -> int:
        """Devices the plan uses."""
        return self.pp * self.tp * self.dp

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.stages_per_device

    def describe(self) -> str:
        """One line for logs and the progress display."""
        return describe(self)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values; `from_dict` reads them back."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"layer_split": [*self.layer_split]}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Plan:
        """The plan that `to_dict` wrote."""
        split = values["layer_split"]
        assert isinstance(split, (list, tuple))
        return cls(**(values | {"layer_split": tuple(split)}))  # type: ignore[arg-type]

    def fingerprint(self, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str:
        """`RunIdentity.fingerprint` of this plan; keep a `RunIdentity` for many plans."""
        return RunIdentity.of(model, cluster, training).fingerprint(self)


class Described(Protocol):
    """What the line about a plan says; None is a number that a refused point doesn't have."""

    @property
    def pp(self) -> int | None: ...
    @property
    def tp(self) -> int | None: ...
    @property
    def dp(self) -> int | None: ...
    @property
    def micro_batch_size(self) -> int | None: ...
    @property
    def microbatches(self) -> int | None: ...
    @property
    def schedule(self) -> str: ...
    @property
    def stages_per_device(self) -> int | None: ...
    @property
    def recompute(self) -> str: ...


def describe(plan: Described) -> str:
    """`pp2 tp1 dp2 mbs1 m8 v-half x2`: a plan in one line; numbers it doesn't have are dashes."""
    numbers = {
        "pp": plan.pp,
        "tp": plan.tp,
        "dp": plan.dp,
        "mbs": plan.micro_batch_size,
        "m": plan.microbatches,
    }
    words = [f"{name}{'-' if value is None else value}" for name, value in numbers.items()]
    chunks = f" x{plan.stages_per_device}" if (plan.stages_per_device or 1) > 1 else ""
    tail = "" if plan.recompute in ("", "none") else f" recompute={plan.recompute}"
    return f"{' '.join(words)} {plan.schedule}{chunks}{tail}"


@dataclass(frozen=True)
class RunIdentity:
    """Everything beside the plan that a run depends on, as JSON text: what stands before and after the plan's."""

    before: str
    after: str

    @classmethod
    def of(cls, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> RunIdentity:
        """The model's name and the memory limit don't change what is run, so they don't count."""
        described = {k: v for k, v in asdict(model).items() if k != "name"}
        devices = {k: v for k, v in asdict(cluster).items() if k != "memory_limit_bytes"}
        return cls(
            before=f'{{"cluster":{_json(devices)},"model":{_json(described)},"plan":',
            after=f',"training":{_json(asdict(training))}}}',
        )

    def fingerprint(self, plan: Plan) -> str:
        """16 hex digits that identify a run: equal for equal plan, model, devices and training, else different."""
        text = f"{self.before}{_json(plan.to_dict())}{self.after}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _json(values: dict[str, object]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def spread_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage, as even as can be: no layer is lost and no two stages differ by more than one.

    The first and last stage carry embedding and head beside their layers, so they get the smaller share.

    >>> spread_layers(10, 4)
    (2, 3, 3, 2)
    """
    share, extra = divmod(layers, stages)
    split = [share] * stages
    middle_first = sorted(range(stages), key=lambda s: (s in (0, stages - 1), s == stages - 1, s))
    for stage in middle_first[:extra]:
        split[stage] += 1
    return tuple(split)
