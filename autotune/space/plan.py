"""A plan: one full hybrid-parallel configuration, in its one canonical form."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from autotune.space.cluster import ClusterSpec
from autotune.space.model import ModelSpec
from autotune.space.training import TrainingSpec

__all__ = ["Plan", "Recompute", "spread_layers"]

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
        chunks = f" x{self.stages_per_device}" if self.stages_per_device > 1 else ""
        tail = "" if self.recompute == "none" else f" recompute={self.recompute}"
        return (
            f"pp{self.pp} tp{self.tp} dp{self.dp} mbs{self.micro_batch_size} m{self.microbatches} "
            f"{self.schedule}{chunks}{tail}"
        )

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values; `from_dict` reads them back."""
        return asdict(self) | {"layer_split": list(self.layer_split)}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Plan:
        """The plan that `to_dict` wrote."""
        split = values["layer_split"]
        assert isinstance(split, (list, tuple))
        return cls(**(values | {"layer_split": tuple(split)}))  # type: ignore[arg-type]

    def fingerprint(self, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str:
        """16 hex digits that identify this run: equal for equal plan, model, devices and training, else different.

        The model's name and the memory limit don't change what is run, so they don't count.
        """
        identity = {
            "plan": self.to_dict(),
            "model": {k: v for k, v in asdict(model).items() if k != "name"},
            "cluster": {k: v for k, v in asdict(cluster).items() if k != "memory_limit_bytes"},
            "training": asdict(training),
        }
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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
