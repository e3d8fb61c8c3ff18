"""Takes the options of Megatron-LM's `pretrain_gpt.py` and prints the log lines it prints, without training anything.

It shows how a real Megatron-LM job is searched, on any machine and in seconds: `megatron-fake.yaml` beside. Times and
memory follow a simple formula of the options, so that plans differ as they would: pipeline bubble, collectives of
tensor parallelism, activations of the microbatches in flight.

Two options are its own: `--fake-ranks N` prints what all N ranks would (else RANK and WORLD_SIZE of a launcher count),
and `--fake-memory-gib X` ends a rank that needs more than X GiB with a MemoryError.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from datetime import datetime

FLOPS = 150e12  # a device's, while it computes
FIXED_BYTES = 2 * 2**30  # context and libraries


def parse() -> argparse.Namespace:
    """The options; like the original it refuses those it doesn't know."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    whole = (
        "tensor-model-parallel-size pipeline-model-parallel-size num-layers hidden-size ffn-hidden-size vocab-size "
        "num-attention-heads num-query-groups kv-channels seq-length max-position-embeddings micro-batch-size "
        "global-batch-size train-iters log-interval make-vocab-size-divisible-by rotary-base seed "
        "num-layers-per-virtual-pipeline-stage decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
        "recompute-num-layers rotary-seq-len-interpolation-factor fake-ranks"
    )
    real = "norm-epsilon rotary-percent lr attention-dropout hidden-dropout rope-scaling-factor fake-memory-gib"
    text = (
        "normalization position-embedding-type optimizer tokenizer-type recompute-granularity recompute-method "
        "pipeline-model-parallel-layout"
    )
    flags = (
        "sequence-parallel use-distributed-optimizer swiglu disable-bias-linear add-qkv-bias no-bias-gelu-fusion bf16 "
        "untie-embeddings-and-output-weights group-query-attention qk-layernorm mock-data use-rope-scaling"
    )
    for kind, names in ((int, whole), (float, real), (str, text)):
        for name in names.split():
            parser.add_argument(f"--{name}", type=kind)
    for name in flags.split():
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    needed = "num_layers hidden_size seq_length micro_batch_size global_batch_size train_iters vocab_size"
    for name in needed.split():
        if getattr(options, name) is None:
            parser.error(f"the following arguments are required: --{name.replace('_', '-')}")
    return options


@dataclass(frozen=True)
class Job:
    """Degrees and sizes of one run."""

    options: argparse.Namespace
    world: int

    @property
    def tp(self) -> int:
        return self.options.tensor_model_parallel_size or 1

    @property
    def pp(self) -> int:
        return self.options.pipeline_model_parallel_size or 1

    @property
    def dp(self) -> int:
        if self.world % (self.tp * self.pp):
            raise RuntimeError(f"world size ({self.world}) is not divisible by {self.tp} x {self.pp}")
        return self.world // (self.tp * self.pp)

    @property
    def chunks(self) -> int:
        per_chunk = self.options.num_layers_per_virtual_pipeline_stage
        return self.options.num_layers // self.pp // per_chunk if per_chunk else 1

    @property
    def microbatches(self) -> int:
        samples = self.options.micro_batch_size * self.dp
        if self.options.global_batch_size % samples:
            raise RuntimeError(f"global batch size is not divisible by {samples}")
        return self.options.global_batch_size // samples

    @property
    def layer_parameters(self) -> float:
        o = self.options
        return 4 * o.hidden_size**2 + 3 * o.hidden_size * (o.ffn_hidden_size or 4 * o.hidden_size)

    def step_s(self) -> float:
        """One iteration: microbatches and bubble of the pipeline, then the gradients' reduction."""
        o = self.options
        tokens = o.micro_batch_size * o.seq_length
        layer_s = 6 * tokens * self.layer_parameters / self.tp / FLOPS
        if self.tp > 1:
            layer_s += 8 * tokens * o.hidden_size * 2 / 200e9
        if o.recompute_granularity == "full":
            layer_s *= 4 / 3
        stage_s = layer_s * o.num_layers / self.pp + 200e-6 * self.chunks
        pipeline_s = stage_s * (self.microbatches + (self.pp - 1) / self.chunks)
        parameters = self.layer_parameters * o.num_layers / self.pp / self.tp
        return pipeline_s + (parameters * 4 / 20e9 if self.dp > 1 else 0.0)

    def peak_bytes(self, stage: int) -> int:
        """Of a rank of pipeline stage `stage`: weights, gradients, optimizer, activations in flight."""
        o = self.options
        parameters = self.layer_parameters * o.num_layers / self.pp / self.tp
        if stage in (0, self.pp - 1):
            parameters += o.vocab_size * o.hidden_size / self.tp
        optimizer = 12 / self.dp if o.use_distributed_optimizer else 12
        in_flight = min(self.microbatches, self.pp - stage)
        per_layer = o.micro_batch_size * o.seq_length * o.hidden_size * (2 if o.recompute_granularity else 34) / self.tp
        held = in_flight * (1 + (self.pp - 1) / self.pp / self.chunks if self.chunks > 1 else 1)
        return round(FIXED_BYTES + parameters * (6 + optimizer) + held * per_layer * o.num_layers / self.pp)


def main() -> None:
    options = parse()
    world = options.fake_ranks or int(os.environ.get("WORLD_SIZE", "1"))
    ranks = range(world) if options.fake_ranks else [int(os.environ.get("RANK", "0"))]
    job = Job(options, world)
    step_s, interval = job.step_s(), options.log_interval or 100
    if job.chunks > 1 and job.microbatches % job.pp:
        raise RuntimeError("number of microbatches is not divisible by the pipeline size with interleaving")
    for rank in ranks:
        stage, limit = rank // (job.tp * job.dp), options.fake_memory_gib
        if limit is not None and job.peak_bytes(stage) > limit * 2**30:
            raise MemoryError(f"rank {rank} needs {job.peak_bytes(stage) / 2**30:.2f} GiB of {limit:g} GiB")
    spent_s = 0.0
    for iteration in range(1, options.train_iters + 1):
        spent_s += step_s * (3.0 if iteration == 1 else 1.0 + 0.002 * (iteration % 3))  # the first one warms up
        if iteration % interval:
            continue
        if world - 1 in ranks:
            print(_iteration_line(options, iteration, spent_s / interval * 1000), flush=True)
        if iteration == interval:
            for rank in ranks:
                if rank // job.tp % job.dp == 0:
                    print(_memory_line(rank, iteration, job.peak_bytes(rank // (job.tp * job.dp))), flush=True)
        spent_s = 0.0
        time.sleep(0.001)


def _iteration_line(options: argparse.Namespace, iteration: int, milliseconds: float) -> str:
    batch = options.global_batch_size
    return (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration:8d}/{options.train_iters:8d} |"
        f" consumed samples: {iteration * batch:12d} | elapsed time per iteration (ms): {milliseconds:.1f} |"
        f" learning rate: {options.lr or 1e-4:.6E} | global batch size: {batch:5d} |"
        f" lm loss: {11.0 - 0.1 * iteration:.6E} | loss scale: 1.0 | grad norm: 1.234 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def _memory_line(rank: int, iteration: int, peak: int) -> str:
    mib = peak / 2**20
    return (
        f"[Rank {rank}] (after {iteration} iterations) memory (MB) | allocated: {0.6 * mib:.2f} |"
        f" max allocated: {mib:.2f} | reserved: {1.05 * mib:.2f} | max reserved: {1.05 * mib:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
