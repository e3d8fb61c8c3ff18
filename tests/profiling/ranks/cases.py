"""The plans whose gradients are proved, shared by the test and by the ranks it launches. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from searched import SEARCHED, searched_schedule

from autotune.profiling.protocol import TrialRequest
from autotune.schedules.registry import SCHEDULES, build
from autotune.schedules.schedule import Schedule
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, Recompute, spread_layers
from autotune.space.rope import RopeScaling
from autotune.space.training import DType, TrainingSpec

# Vocabularies are odd, so tp 2 pads them. The four differ in every detail a ModelSpec has.
LLAMA = ModelSpec(
    name="llama",
    layers=4,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn_hidden=24,
    vocab=61,
    sequence_length=8,
    rope_theta=50.0,
    rope_scaling=RopeScaling("llama3", 4.0, original_positions=24),
)
GPT2 = ModelSpec(
    name="gpt2",
    layers=4,
    hidden=16,
    heads=2,
    kv_heads=2,
    head_dim=8,
    ffn_hidden=32,
    vocab=53,
    sequence_length=8,
    activation="gelu",
    norm="layernorm",
    positions="learned",
    tied_embeddings=True,
    max_positions=12,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    gelu_tanh=True,
)
NEOX = ModelSpec(
    name="neox",
    layers=4,
    hidden=16,
    heads=2,
    kv_heads=2,
    head_dim=8,
    ffn_hidden=32,
    vocab=47,
    sequence_length=8,
    activation="gelu",
    norm="layernorm",
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    parallel_residual=True,
    rotary_fraction=0.5,
)
QWEN3 = ModelSpec(
    name="qwen3",
    layers=4,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn_hidden=24,
    vocab=51,
    sequence_length=8,
    qk_norm=True,
    tied_embeddings=True,
    rope_theta=1e6,
    norm_epsilon=1e-6,
)
FAMILIES = {spec.name: spec for spec in (LLAMA, GPT2, NEOX, QWEN3)}

# (pp, dp, tp): what the proof covers.
DEGREES = ((2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 2, 1))


@dataclass(frozen=True)
class Case:
    """One plan to prove.

    Attributes:
        layers: of the model, if not the usual number.
        seed: of the engine's search, for the schedule `best`.
        perturbed: one weight of one rank is changed before the step, so the proof must fail (negative control).
    """

    schedule: str
    pp: int
    dp: int
    tp: int
    family: str
    recompute: Recompute = "none"
    perturbed: bool = False
    dtype: DType = "float32"
    layers: int | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        parts = [self.schedule, f"pp{self.pp}", f"dp{self.dp}", f"tp{self.tp}", self.family]
        parts += [] if self.layers is None else [f"{self.layers}layers"]
        parts += [] if self.seed is None else [f"seed{self.seed}"]
        parts += ["recompute"] * (self.recompute == "full") + ["bf16"] * (self.dtype == "bfloat16")
        return "-".join(parts + ["perturbed"] * self.perturbed)

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def request(self) -> TrialRequest:
        """8 layers and 16 samples at pp 4, half of both below; 4 microbatches at pp 2 and 8 at pp 4."""
        size = 4 if self.pp == 4 else 2
        schedule = self._schedule(2 * size)
        # Stages of unequal depth where the engine made many.
        layers = self.layers or max(2 * size, schedule.stages + (schedule.stages > 4))
        spec = replace(FAMILIES[self.family], layers=layers)
        plan = Plan(
            pp=self.pp,
            tp=self.tp,
            dp=self.dp,
            micro_batch_size=2 // self.dp,
            microbatches=schedule.microbatches,
            schedule=self.schedule,
            stages_per_device=schedule.stages_per_device,
            layer_split=spread_layers(layers, schedule.stages),
            recompute=self.recompute,
        )
        link = Link(0.0, 1e9)
        return TrialRequest(
            trial=0,
            plan=plan,
            schedule=schedule,
            model=spec,
            cluster=ClusterSpec(1, self.world, "cpu", None, link, link),
            training=TrainingSpec(global_batch_size=2 * schedule.microbatches, dtype=self.dtype),
        )

    def _schedule(self, microbatches: int) -> Schedule:
        if self.seed is not None:
            return searched_schedule(self.seed, self.pp)
        return build(self.schedule, self.pp, microbatches, SCHEDULES[self.schedule].min_stages_per_device)


def all_cases() -> list[Case]:
    """Every schedule with every degree; families and recomputation take turns so that each meets each degree."""
    families = list(FAMILIES)
    cases = []
    for i, schedule in enumerate(SCHEDULES):
        for j, (pp, dp, tp) in enumerate(DEGREES):
            recompute: Recompute = "full" if (i + 2 * j) % 5 == 0 else "none"
            cases.append(Case(schedule, pp, dp, tp, families[(i + j) % 4], recompute))
    # A long pipeline with tensor parallelism, and stages of unequal depth.
    cases += [Case("zb-v", 4, 1, 2, "gpt2"), Case("1f1b", 4, 1, 2, "qwen3"), Case("v-half", 4, 1, 2, "llama", "full")]
    cases += [Case("zb-v", 2, 1, 1, "neox", layers=7), Case("interleaved-1f1b", 2, 2, 1, "gpt2", layers=5)]
    # pp = 1 is one plan whatever its schedule.
    cases += [Case("1f1b", 1, 2, 1, "gpt2"), Case("1f1b", 1, 1, 2, "qwen3"), Case("1f1b", 1, 2, 2, "llama")]
    return cases


def searched_cases() -> list[Case]:
    """What the engine finds; mostly pipelines alone, some with data and tensor parallelism."""
    families = list(FAMILIES)
    cases = []
    for seed, pp in SEARCHED:
        dp, tp = {1: (2, 1), 2: (1, 2)}.get(seed % 5, (1, 1)) if pp == 2 else (1, 1)
        cases.append(Case("best", pp, dp, tp, families[seed % 4], seed=seed))
    return cases


def controls() -> list[Case]:
    """Cases that must fail the comparison."""
    return [
        Case("zb-h1", 2, 1, 1, "llama", perturbed=True),
        Case("v-min", 2, 1, 2, "gpt2", perturbed=True),
        Case("1f1b", 2, 2, 1, "neox", perturbed=True),
    ]


def bfloat16_cases() -> list[Case]:
    """bfloat16 plans, whose gradients can only be as near as bfloat16 is."""
    return [
        Case("zb-h1", 2, 1, 1, "llama", dtype="bfloat16"),
        Case("v-min", 2, 1, 2, "gpt2", "full", dtype="bfloat16"),
        Case("1f1b", 2, 2, 1, "qwen3", dtype="bfloat16"),
        Case("zb-v", 2, 2, 1, "neox", dtype="bfloat16"),
        Case("1f1b", 1, 2, 2, "qwen3", dtype="bfloat16"),
    ]
