"""Turns the sections of a space file into the specs of a space: defaults filled in, keys checked against each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, get_args

from autotune.errors import UserError
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.devices import DEVICES
from autotune.space.hf_config import read_hf_config
from autotune.space.machine import Machine
from autotune.space.model import ModelSpec
from autotune.space.placeholders import WORD_LISTS, placeholders_in
from autotune.space.plan import Recompute
from autotune.space.problems import Problems
from autotune.space.rope import RopeScaling
from autotune.space.sections import (
    ClusterSection,
    LinkSection,
    MachineSection,
    ModelSection,
    SearchSection,
    TrainingSection,
    WorkerSection,
)
from autotune.space.settings import ReaderKind, ReaderSettings, SearchLists, WorkerSettings
from autotune.space.training import TrainingSpec

__all__ = [
    "DEFAULT_SCHEDULES",
    "resolve_cluster",
    "resolve_machine",
    "resolve_model",
    "resolve_search",
    "resolve_training",
    "resolve_worker",
]

T = TypeVar("T")

DEFAULT_SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min")

_FIELDS = ("layers", "hidden", "heads", "ffn_hidden", "vocab")
_BESIDE_HF = frozenset({"hf_config", "sequence_length", "name"})


def resolve_model(section: ModelSection, folder: Path, problems: Problems) -> tuple[ModelSpec | None, tuple[str, ...]]:
    """The model and notes about it; None when `problems` has been given a mistake. hf_config is sought in `folder`."""
    if section.hf_config is None:
        return _model_from_fields(section, problems), ()
    extra = [key for key in ModelSection.model_fields if key in section.model_fields_set - _BESIDE_HF]
    for key in extra:
        problems.add(("model", key), "comes from hf_config: give either hf_config or the fields, not both")
    try:
        read = read_hf_config(folder / section.hf_config, section.sequence_length)
    except UserError as error:
        problems.add(("model", "hf_config"), str(error))
        return None, ()
    if extra:
        return None, ()
    if section.name is None:
        return read.spec, read.notes
    return replace(read.spec, name=section.name), read.notes


def _model_from_fields(section: ModelSection, problems: Problems) -> ModelSpec | None:
    before = len(problems.found)
    for key in _FIELDS:
        if getattr(section, key) is None:
            problems.add(("model", key), "missing; give it, or an hf_config that tells it")
    if len(problems.found) > before:
        return None
    assert section.layers is not None
    assert section.hidden is not None
    assert section.heads is not None
    assert section.ffn_hidden is not None
    assert section.vocab is not None
    kv_heads = section.kv_heads or section.heads
    if section.heads % kv_heads:
        problems.add(("model", "kv_heads"), f"{kv_heads} doesn't divide heads = {section.heads}")
    if section.head_dim is None and section.hidden % section.heads:
        problems.add(("model", "heads"), f"{section.heads} doesn't divide hidden = {section.hidden}; set head_dim")
    head_dim = section.head_dim or max(1, section.hidden // section.heads)
    _check_positions(section, head_dim, problems)
    if section.gelu_tanh and section.activation != "gelu":
        problems.add(("model", "gelu_tanh"), f"needs activation: gelu, not {section.activation}")
    if len(problems.found) > before:
        return None
    learned = section.positions == "learned"
    return ModelSpec(
        layers=section.layers,
        hidden=section.hidden,
        heads=section.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden=section.ffn_hidden,
        vocab=section.vocab,
        sequence_length=section.sequence_length,
        activation=section.activation,
        norm=section.norm,
        positions=section.positions,
        tied_embeddings=section.tied_embeddings,
        max_positions=(section.max_positions or section.sequence_length) if learned else 0,
        qkv_bias=section.qkv_bias,
        attention_output_bias=section.attention_output_bias,
        mlp_bias=section.mlp_bias,
        qk_norm=section.qk_norm,
        parallel_residual=section.parallel_residual,
        gelu_tanh=section.gelu_tanh,
        norm_epsilon=section.norm_epsilon,
        rope_theta=section.rope_theta,
        rotary_fraction=section.rotary_fraction,
        rope_scaling=RopeScaling(**section.rope_scaling.model_dump()) if section.rope_scaling else None,
        name=section.name or "model",
    )


def _check_positions(section: ModelSection, head_dim: int, problems: Problems) -> None:
    if section.positions == "learned":
        table = section.max_positions or section.sequence_length
        if table < section.sequence_length:
            message = f"{table} learned positions are fewer than sequence_length = {section.sequence_length}"
            problems.add(("model", "max_positions"), message)
        for key in ("rotary_fraction", "rope_theta", "rope_scaling"):
            if key in section.model_fields_set:
                problems.add(("model", key), "needs positions: rope, not learned")
        return
    if section.max_positions is not None:
        problems.add(("model", "max_positions"), "needs positions: learned, not rope")
    turned = int(head_dim * section.rotary_fraction)
    if turned < 2 or turned % 2:
        message = f"rope would turn {turned} of the {head_dim} values of a head; it needs an even number above 0"
        problems.add(("model", "head_dim"), message)


def resolve_cluster(section: ClusterSection) -> ClusterSpec:
    """The cluster, with the device's defaults for what the file leaves out."""
    defaults = DEVICES[section.device]
    limited = "memory_limit" in section.model_fields_set  # an explicit null lifts the device's own limit
    return ClusterSpec(
        nodes=section.nodes,
        devices_per_node=section.devices_per_node,
        device=section.device,
        memory_limit_bytes=section.memory_limit if limited else defaults.memory_bytes,
        intra_node=_link(section.links.intra_node, defaults.intra_node),
        inter_node=_link(section.links.inter_node, defaults.inter_node),
    )


def resolve_machine(section: MachineSection, device: str) -> Machine:
    """The figures of one device for predictions, named `device` if the section doesn't name it."""
    return Machine(**{**section.model_dump(), "name": section.name or device})


def _link(section: LinkSection, default: Link) -> Link:
    return Link(
        latency_s=default.latency_s if section.latency is None else section.latency,
        bandwidth_bytes_per_s=default.bandwidth_bytes_per_s if section.bandwidth is None else section.bandwidth,
    )


def resolve_training(
    section: TrainingSection, worker: WorkerSettings | None = None
) -> tuple[TrainingSpec, tuple[str, ...]]:
    """What one step trains, and notes about it.

    A worker that nobody vouches for doesn't add the gradients of a tied embedding: a wrong "yes" would train another
    model.
    """
    sums = section.sum_tied_gradients
    notes: tuple[str, ...] = ()
    if "sum_tied_gradients" not in section.model_fields_set and worker is not None and not _is_megatron(worker):
        sums = False
        notes = (
            "the worker isn't known to add the gradients of a tied embedding that lies on two devices; "
            "training.sum_tied_gradients: true says that it does",
        )
    return TrainingSpec(
        global_batch_size=section.global_batch_size,
        dtype=section.dtype,
        optimizer=section.optimizer,
        sum_tied_gradients=sums,
        seed=section.seed,
    ), notes


def _is_megatron(worker: WorkerSettings) -> bool:
    return "megatron_args" in placeholders_in(" ".join(worker.command))


def resolve_worker(section: WorkerSection, folder: Path, problems: Problems) -> WorkerSettings | None:
    """The worker; None when `problems` has been given a mistake. `cwd` is sought in `folder`."""
    used = [name for name in WORD_LISTS if name in placeholders_in(" ".join(section.command))]
    if len(used) > 1:
        problems.add(("worker", "command"), f"{{{used[0]}}} and {{{used[1]}}} are for different trainers")
        return None
    for name, value in section.env.items():
        if listed := [word for word in placeholders_in(value) if word in WORD_LISTS]:
            problems.add(("worker", "env", name), f"{{{listed[0]}}} belongs in the command")
            return None
    if section.reader and (listed := [word for word in placeholders_in(section.reader.log) if word in WORD_LISTS]):
        problems.add(("worker", "reader", "log"), f"{{{listed[0]}}} belongs in the command")
        return None
    cwd = None
    if section.cwd is not None:
        cwd = os.path.abspath(folder / section.cwd)
        # An absolute one may be another machine's: results that were copied can still be read and exported.
        if not os.path.isabs(section.cwd) and not os.path.isdir(cwd):
            problems.add(("worker", "cwd"), f"{section.cwd!r} is no folder ({cwd})")
            return None
    reader = section.reader
    by_arguments: dict[str, ReaderKind] = {"megatron_args": "megatron", "torchtitan_args": "torchtitan"}
    return WorkerSettings(
        command=tuple(section.command),
        shell=section.shell,
        starter=section.starter,
        env=tuple(section.env.items()),
        cwd=cwd,
        reader=ReaderSettings(by_arguments[used[0]] if used else "json")
        if reader is None
        else ReaderSettings(reader.kind, tuple(reader.pattern), reader.log, reader.skip_steps),
        python_hooks=section.python_hooks,
    )


def resolve_search(section: SearchSection, cluster: ClusterSpec) -> tuple[SearchLists, tuple[str, ...]]:
    """The lists to search, each value once, and notes on what was added."""
    schedules = _unique(section.schedule or DEFAULT_SCHEDULES)
    notes: tuple[str, ...] = ()
    if section.baseline and "1f1b" not in schedules:
        schedules = ("1f1b", *schedules)
        notes = ("1f1b was added to the schedules, so that there is a baseline (baseline: false leaves it out)",)
    known: tuple[Recompute, ...] = get_args(Recompute)
    return SearchLists(
        pp=_unique(section.pp or _divisors(cluster.devices)),
        tp=_unique(section.tp or _divisors(cluster.devices_per_node)),
        micro_batch_size=_unique(section.micro_batch_size),
        schedule=schedules,
        stages_per_device=_unique(section.stages_per_device),
        recompute=tuple(value for value in known if value in section.recompute),
    ), notes


def _unique(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return _unique([*small, *(number // d for d in reversed(small))])
