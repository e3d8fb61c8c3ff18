"""What `search --dry-run` says: the model, what the rules refuse and why, and every legal plan. Nothing is run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from autotune.space.model import padded_vocab
from autotune.space.plan import Plan
from autotune.space.rules import RULES
from autotune.space.space import Candidate, Space
from autotune.space.units import format_bytes, format_count

__all__ = ["describe_space", "description_lines"]


def describe_space(space: Space) -> dict[str, Any]:
    """The dry run as plain JSON values.

    Keys: name, model (with parameters), vocab_by_tp (padded rows and the parameters they make), cluster (its `machine`
    is null where predictions take the catalogue's figures), training, notes, points, legal, refused, refused_by_rule (a
    point that breaks two rules counts under both) with an example message each, and plans, each with its fingerprint.
    """
    candidates = list(space.candidates())
    plans = [candidate.plan for candidate in candidates if candidate.plan is not None]
    return {
        "name": space.name,
        "model": _model(space),
        "vocab_by_tp": [_vocab(space, tp) for tp in sorted(set(space.search.tp))],
        "cluster": _cluster(space),
        "training": {
            "global_batch_size": space.training.global_batch_size,
            "tokens_per_step": space.training.global_batch_size * space.model.sequence_length,
            "dtype": space.training.dtype,
            "optimizer": space.training.optimizer,
        },
        "notes": list(space.notes),
        "points": len(candidates),
        "legal": len(plans),
        "refused": len(candidates) - len(plans),
        "refused_by_rule": _refused_by_rule(candidates),
        "plans": [plan.to_dict() | {"fingerprint": space.fingerprint(plan)} for plan in plans],
    }


def _model(space: Space) -> dict[str, Any]:
    model = space.model
    keys = ("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "sequence_length")
    shape = {key: getattr(model, key) for key in (*keys, "activation", "norm", "positions", "tied_embeddings")}
    return shape | {"parameters": model.parameter_count()}


def _vocab(space: Space, tp: int) -> dict[str, int]:
    rows = padded_vocab(space.model.vocab, tp)
    return {"tp": tp, "padded_vocab": rows, "parameters": space.model.parameter_count(rows)}


def _cluster(space: Space) -> dict[str, Any]:
    cluster = space.cluster
    keys = ("nodes", "devices_per_node", "devices", "device", "memory_limit_bytes")
    return {key: getattr(cluster, key) for key in keys} | {
        "links": {"intra_node": asdict(cluster.intra_node), "inter_node": asdict(cluster.inter_node)},
        "machine": None if space.machine is None else asdict(space.machine),
    }


def _refused_by_rule(candidates: list[Candidate]) -> list[dict[str, Any]]:
    counts = Counter(rule for candidate in candidates for rule, _ in candidate.broken)
    examples: dict[str, str] = {}
    for candidate in candidates:
        for rule, message in candidate.broken:
            examples.setdefault(rule, message)
    own = [rule.id for rule in RULES]
    rules = [*own, *(rule for rule in examples if rule not in own)]  # then those of a worker
    return [{"rule": rule, "count": counts[rule], "example": examples[rule]} for rule in rules if counts[rule]]


def description_lines(space: Space) -> list[str]:
    """The dry run as lines of text."""
    data = describe_space(space)
    lines = [f"space {data['name']}", *_head_lines(space, data), *(f"  note     {note}" for note in space.notes), ""]
    lines.append(f"{data['points']} points: {data['legal']} legal plans, {data['refused']} refused")
    lines += _rule_lines(data["refused_by_rule"])
    lines.append("")
    plans = [Plan.from_dict({k: v for k, v in plan.items() if k != "fingerprint"}) for plan in data["plans"]]
    lines += _plan_lines(plans, [plan["fingerprint"] for plan in data["plans"]])
    return lines


def _head_lines(space: Space, data: dict[str, Any]) -> list[str]:
    model, cluster, training = space.model, space.cluster, data["training"]
    heads = f"{model.heads} heads" + (f" ({model.kv_heads} kv)" if model.kv_heads != model.heads else "")
    tied = ", tied embeddings" if model.tied_embeddings else ""
    parameters = data["model"]["parameters"]
    lines = [
        f"  model    {model.name}: {parameters:,} parameters ({format_count(parameters)}), {model.layers} layers, "
        f"hidden {model.hidden}, {heads} of {model.head_dim}, ffn {model.ffn_hidden}, {model.activation}, "
        f"{model.norm}, {model.positions}{tied}",
    ]
    for entry in data["vocab_by_tp"]:
        padded = "" if entry["padded_vocab"] == model.vocab else f" padded from {model.vocab}"
        lines.append(
            f"  tp {entry['tp']:<5} vocab {entry['padded_vocab']:,}{padded}, {entry['parameters']:,} parameters"
        )
    limit = cluster.memory_limit_bytes
    memory = "no memory limit" if limit is None else f"{format_bytes(limit)} each"
    machines = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device}"
    lines.append(f"  cluster  {machines} = {cluster.devices} devices, {memory}")
    if (figures := space.machine) is not None:
        reached = [figures.peak(dtype) * figures.efficiency / 1e9 for dtype in ("float32", "bfloat16")]
        lines.append(
            f"  machine  {figures.name}: float32 {reached[0]:,.1f} GFLOP/s, half precision {reached[1]:,.1f} GFLOP/s, "
            f"memory {figures.memory_bytes_per_s / 1e9:,.1f} GB/s, by the space file"
        )
    lines.append(
        f"  step     {training['global_batch_size']} samples of {model.sequence_length} tokens = "
        f"{training['tokens_per_step']:,} tokens, {training['dtype']}, {training['optimizer']}"
    )
    return lines


def _rule_lines(refused: list[dict[str, Any]]) -> list[str]:
    if not refused:
        return []
    width = max(len(entry["rule"]) for entry in refused)
    return [f"  {entry['count']:>6}  {entry['rule']:<{width}}  such as: {entry['example']}" for entry in refused]


def _plan_lines(plans: list[Plan], fingerprints: list[str]) -> list[str]:
    if not plans:
        return ["no legal plan: loosen the lists or the batch size by what the rules above say"]
    header = ("pp", "tp", "dp", "mbs", "m", "schedule", "v", "recompute", "layer_split", "fingerprint")
    rows = [
        (
            str(plan.pp),
            str(plan.tp),
            str(plan.dp),
            str(plan.micro_batch_size),
            str(plan.microbatches),
            plan.schedule,
            str(plan.stages_per_device),
            plan.recompute,
            "-".join(map(str, plan.layer_split)),
            fingerprint,
        )
        for plan, fingerprint in zip(plans, fingerprints, strict=True)
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
