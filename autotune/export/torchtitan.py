"""Export to torchtitan 0.3.0: option overrides and the schedule table, or why torchtitan can't run the plan."""

from __future__ import annotations

import math

from autotune.errors import UserError
from autotune.export.job import Job, own_worker_note
from autotune.export.schedule_csv import schedule_csv
from autotune.export.script import launch_script, shell_array
from autotune.export.titan_split import SPLIT_MODULE, split_module
from autotune.schedules import registry
from autotune.schedules.placement import shares_ends
from autotune.space.model import ModelSpec

__all__ = [
    "SCHEDULE_CSV",
    "torchtitan_files",
    "torchtitan_needs_module",
    "torchtitan_overrides",
    "torchtitan_problems",
    "torchtitan_uses_table",
]

SCHEDULE_CSV = "schedule.csv"

# With a table, torchtitan's schedule name only fixes how many stages a rank has and where they lie.
_NAME_BY_PLACEMENT = {"linear": "1F1B", "loop": "PipelineScheduleMulti", "v": "ZBVZeroBubble"}
_OWN_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}


def torchtitan_problems(job: Job) -> list[str]:
    """Every reason why torchtitan 0.3.0 can't run the plan; empty if it can."""
    model, plan = job.space.model, job.plan
    problems = [f"torchtitan has no such model: {reason}" for reason in _model_differences(model)]
    if model.tied_embeddings and plan.pp > 1:
        problems.append(f"torchtitan doesn't tie embeddings across a pipeline (pp {plan.pp})")
    return problems


def _model_differences(model: ModelSpec) -> list[str]:
    """In what the model isn't of torchtitan's dense families (llama3, qwen3)."""
    checks = [
        (model.activation != "swiglu", f"activation {model.activation}, its dense models have swiglu"),
        (model.norm != "rmsnorm", f"norm {model.norm}, its dense models have rmsnorm"),
        (model.positions != "rope", f"positions {model.positions}, its dense models have rope"),
        (model.rotary_fraction != 1.0, f"rope on {model.rotary_fraction:g} of a head, its dense models turn all"),
        (model.parallel_residual, "parallel residual"),
        (
            model.qkv_bias or model.attention_output_bias or model.mlp_bias,
            "biases in linear layers, its dense models have none",
        ),
    ]
    return [reason for differs, reason in checks if differs]


def torchtitan_uses_table(job: Job) -> bool:
    """Whether torchtitan needs our table; gpipe, 1F1B and interleaved 1F1B it builds itself.

    torch's own 1F1B refuses fewer microbatches than stages; by table it runs.
    """
    plan = job.plan
    if plan.pp == 1:
        return False
    return plan.schedule not in _OWN_SCHEDULES or (plan.schedule == "1f1b" and plan.microbatches < plan.pp)


def _schedule_name(job: Job) -> str:
    if not torchtitan_uses_table(job):
        return _OWN_SCHEDULES[job.plan.schedule]
    return _NAME_BY_PLACEMENT[_placement(job)]


def _placement(job: Job) -> str:
    """Placement of a schedule that may have no name in the registry."""
    if job.plan.schedule in registry.SCHEDULES:
        return registry.find(job.plan.schedule).placement
    if job.schedule.stages_per_device == 1:
        return "linear"
    return "v" if shares_ends(job.schedule.placement) else "loop"


def torchtitan_overrides(job: Job, csv_path: str = SCHEDULE_CSV) -> list[str]:
    """The overrides, an option and its value a string; the activation-checkpoint subcommand stands last, as it must.

    Where no options make the plan's layer split they say nothing of it; `torchtitan_files` writes a config module then.

    Args:
        csv_path: where the schedule table will lie.

    Raises:
        UserError: torchtitan can't run the plan; every reason is listed.
    """
    problems = torchtitan_problems(job)
    if problems:
        raise UserError(f"can't export {job.plan.describe()} to torchtitan:\n  " + "\n  ".join(problems))
    return [
        *_batch_overrides(job),
        *_parallel_overrides(job),
        *_pipeline_overrides(job, csv_path),
        "--compile.no-enable",  # as in the study; a split backward refuses compiled stages
        "activation-checkpoint:full" if job.plan.recompute == "full" else "activation-checkpoint:none",
    ]


def _batch_overrides(job: Job) -> list[str]:
    plan, space = job.plan, job.space
    # without a pipeline the microbatches are torchtitan's gradient accumulation
    local = plan.micro_batch_size * (plan.microbatches if plan.pp > 1 else 1)
    return [
        f"--training.local_batch_size {local}",
        f"--training.global_batch_size {space.training.global_batch_size}",
        f"--training.seq_len {space.model.sequence_length}",
        f"--training.mixed_precision_param {space.training.dtype}",
    ]


def _parallel_overrides(job: Job) -> list[str]:
    plan = job.plan
    return [
        "--parallelism.data_parallel_replicate_degree 1",
        f"--parallelism.data_parallel_shard_degree {plan.dp}",
        "--parallelism.fsdp_reshard_after_forward never",
        f"--parallelism.tensor_parallel_degree {plan.tp}",
        "--parallelism.enable_sequence_parallel",
        "--parallelism.context_parallel_degree 1",
        f"--parallelism.pipeline_parallel_degree {plan.pp}",
    ]


def _pipeline_overrides(job: Job, csv_path: str) -> list[str]:
    if job.plan.pp == 1:
        return []
    overrides = [
        f"--parallelism.pipeline_parallel_schedule {_schedule_name(job)}",
        f"--parallelism.pipeline_parallel_microbatch_size {job.plan.micro_batch_size}",
        *(_split_overrides(job) or ()),
    ]
    if torchtitan_uses_table(job):
        overrides.append(f"--parallelism.pipeline_parallel_schedule_csv {csv_path}")
    return overrides


def _split_overrides(job: Job) -> list[str] | None:
    """Options under which torchtitan splits the layers as the plan does; None if there are none.

    torchtitan counts the embedding and the head as some layers each (0 or 1 are tried here), gives every stage its
    share, the first ones one more while there is a rest, and takes the weights off again
    (`_generate_llm_fqn_per_model_part` of torchtitan 0.3.0).
    """
    plan = job.plan
    stages, layers = plan.stages, sum(plan.layer_split)
    for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        weighted = layers + first + last
        share, rest = divmod(weighted, stages)
        split = [share + (stage < rest) for stage in range(stages)]
        split[0] -= first
        split[-1] -= last
        if tuple(split) != plan.layer_split or share < max(first, last):
            continue
        options = [
            f"--parallelism.pipeline_parallel_first_stage_less_layers {first}",
            f"--parallelism.pipeline_parallel_last_stage_less_layers {last}",
        ]
        per_stage = math.ceil(weighted / stages)
        if math.ceil(weighted / per_stage) == stages:
            return [*options, f"--parallelism.pipeline_parallel_layers_per_stage {per_stage}"]
        if plan.stages_per_device == (1 if _schedule_name(job) in ("1F1B", "GPipe") else 2):
            return options  # torchtitan's own number of stages when layers_per_stage is not set
    return None


def torchtitan_files(job: Job, python: str) -> dict[str, str]:
    """`torchtitan_overrides.txt` and `train_torchtitan.sh`, which runs torchtitan with them.

    Where they are needed also `schedule.csv`, the passes, and `autotune_split.py`, the layers of every stage.

    Raises:
        UserError: torchtitan can't run the plan.
    """
    files = {
        "torchtitan_overrides.txt": "\n".join(torchtitan_overrides(job)) + "\n",
        "train_torchtitan.sh": _script(job, python),
    }
    if torchtitan_uses_table(job):
        files[SCHEDULE_CSV] = schedule_csv(job.schedule)
    if torchtitan_needs_module(job):
        files[f"{SPLIT_MODULE}.py"] = split_module(job.summary, job.plan.layer_split)
    return files


def torchtitan_needs_module(job: Job) -> bool:
    """Whether no options make the plan's layer split, so that `torchtitan_files` writes a config module for it."""
    return job.plan.pp > 1 and _split_overrides(job) is None


def _script(job: Job, python: str) -> str:
    model = job.space.model
    remarks = [
        "Trains with torchtitan 0.3.0. Set CONFIG to a config function of MODULE whose model has this shape:",
        f"{model.layers} layers, dim {model.hidden}, {model.heads} heads ({model.kv_heads} kv) of {model.head_dim}, "
        f"ffn {model.ffn_hidden}, vocabulary {model.vocab}.",
        "It must not set parallelism.module_fqns_per_model_part or another schedule table.",
        *filter(None, [own_worker_note(job)]),
    ]
    lines = [
        shell_array("overrides", torchtitan_overrides(job, f'"$here/{SCHEDULE_CSV}"')),
        f'MODULE="${{MODULE:-{"qwen3" if model.qk_norm else "llama3"}}}"',
        'CONFIG="${CONFIG:?set CONFIG to a config function, such as llama3_8b}"',
    ]
    if torchtitan_needs_module(job):
        lines += [
            f"# {SPLIT_MODULE}.py adds the layer split to that config",
            'export BASE_MODULE="$MODULE" BASE_CONFIG="$CONFIG" PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"',
            f"MODULE={SPLIT_MODULE} CONFIG=plan",
        ]
    lines.append(
        'exec "${torchrun[@]}" -m torchtitan.train --module "$MODULE" --config "$CONFIG" "$@" "${overrides[@]}"'
    )
    return launch_script(job, "train_torchtitan.sh", python, "\n".join(lines) + "\n", remarks)
