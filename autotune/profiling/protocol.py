"""The request a worker reads and the reports its ranks write: plain JSON, so any command can stand in. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from autotune.schedules.schedule import Schedule
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.machine import Machine
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

__all__ = ["PassTime", "RankReport", "TrialRequest"]

PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class TrialRequest:
    """Everything one rank needs to run one plan.

    Attributes:
        trial: number of the trial in its study.
        schedule: the passes to execute; the same object that was checked and simulated.
        warmup_steps: at least 1 is run, in which collectives are counted.
        measure_memory: meter peak memory in a step of its own after the timed ones.
        collective_timeout_s: how long a rank waits for its peers in one collective or message before it fails.
        link_efficiency: share of a link's bandwidth that the virtual clock lets collectives and messages reach.
    """

    trial: int
    plan: Plan
    schedule: Schedule
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    warmup_steps: int = 1
    measured_steps: int = 3
    measure_memory: bool = True
    collective_timeout_s: float = 120.0
    link_efficiency: float = Machine.link_efficiency

    @property
    def id(self) -> str:
        """16 hex digits of everything in the request, which its reports echo: equal for equal requests only."""
        text = json.dumps(self._values(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict:
        """Plain JSON values, with the `id`; `from_dict` reads them back."""
        return {"id": self.id, **self._values()}

    def _values(self) -> dict:
        return {
            "version": PROTOCOL_VERSION,
            "trial": self.trial,
            "plan": self.plan.to_dict(),
            "schedule": self.schedule.to_dict(),
            "model": asdict(self.model),
            "cluster": asdict(self.cluster),
            "training": asdict(self.training),
            "warmup_steps": self.warmup_steps,
            "measured_steps": self.measured_steps,
            "measure_memory": self.measure_memory,
            "collective_timeout_s": self.collective_timeout_s,
            "link_efficiency": self.link_efficiency,
        }

    @classmethod
    def from_dict(cls, values: dict) -> TrialRequest:
        """The request that `to_dict` wrote."""
        cluster = values["cluster"]
        links = {k: Link(**cluster[k]) for k in ("intra_node", "inter_node")}
        return cls(
            trial=values["trial"],
            plan=Plan.from_dict(values["plan"]),
            schedule=Schedule.from_dict(values["schedule"]),
            model=ModelSpec.from_dict(values["model"]),
            cluster=ClusterSpec(**{**cluster, **links}),
            training=TrainingSpec(**values["training"]),
            warmup_steps=values["warmup_steps"],
            measured_steps=values["measured_steps"],
            measure_memory=values["measure_memory"],
            collective_timeout_s=values.get("collective_timeout_s", 120.0),
            link_efficiency=values.get("link_efficiency", Machine.link_efficiency),
        )


@dataclass(frozen=True)
class PassTime:
    """Time of one kind of pass of one stage in one step: medians over the step's microbatches.

    Attributes:
        cpu_s: CPU time of the thread that runs the pass; waiting for messages or inside collectives is no part of it.
        wall_s: from the moment the inputs are there; with tensor parallelism collectives are inside. On CUDA the time
            between events on the GPU's stream.
    """

    kind: str
    stage: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class RankReport:
    """What one rank writes to `rank-N.json` when it is done (or has failed).

    Attributes:
        request_id: `id` of the request that was run. A report that says `ok` counts only for that request.
        state: `ok`, `oom`, `failed`, or `launcher` when the ranks couldn't reach each other.
        error: last lines of the failure, empty if none.
        failed_at: UNIX time of the failure, so that the first failing rank can be told from its followers.
        step_wall_s: wall time of every measured step.
        passes: for every measured step the times of its passes.
        optimizer_cpu_s: CPU time outside of the passes, one entry a measured step: clearing gradients, gathering
            sharded parameters, reducing gradients, AdamW.
        collective_bytes: bytes this rank sends in one step, were every collective a ring, by mesh axis: `tp`, `dp`,
            and `tied` (the sum of a tied embedding's gradients over two devices). Axes without traffic are left out;
            None when not counted.
        collective_calls: all-gathers and reduce-scatters of one step by mesh axis; an all-reduce is one of each.
        peak_memory_bytes: most bytes held at any moment of a step, optimizer state allocated.
        activation_peak_bytes: most bytes held beside parameters, gradients and optimizer state.
        reserved_memory_bytes: what the CUDA allocator took from the device; None on CPU.
        parameters: parameters of this rank's stages, before data parallelism shards them.
        losses: mean loss per token over the global batch of every measured step; empty on ranks that don't hold the
            last stage, equal on all that do.
    """

    rank: int
    state: Literal["ok", "oom", "failed", "launcher"]
    request_id: str = ""
    error: str = ""
    failed_at: float | None = None
    step_wall_s: tuple[float, ...] = ()
    passes: tuple[tuple[PassTime, ...], ...] = ()
    optimizer_cpu_s: tuple[float, ...] = ()
    collective_bytes: dict[str, int] | None = None
    collective_calls: dict[str, int] | None = None
    peak_memory_bytes: int | None = None
    activation_peak_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    parameters: int | None = None
    losses: tuple[float, ...] = ()
    torch: str = ""
    device: str = ""

    def to_dict(self) -> dict:
        """Plain JSON values; `from_dict` reads them back."""
        return asdict(self) | {"version": PROTOCOL_VERSION}

    def write(self, folder: Path) -> None:
        """Write `folder/rank-N.json`, whole or not at all."""
        path = folder / f"rank-{self.rank}.json"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def from_dict(cls, values: dict) -> RankReport:
        """The report that `to_dict` wrote."""
        fields = {k: v for k, v in values.items() if k != "version"}
        fields["passes"] = tuple(tuple(PassTime(**p) for p in step) for step in fields.get("passes", ()))
        for name in ("step_wall_s", "optimizer_cpu_s", "losses"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)
