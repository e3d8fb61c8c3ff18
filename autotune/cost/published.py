"""Published runs to hold predictions against: read from the package's CSV files, or from a folder of the user's own."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from autotune.cost.assumptions import Assumptions, stack
from autotune.cost.predict import MeanPasses
from autotune.errors import UserError
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, spread_layers
from autotune.space.training import TrainingSpec

__all__ = ["PublishedRun", "PublishedTable", "load_tables", "published_models", "read_rows", "with_settings"]

UNITS = {"GiB": 1024.0**3, "GB": 1e9}


@dataclass(frozen=True)
class PublishedRun:
    """One measured row.

    Attributes:
        row: its name inside the table.
        step_time_s: measured, or from the printed throughput; None when not printed.
        peak_memory_bytes: of the heaviest device; None when not printed.
        passes: printed pass times of this run's model and microbatches, if any.
    """

    row: str
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    plan: Plan
    assumptions: Assumptions
    step_time_s: float | None
    peak_memory_bytes: float | None
    passes: MeanPasses | None


@dataclass(frozen=True)
class PublishedTable:
    """The rows of one source.

    Attributes:
        memory_unit: `GiB` or `GB`, as printed.
        fitted: machine numbers fitted to the step times.
        fit_rows: names of the rows they are fitted on; empty: all.
        fixed: machine numbers of this cluster that differ from the catalogue's.
    """

    name: str
    source: str
    device: str
    memory_unit: str
    fitted: tuple[str, ...]
    fit_rows: tuple[str, ...]
    fixed: dict[str, float]
    runs: tuple[PublishedRun, ...]


def read_rows(name: str, folder: Path | None = None) -> list[dict[str, str]]:
    """The rows of one CSV file; lines that begin with # are comments.

    Args:
        folder: None: the package's own data.

    Raises:
        UserError: the folder has no such file.
    """
    if folder is None:
        text = resources.files("autotune.cost").joinpath(f"data/{name}").read_text(encoding="utf-8")
    else:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: a folder of runs holds tables.csv, models.csv and runs.csv")
        text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))


def published_models(folder: Path | None = None) -> dict[str, ModelSpec]:
    """The models of `models.csv` by name."""
    return {row["model"]: _model(row) for row in read_rows("models.csv", folder)}


def _model(row: dict[str, str]) -> ModelSpec:
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "sequence_length")
    layers, hidden, heads, kv_heads, ffn_hidden, vocab, sequence = (int(row[key]) for key in sizes)
    if row["style"] not in ("gpt", "llama"):
        raise UserError(f"models.csv: style of {row['model']} must be gpt or llama, not {row['style']!r}")
    gpt = row["style"] == "gpt"
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_hidden=ffn_hidden,
        vocab=vocab,
        sequence_length=sequence,
        activation="gelu" if gpt else "swiglu",
        norm="layernorm" if gpt else "rmsnorm",
        positions="learned" if gpt else "rope",
        max_positions=sequence if gpt else 0,
        tied_embeddings=gpt,
        qkv_bias=gpt,
        attention_output_bias=gpt,
        mlp_bias=gpt,
        name=row["model"],
    )


def load_tables(folder: Path | None = None) -> list[PublishedTable]:
    """Every published table, or those of a folder with tables.csv, models.csv, runs.csv (and pass_times.csv) alike.

    Raises:
        UserError: a file is missing, or a row names an unknown model, table or assumption.
    """
    models = published_models(folder)
    runs = read_rows("runs.csv", folder)
    has_passes = folder is None or (folder / "pass_times.csv").is_file()
    passes = _passes(folder) if has_passes else {}
    tables = read_rows("tables.csv", folder)
    known = {row["table"] for row in tables}
    for row in runs:
        if row["table"] not in known:
            raise UserError(f"runs.csv: no table {row['table']!r} in tables.csv; known: {', '.join(sorted(known))}")
        if row["model"] not in models:
            raise UserError(f"runs.csv: no model {row['model']!r} in models.csv; known: {', '.join(sorted(models))}")
    return [_table(row, [run for run in runs if run["table"] == row["table"]], models, passes) for row in tables]


def _passes(folder: Path | None) -> dict[tuple[str, str, int], MeanPasses]:
    found = {}
    for row in read_rows("pass_times.csv", folder):
        times = (float(row[key]) / 1e3 for key in ("forward_ms", "backward_ms", "weight_ms", "message_ms"))
        found[row["table"], row["model"], int(row["microbatches"])] = MeanPasses(*times)
    return found


def _table(
    row: dict[str, str],
    runs: list[dict[str, str]],
    models: dict[str, ModelSpec],
    passes: dict[tuple[str, str, int], MeanPasses],
) -> PublishedTable:
    base = with_settings(stack(row["stack"]), row["assumptions"])
    return PublishedTable(
        name=row["table"],
        source=row["source"],
        device=row["device"],
        memory_unit=row["memory_unit"],
        fitted=tuple(_words(row["fitted"])),
        fit_rows=tuple(_words(row["fit_rows"])),
        fixed={key: float(value) for key, value in _pairs(row["fixed"])},
        runs=tuple(
            _run(
                run, row, base, models[run["model"]], passes.get((row["table"], run["model"], int(run["microbatches"])))
            )
            for run in runs
        ),
    )


def _run(
    run: dict[str, str], table: dict[str, str], base: Assumptions, model: ModelSpec, passes: MeanPasses | None
) -> PublishedRun:
    tp, pp, dp, held, samples, m = (
        int(run[key]) for key in ("tp", "pp", "dp", "stages_per_device", "micro_batch_size", "microbatches")
    )
    assumptions = with_settings(base, run["assumptions"])
    if run["recompute"] == "selective":
        assumptions = replace(assumptions, selective_recompute=True)
    plan = Plan(
        pp=pp,
        tp=tp,
        dp=dp,
        micro_batch_size=samples,
        microbatches=m,
        schedule=run["schedule"],
        stages_per_device=held,
        layer_split=spread_layers(model.layers, pp * held),
        recompute="full" if run["recompute"] == "full" else "none",
    )
    per_node = int(table["devices_per_node"])
    cluster = ClusterSpec(
        nodes=-(-plan.devices // per_node),
        devices_per_node=per_node,
        device=table["device"],
        memory_limit_bytes=None,
        intra_node=Link(float(table["intra_latency"]), float(table["intra_bandwidth"])),
        inter_node=Link(float(table["inter_latency"]), float(table["inter_bandwidth"])),
    )
    batch = samples * m * dp
    step = float(run["step_time_s"]) if run["step_time_s"] else None
    if run["samples_per_gpu_s"]:
        step = batch / (float(run["samples_per_gpu_s"]) * plan.devices)
    memory = float(run["peak_memory"]) * UNITS[table["memory_unit"]] if run["peak_memory"] else None
    return PublishedRun(
        row=_row_name(model.name, plan, run["recompute"]),
        model=model,
        cluster=cluster,
        training=TrainingSpec(global_batch_size=batch, dtype="bfloat16"),
        plan=plan,
        assumptions=assumptions,
        step_time_s=step,
        peak_memory_bytes=memory,
        passes=passes,
    )


def _row_name(model: str, plan: Plan, recompute: str) -> str:
    name = f"{model}/tp{plan.tp} pp{plan.pp} dp{plan.dp}"
    if plan.pp > 1 and (plan.schedule != "1f1b" or plan.tp == 1 == plan.dp):
        name += f" {plan.schedule} m{plan.microbatches}"
    return name if recompute == "none" else f"{name} {recompute}"


def with_settings(assumptions: Assumptions, settings: str) -> Assumptions:
    """`assumptions` with `name=value;name=value` applied; values are true, false, none, numbers or words.

    Raises:
        UserError: no assumption of that name, or a value it can't have.
    """
    kinds = get_type_hints(Assumptions)
    changes: dict[str, Any] = {}
    for key, value in _pairs(settings):
        if key not in kinds:
            raise UserError(f"no assumption {key!r}; known: {', '.join(sorted(kinds))}")
        changes[key] = _value(key, value, kinds[key])
    return replace(assumptions, **changes)


def _value(key: str, text: str, kind: Any) -> Any:
    """`text` as a value of the assumption's type."""
    legal = get_args(kind) if get_origin(kind) is Literal else ()
    if legal:
        if text in legal:
            return text
        raise UserError(f"{key} must be one of {', '.join(legal)}, not {text!r}")
    word = text.lower()
    if kind is bool:
        if word in ("true", "false"):
            return word == "true"
        raise UserError(f"{key} must be true or false, not {text!r}")
    if word == "none" and type(None) in get_args(kind):
        return None
    try:
        number = float(text) if kind is float else int(text)
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise UserError(f"{key} must be a {'number' if kind is float else 'whole number'} of at least 0, not {text!r}")
    return number


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(";") if word.strip()]


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for word in _words(text):
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is no setting: write name=value")
        yield key.strip(), value.strip()
