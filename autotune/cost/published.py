"""Published runs to hold predictions against: read from the package's CSV files, or from a folder of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from autotune.cost.assumptions import Assumptions, stack
from autotune.cost.devices import Machine, machine
from autotune.cost.predict import MeanPasses
from autotune.cost.published_rows import PublishedRow, read_rows
from autotune.errors import UserError
from autotune.schedules.registry import SCHEDULES
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


def published_models(folder: Path | None = None) -> dict[str, ModelSpec]:
    """The models of `models.csv` by name. Raises UserError for a wrong cell."""
    return {row.text("model"): _model(row) for row in read_rows("models.csv", folder)}


def _model(row: PublishedRow) -> ModelSpec:
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "sequence_length")
    layers, hidden, heads, kv_heads, ffn_hidden, vocab, sequence = map(row.integer, sizes)
    for column, parts, whole in (("heads", heads, hidden), ("kv_heads", kv_heads, heads)):
        if whole % parts:
            raise row.wrong(column, f"{parts} doesn't divide {whole}")
    gpt = row.word("style", ("gpt", "llama")) == "gpt"
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
        name=row.text("model"),
    )


def load_tables(folder: Path | None = None) -> list[PublishedTable]:
    """Every published table, or those of a folder with tables.csv, models.csv, runs.csv (and pass_times.csv) alike.

    Raises:
        UserError: a file is missing, or a cell is wrong; the message names file, line and column.
    """
    models = published_models(folder)
    runs = read_rows("runs.csv", folder)
    has_passes = folder is None or (folder / "pass_times.csv").is_file()
    passes = _passes(folder) if has_passes else {}
    tables = read_rows("tables.csv", folder)
    known = {row.text("table") for row in tables}
    for row in runs:
        row.word("table", tuple(known))
        row.word("model", tuple(models))
    return [
        _table(row, [run for run in runs if run.text("table") == row.text("table")], models, passes) for row in tables
    ]


def _passes(folder: Path | None) -> dict[tuple[str, str, int], MeanPasses]:
    found = {}
    for row in read_rows("pass_times.csv", folder):
        times = (row.number(column) / 1e3 for column in ("forward_ms", "backward_ms", "weight_ms", "message_ms"))
        found[row.text("table"), row.text("model"), row.integer("microbatches")] = MeanPasses(*times)
    return found


def _table(
    row: PublishedRow,
    runs: list[PublishedRow],
    models: dict[str, ModelSpec],
    passes: dict[tuple[str, str, int], MeanPasses],
) -> PublishedTable:
    with row.blamed("device"):
        figures = machine(row.text("device"))
    with row.blamed("stack"):
        software = stack(row.text("stack"))
    with row.blamed("assumptions"):
        base = with_settings(software, row.text("assumptions"))
    return PublishedTable(
        name=row.text("table"),
        source=row.text("source"),
        device=row.text("device"),
        memory_unit=row.word("memory_unit", tuple(UNITS)),
        fitted=_fitted(row, figures),
        fit_rows=tuple(_words(row.text("fit_rows"))),
        fixed=_fixed(row, figures),
        runs=tuple(
            _run(
                run,
                row,
                base,
                models[run.text("model")],
                passes.get((row.text("table"), run.text("model"), run.integer("microbatches"))),
            )
            for run in runs
        ),
    )


def _numbers_of(figures: Machine) -> list[str]:
    return [name for name in figures.__dataclass_fields__ if name != "name"]


def _fitted(row: PublishedRow, figures: Machine) -> tuple[str, ...]:
    known = _numbers_of(figures)
    for name in _words(row.text("fitted")):
        if name not in known:
            raise row.wrong("fitted", f"no machine number {name!r}; known: {', '.join(known)}")
    return tuple(_words(row.text("fitted")))


def _fixed(row: PublishedRow, figures: Machine) -> dict[str, float]:
    known, fixed = _numbers_of(figures), {}
    with row.blamed("fixed"):
        for name, text in _pairs(row.text("fixed")):
            if name not in known:
                raise UserError(f"no machine number {name!r}; known: {', '.join(known)}")
            try:
                fixed[name] = float(text)
            except ValueError:
                fixed[name] = -1.0
            if not 0 <= fixed[name] < float("inf"):
                raise UserError(f"{name} must be a finite number of at least 0, not {text!r}")
    return fixed


def _run(
    run: PublishedRow, table: PublishedRow, base: Assumptions, model: ModelSpec, passes: MeanPasses | None
) -> PublishedRun:
    columns = ("tp", "pp", "dp", "stages_per_device", "micro_batch_size", "microbatches")
    tp, pp, dp, held, samples, m = map(run.integer, columns)
    with run.blamed("assumptions"):
        assumptions = with_settings(base, run.text("assumptions"))
    recompute = run.word("recompute", ("none", "selective", "full"))
    if recompute == "selective":
        assumptions = replace(assumptions, selective_recompute=True)
    # The first and the last stage may hold embedding and head alone.
    if pp * held > model.layers + 2:
        raise run.wrong(
            "pp", f"{pp} devices with {held} stages each need {pp * held - 2} layers, the model has {model.layers}"
        )
    plan = Plan(
        pp=pp,
        tp=tp,
        dp=dp,
        micro_batch_size=samples,
        microbatches=m,
        schedule=run.word("schedule", tuple(SCHEDULES)),
        stages_per_device=held,
        layer_split=spread_layers(model.layers, pp * held),
        recompute="full" if recompute == "full" else "none",
    )
    per_node = table.integer("devices_per_node")
    cluster = ClusterSpec(
        nodes=-(-plan.devices // per_node),
        devices_per_node=per_node,
        device=table.text("device"),
        memory_limit_bytes=None,
        intra_node=_link(table, "intra"),
        inter_node=_link(table, "inter"),
    )
    batch = samples * m * dp
    step, rate, memory = map(run.positive, ("step_time_s", "samples_per_gpu_s", "peak_memory"))
    if rate is not None:
        step = batch / (rate * plan.devices)
    return PublishedRun(
        row=_row_name(model.name, plan, recompute),
        model=model,
        cluster=cluster,
        training=TrainingSpec(global_batch_size=batch, dtype="bfloat16"),
        plan=plan,
        assumptions=assumptions,
        step_time_s=step,
        peak_memory_bytes=None if memory is None else memory * UNITS[table.text("memory_unit")],
        passes=passes,
    )


def _link(table: PublishedRow, name: str) -> Link:
    bandwidth = table.positive(f"{name}_bandwidth")
    if bandwidth is None:
        raise table.wrong(f"{name}_bandwidth", "is empty")
    return Link(table.number(f"{name}_latency"), bandwidth)


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
