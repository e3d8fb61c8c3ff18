"""The rules that refuse a point of the search space, each with an id and a message that shows the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, get_args

from autotune.schedules import registry
from autotune.schedules.placement import make_placement, shares_ends
from autotune.space.cluster import ClusterSpec
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, Recompute
from autotune.space.training import TrainingSpec

__all__ = [
    "RULES",
    "BrokenRule",
    "Point",
    "Rule",
    "broken_rules",
    "derive_dp",
    "derive_microbatches",
    "plan_problems",
]


class Point(NamedTuple):
    """The searched values of one point, with what follows from them.

    Attributes:
        dp: devices / (pp tp); None when that is no whole number.
        microbatches: global_batch_size / (dp micro_batch_size); None when that is no whole number.
    """

    pp: int
    tp: int
    dp: int | None
    micro_batch_size: int
    microbatches: int | None
    schedule: str
    stages_per_device: int
    recompute: Recompute


class BrokenRule(NamedTuple):
    """A rule that a point breaks: its id, and why, with the numbers."""

    rule: str
    message: str


Check = Callable[[Point, ModelSpec, ClusterSpec, TrainingSpec], str | None]


@dataclass(frozen=True)
class Rule:
    """A named demand on a point.

    Attributes:
        demand: what the rule asks, in words, for the documentation.
        problem: why a point breaks the rule, or None. A rule whose numbers don't exist (no dp, no microbatch count)
            has nothing to say; the rule that made them missing speaks.
    """

    id: str
    demand: str
    problem: Check


def derive_dp(pp: int, tp: int, cluster: ClusterSpec) -> int | None:
    """Data-parallel degree, so that every device is used; None when pp x tp doesn't divide the devices."""
    dp, rest = divmod(cluster.devices, pp * tp)
    return None if rest else dp


def derive_microbatches(dp: int | None, micro_batch_size: int, training: TrainingSpec) -> int | None:
    """Microbatches of one step and replica; None when they wouldn't add up to the global batch exactly."""
    if dp is None:
        return None
    microbatches, rest = divmod(training.global_batch_size, dp * micro_batch_size)
    return None if rest or not microbatches else microbatches


def broken_rules(
    point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec
) -> tuple[BrokenRule, ...]:
    """Every rule that `point` breaks, in the order of `RULES`; empty for a legal point."""
    return tuple(
        BrokenRule(rule.id, message)
        for rule in RULES
        if (message := rule.problem(point, model, cluster, training)) is not None
    )


def plan_problems(plan: Plan, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> tuple[str, ...]:
    """Why a plan that no space made can't run: numbers that don't fit each other, and the rules it breaks."""
    numbers = ("pp", "tp", "dp", "micro_batch_size", "microbatches", "stages_per_device")
    wrong = [name for name in numbers if type(getattr(plan, name)) is not int or getattr(plan, name) < 1]
    if wrong:
        return tuple(f"{name} must be a whole number from 1 up, not {getattr(plan, name)!r}" for name in wrong)
    if plan.recompute not in get_args(Recompute):
        return (f"recompute must be one of {', '.join(get_args(Recompute))}, not {plan.recompute!r}",)
    dp = derive_dp(plan.pp, plan.tp, cluster)
    microbatches = derive_microbatches(dp, plan.micro_batch_size, training)
    point = Point(
        plan.pp,
        plan.tp,
        dp,
        plan.micro_batch_size,
        microbatches,
        str(plan.schedule),
        plan.stages_per_device,
        plan.recompute,
    )
    found = [message for _, message in broken_rules(point, model, cluster, training)]
    if found:
        return tuple(found)
    if plan.dp != dp:
        found.append(f"pp {plan.pp} x tp {plan.tp} x dp {plan.dp} must be the {cluster.devices} devices: dp is {dp}")
    elif plan.microbatches != microbatches:
        found.append(
            f"dp {dp} x micro_batch_size {plan.micro_batch_size} x microbatches {plan.microbatches} must be "
            f"global_batch_size {training.global_batch_size}: microbatches is {microbatches}"
        )
    split = plan.layer_split
    whole = all(type(layers) is int and layers >= 0 for layers in split)
    if not whole or len(split) != plan.stages or sum(split) != model.layers:
        found.append(f"layer_split must give {plan.stages} stages {model.layers} layers in all, not {list(split)}")
    return tuple(found)


def _world(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    if point.dp is not None:
        return None
    return f"pp {point.pp} x tp {point.tp} = {point.pp * point.tp} doesn't divide {cluster.devices} devices"


def _tp_divides(what: str, size: Callable[[ModelSpec], int]) -> Check:
    def problem(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
        if size(model) % point.tp == 0:
            return None
        return f"tp {point.tp} doesn't divide {size(model)} {what}"

    return problem


def _tp_kv_heads(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    # without grouped queries the key/value heads are the heads, and tp-heads has said it
    if model.kv_heads == model.heads or model.kv_heads % point.tp == 0:
        return None
    return f"tp {point.tp} doesn't divide {model.kv_heads} key/value heads"


def _layers_cover_stages(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    stages = point.pp * point.stages_per_device
    if stages <= model.layers:
        return None
    return (
        f"pp {point.pp} x {point.stages_per_device} stages per device = {stages} stages, "
        f"more than {model.layers} layers"
    )


def _global_batch(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    if point.dp is None or point.microbatches is not None:
        return None
    step = point.dp * point.micro_batch_size
    return (
        f"dp {point.dp} x micro_batch_size {point.micro_batch_size} = {step} "
        f"doesn't divide global_batch_size {training.global_batch_size}"
    )


def _schedule_stages(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    return registry.find(point.schedule).stages_problem(point.stages_per_device)


def _schedule_microbatches(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    if point.microbatches is None:
        return None
    return registry.find(point.schedule).microbatches_problem(point.pp, point.microbatches)


def _schedule_size(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    if point.pp > MAX_PP:
        return f"a pipeline of {point.pp:,} devices, more than the {MAX_PP:,} that are simulated"
    if point.microbatches is None:
        return None
    kinds = 3 if registry.find(point.schedule).split_backward else 2
    passes = kinds * point.pp * point.stages_per_device * point.microbatches
    if passes <= MAX_PASSES:
        return None
    return (
        f"{point.pp:,} x {point.stages_per_device:,} stages and {point.microbatches:,} microbatches make {passes:,} "
        f"passes a step, more than the {MAX_PASSES:,} that are simulated; a larger micro_batch_size or dp makes fewer"
    )


def _tied_embeddings(point: Point, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    if not model.tied_embeddings or training.sum_tied_gradients:
        return None
    # Where there is no placement, or none that anyone could list, the other rules speak.
    if any(rule(point, model, cluster, training) for rule in (_layers_cover_stages, _schedule_stages, _schedule_size)):
        return None
    placement = make_placement(registry.find(point.schedule).placement, point.pp, point.stages_per_device)
    if shares_ends(placement):
        return None
    return (
        f"the tied embedding lies on devices {placement[0]} and {placement[-1]} under {point.schedule}, "
        "and the worker doesn't add its two gradients (training.sum_tied_gradients: false)"
    )


# What the simulator builds, checks and times in a few seconds; a search does so for every different pipeline.
MAX_PASSES = 1_000_000
# Latencies are a table of every pair of pipeline devices.
MAX_PP = 2048


RULES: tuple[Rule, ...] = (
    Rule("world", "pp x tp divides the devices, so that pp x tp x dp uses all of them", _world),
    Rule("tp-heads", "tp divides the attention heads", _tp_divides("attention heads", lambda model: model.heads)),
    Rule("tp-kv-heads", "tp divides the key/value heads of a grouped-query model", _tp_kv_heads),
    Rule("tp-hidden", "tp divides the hidden size", _tp_divides("hidden", lambda model: model.hidden)),
    Rule("tp-ffn", "tp divides ffn_hidden", _tp_divides("ffn_hidden", lambda model: model.ffn_hidden)),
    Rule(
        "sequence-parallel",
        "tp divides sequence_length, which it shards between the matrices",
        _tp_divides("tokens of a sequence", lambda model: model.sequence_length),
    ),
    Rule("layers-cover-stages", "every one of pp x stages_per_device stages has a layer", _layers_cover_stages),
    Rule("global-batch", "dp x micro_batch_size x microbatches is exactly global_batch_size", _global_batch),
    Rule("schedule-stages", "the schedule runs with that many stages per device", _schedule_stages),
    Rule("schedule-microbatches", "the schedule runs with that many microbatches", _schedule_microbatches),
    Rule(
        "schedule-size",
        f"a step has at most {MAX_PASSES:,} passes, and a pipeline {MAX_PP:,} devices",
        _schedule_size,
    ),
    Rule(
        "tied-embeddings",
        "a tied embedding lies on one device, or the worker adds its gradients",
        _tied_embeddings,
    ),
)
