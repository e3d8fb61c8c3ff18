"""Export to Megatron-LM: the argument list of `pretrain_gpt.py`, or why Megatron-LM can't run the plan.

Option names are those of Megatron-LM main, core 0.20 dev of August 2026 (latest release then: megatron-core 0.19.2).
"""

from __future__ import annotations

import shlex

from autotune.errors import UserError
from autotune.export.job import Job, own_worker_note
from autotune.export.script import launch_script, shell_array
from autotune.space.model import ModelSpec, padded_vocab
from autotune.space.rope import RopeScaling

__all__ = ["megatron_arguments", "megatron_files", "megatron_problems"]

_ZERO_BUBBLE = "--enable-zero-bubble --zero-bubble-max-pending-backward"
_V_SHAPED = "--enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup"

# Nearest flags in the zero-bubble fork of Megatron-LM (sail-sg/zero-bubble-pipeline-parallelism)
_FORK_FLAGS = {
    "zb-h1": f"{_ZERO_BUBBLE} {{pp}}",
    "zb-1p": f"{_ZERO_BUBBLE} {{pp}}",
    "zb-h2": f"{_ZERO_BUBBLE} {{twice}}",
    "zb-2p": f"{_ZERO_BUBBLE} {{twice}}",
    "zb": f"{_ZERO_BUBBLE} auto",
    "zb-v": f"{_V_SHAPED} zb",
    "v-zb": f"{_V_SHAPED} zb",
    "v-half": f"{_V_SHAPED} half",
    "v-min": f"{_V_SHAPED} min",
    "1f1b-v": "--enable-1f1b-v",
    "gis": "--interleave-group-size N",
    "gis-h": "--interleave-group-size N",
}


def megatron_problems(job: Job) -> list[str]:
    """Every reason why Megatron-LM can't run the plan; empty if it can."""
    return [*_schedule_problems(job), *_model_problems(job.space.model)]


def _schedule_problems(job: Job) -> list[str]:
    plan = job.plan
    if plan.schedule not in ("1f1b", "interleaved-1f1b"):
        reason = f"Megatron-LM runs 1F1B and interleaved 1F1B, not {plan.schedule}"
        fork = _FORK_FLAGS.get(plan.schedule)
        if fork is None:
            return [reason]
        flags = fork.format(pp=plan.pp, twice=2 * plan.pp)
        return [
            f"{reason}; its zero-bubble fork (sail-sg/zero-bubble-pipeline-parallelism) has a like schedule under "
            f"{flags}, and so has AMD's Primus"
        ]
    if plan.stages_per_device > 1 and plan.microbatches % plan.pp:
        return [
            f"interleaving needs microbatches to be a multiple of pp {plan.pp} in Megatron-LM, not {plan.microbatches}"
        ]
    return []


def _model_problems(model: ModelSpec) -> list[str]:
    problems = []
    if model.parallel_residual:
        problems.append("Megatron-LM has no parallel residual (attention and MLP of one block reading the same input)")
    if _bias_flags(model) is None:
        problems.append(
            f"Megatron-LM sets biases for qkv alone or for all linear layers, not qkv_bias {model.qkv_bias}, "
            f"attention_output_bias {model.attention_output_bias}, mlp_bias {model.mlp_bias}"
        )
    if model.gelu_tanh and not model.mlp_bias:
        problems.append("Megatron-LM has the tanh approximation of gelu only fused with a bias, and the MLP has none")
    if model.positions == "rope" and model.rope_theta != int(model.rope_theta):
        problems.append(f"Megatron-LM reads --rotary-base as a whole number, not {model.rope_theta}")
    if model.rope_scaling is not None and not _megatron_scaling(model.rope_scaling):
        problems.append(f"Megatron-LM has no such rope scaling: {model.rope_scaling}")
    return problems


def megatron_arguments(job: Job) -> list[str]:
    """The argument list, an option and its values a string.

    Raises:
        UserError: Megatron-LM can't run the plan; every reason is listed.
    """
    problems = megatron_problems(job)
    if problems:
        raise UserError(f"can't export {job.plan.describe()} to Megatron-LM:\n  " + "\n  ".join(problems))
    return [*_parallel_arguments(job), *_model_arguments(job.space.model), *_training_arguments(job)]


def _parallel_arguments(job: Job) -> list[str]:
    plan = job.plan
    arguments = [
        f"--tensor-model-parallel-size {plan.tp}",
        f"--pipeline-model-parallel-size {plan.pp}",
        *_split_arguments(job),
    ]
    if plan.tp > 1:
        arguments.append("--sequence-parallel")
    if plan.dp > 1:
        arguments.append("--use-distributed-optimizer")
    if plan.recompute == "full":
        arguments += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return arguments


def _split_arguments(job: Job) -> list[str]:
    """At most one way to say the stages: even ones by number, others by first and last count, or the full layout."""
    plan, split = job.plan, job.plan.layer_split
    if len(set(split)) == 1:
        return [f"--num-layers-per-virtual-pipeline-stage {split[0]}"] if plan.stages_per_device > 1 else []
    if plan.stages_per_device == 1 and len(set(split[1:-1])) <= 1:
        return [
            f"--decoder-first-pipeline-num-layers {split[0]}",
            f"--decoder-last-pipeline-num-layers {split[-1]}",
        ]
    stages = ["t" * layers for layers in split]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return [f"--pipeline-model-parallel-layout {'|'.join(stages)}"]


def _model_arguments(model: ModelSpec) -> list[str]:
    arguments = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn_hidden}",
        f"--num-attention-heads {model.heads}",
        f"--kv-channels {model.head_dim}",
    ]
    if model.kv_heads != model.heads:
        arguments += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    arguments += [
        f"--seq-length {model.sequence_length}",
        f"--max-position-embeddings {max(model.max_positions, model.sequence_length)}",
        f"--vocab-size {model.vocab}",
        "--make-vocab-size-divisible-by 1",  # padded to a multiple of tp and no more, as in the study
        f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}",
        f"--norm-epsilon {model.norm_epsilon:g}",
        *_position_arguments(model),
        *_activation_arguments(model),
        *(_bias_flags(model) or ()),
    ]
    if model.qk_norm:
        arguments.append("--qk-layernorm")
    if not model.tied_embeddings:
        arguments.append("--untie-embeddings-and-output-weights")
    return arguments


def _position_arguments(model: ModelSpec) -> list[str]:
    if model.positions == "learned":
        return ["--position-embedding-type learned_absolute"]
    return [
        "--position-embedding-type rope",
        f"--rotary-base {int(model.rope_theta)}",
        f"--rotary-percent {model.rotary_fraction:g}",
        *(_megatron_scaling(model.rope_scaling) if model.rope_scaling else ()),
    ]


def _megatron_scaling(scaling: RopeScaling) -> tuple[str, ...]:
    """Options of a rope scaling; empty if Megatron-LM can't express it (its llama3 factors are fixed)."""
    if scaling.kind == "linear":
        whole = scaling.factor == int(scaling.factor)
        return (f"--rotary-seq-len-interpolation-factor {int(scaling.factor)}",) if whole else ()
    fixed = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_positions) == (1.0, 4.0, 8192)
    return ("--use-rope-scaling", f"--rope-scaling-factor {scaling.factor:g}") if fixed else ()


def _activation_arguments(model: ModelSpec) -> list[str]:
    if model.activation == "swiglu":
        return ["--swiglu"]
    # the fused bias and gelu is the tanh approximation, the unfused one is exact
    return [] if model.gelu_tanh else ["--no-bias-gelu-fusion"]


def _bias_flags(model: ModelSpec) -> tuple[str, ...] | None:
    """Flags for the model's biases; None if there are none for this combination."""
    return {
        (False, False, False): ("--disable-bias-linear",),
        (True, False, False): ("--disable-bias-linear", "--add-qkv-bias"),
        (True, True, True): (),
    }.get((model.qkv_bias, model.attention_output_bias, model.mlp_bias))


def _training_arguments(job: Job) -> list[str]:
    plan, training = job.plan, job.space.training
    arguments = [
        f"--micro-batch-size {plan.micro_batch_size}",
        f"--global-batch-size {training.global_batch_size}",
        "--optimizer adam",  # Megatron-LM's adam decays weights apart from the gradient: AdamW
        "--attention-dropout 0",
        "--hidden-dropout 0",
        f"--seed {max(1, training.seed)}",  # 0 is refused
    ]
    return [*arguments, "--bf16"] if training.dtype == "bfloat16" else arguments


def megatron_files(job: Job, python: str) -> dict[str, str]:
    """`megatron_args.txt`, the argument list, and `train_megatron.sh`, which runs `pretrain_gpt.py` with it.

    Raises:
        UserError: Megatron-LM can't run the plan.
    """
    arguments = megatron_arguments(job)
    remarks = [
        "Trains with Megatron-LM: set MEGATRON to its checkout. Data, tokenizer, learning rate and length of training",
        "are yours: pass them as arguments. For a trial: --mock-data --tokenizer-type NullTokenizer --train-iters 10",
        f"--lr 1e-4. {_vocabulary(job)}",
        *filter(None, [own_worker_note(job)]),
    ]
    body = (
        shell_array("arguments", [" ".join(map(shlex.quote, argument.split(" "))) for argument in arguments])
        + '\nexport CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"  # for tp overlap\n'
        + 'pretrain="${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}/pretrain_gpt.py"\n'
        + 'exec "${torchrun[@]}" "$pretrain" "${arguments[@]}" "$@"\n'
    )
    return {
        "megatron_args.txt": "\n".join(arguments) + "\n",
        "train_megatron.sh": launch_script(job, "train_megatron.sh", python, body, remarks),
    }


def _vocabulary(job: Job) -> str:
    rows = padded_vocab(job.space.model.vocab, job.plan.tp)
    if job.evaluated in (None, "not evaluated"):
        return f"The plan is for {rows} rows of vocabulary."
    return f"The plan was {job.evaluated} with {rows} rows of vocabulary."
