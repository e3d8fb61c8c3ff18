"""torchtitan overrides say exactly the plan, or the export refuses with the reason."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from autotune.errors import UserError
from autotune.export.exporter import export_plan, render_plan
from autotune.export.job import Job, make_job
from autotune.export.schedule_csv import schedule_csv
from autotune.export.torchtitan import torchtitan_overrides, torchtitan_problems
from autotune.space.plan import spread_layers
from autotune.space.space import load_space

ROOT = Path(__file__).parents[2]
PARALLELISM = "--parallelism."


def options(job: Job) -> dict[str, str]:
    """Option -> value; the subcommand, which must be last, under 'checkpoint'."""
    *overrides, subcommand = torchtitan_overrides(job)
    pairs = [override.removeprefix("--").partition(" ")[::2] for override in overrides]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs) | {"checkpoint": subcommand}


def test_degrees_and_batch_are_those_of_the_plan(job_of: Any) -> None:
    given = options(job_of(pp=2, tp=2, dp=2, micro_batch_size=2, microbatches=4, training={"dtype": "bfloat16"}))
    expected = {
        "training.local_batch_size": "8",  # one step of one replica
        "training.global_batch_size": "16",
        "training.seq_len": "64",
        "training.mixed_precision_param": "bfloat16",
        "parallelism.pipeline_parallel_degree": "2",
        "parallelism.tensor_parallel_degree": "2",
        "parallelism.data_parallel_shard_degree": "2",
        "parallelism.data_parallel_replicate_degree": "1",
        "parallelism.pipeline_parallel_microbatch_size": "2",
        "parallelism.fsdp_reshard_after_forward": "never",
        "checkpoint": "activation-checkpoint:none",
    }
    assert expected.items() <= given.items()


def test_without_a_pipeline_microbatches_become_gradient_accumulation(job_of: Any) -> None:
    given = options(job_of(pp=1, dp=2, micro_batch_size=2, microbatches=4))
    assert given["training.local_batch_size"] == "2"
    assert given["training.global_batch_size"] == "16"
    assert not [name for name in given if name.startswith("parallelism.pipeline_parallel_") and "degree" not in name]


def test_full_recompute_is_full_activation_checkpointing(job_of: Any) -> None:
    assert options(job_of(recompute="full"))["checkpoint"] == "activation-checkpoint:full"


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "name", "table"),
    [
        ("1f1b", 1, 4, "1F1B", False),
        ("1f1b", 1, 2, "1F1B", True),  # torch's own refuses fewer microbatches than stages
        ("gpipe", 1, 4, "GPipe", False),
        ("interleaved-1f1b", 2, 4, "Interleaved1F1B", False),
        ("zb-h1", 1, 8, "1F1B", True),
        ("zb-h2", 1, 8, "1F1B", True),
        ("interleaved-zb", 2, 8, "PipelineScheduleMulti", True),
        ("zb-v", 2, 8, "ZBVZeroBubble", True),
        ("v-half", 2, 8, "ZBVZeroBubble", True),
        ("v-min", 2, 8, "ZBVZeroBubble", True),
    ],
)
def test_every_schedule_has_its_name_and_its_table(
    schedule: str, stages: int, microbatches: int, name: str, table: bool, job_of: Any
) -> None:
    job = job_of(schedule, pp=4, stages=stages, microbatches=microbatches)
    given = options(job)
    assert given["parallelism.pipeline_parallel_schedule"] == name
    assert torch_schedules.get_schedule_class(name) is not None
    files = render_plan(job.space, job.plan, "torchtitan")
    assert ("schedule.csv" in files) is table
    assert ("parallelism.pipeline_parallel_schedule_csv" in given) is table
    if table:
        assert files["schedule.csv"] == schedule_csv(job.schedule)
        assert '"$here/schedule.csv"' in files["train_torchtitan.sh"]


def titan_stages(given: dict[str, str], layers: int, pp: int) -> tuple[int, ...]:
    """Layers of every stage as torchtitan 0.3.0 makes them from its options, written after its documentation:
    embedding and head count as so many layers, stages share alike, the first ones take the rest."""
    first = int(given["parallelism.pipeline_parallel_first_stage_less_layers"])
    last = int(given["parallelism.pipeline_parallel_last_stage_less_layers"])
    per_stage = given.get("parallelism.pipeline_parallel_layers_per_stage")
    single = given["parallelism.pipeline_parallel_schedule"] in ("1F1B", "GPipe")
    stages = -(-(layers + first + last) // int(per_stage)) if per_stage else pp * (1 if single else 2)
    assert stages % pp == 0
    assert (stages == pp) is single
    queue = ["embedding"] * first + ["layer"] * layers + ["head"] * last
    share, rest = divmod(len(queue), stages)
    split = []
    for stage in range(stages):
        size = share + (1 if stage < rest else 0)
        split.append(queue[:size].count("layer"))
        queue = queue[size:]
    return tuple(split)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("v-half", 2)])
def test_torchtitan_splits_the_layers_as_the_plan_does(schedule: str, stages: int, pp: int, job_of: Any) -> None:
    for layers in range(pp * stages, pp * stages * 3):
        job = job_of(schedule, pp=pp, stages=stages, microbatches=2 * pp, model={"layers": layers})
        assert titan_stages(options(job), layers, pp) == job.plan.layer_split == spread_layers(layers, pp * stages)


@pytest.mark.parametrize(
    ("schedule", "stages", "split"), [("1f1b", 1, (1, 2, 4, 1)), ("interleaved-1f1b", 3, (1,) * 9 + (2, 1, 1))]
)
def test_a_split_that_options_cannot_say_becomes_a_config_module(
    schedule: str, stages: int, split: tuple[int, ...], job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = sum(split)
    job = job_of(schedule, pp=4, stages=stages, split=split, model={"layers": layers})
    assert not [name for name in options(job) if "layers" in name]
    export_plan(job.space, job.plan, "torchtitan", tmp_path)
    assert "MODULE=autotune_split CONFIG=plan" in (tmp_path / "train_torchtitan.sh").read_text()

    (tmp_path / "my_configs.py").write_text(
        "from types import SimpleNamespace\n"
        "def base():\n    return SimpleNamespace(parallelism=SimpleNamespace(module_fqns_per_model_part=None))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BASE_MODULE", "my_configs")
    monkeypatch.setenv("BASE_CONFIG", "base")
    monkeypatch.delitem(sys.modules, "autotune_split", raising=False)
    monkeypatch.delitem(sys.modules, "my_configs", raising=False)
    importlib.invalidate_caches()
    parts = importlib.import_module("autotune_split").plan().parallelism.module_fqns_per_model_part
    assert tuple(sum(name.startswith("layers.") for name in names) for names in parts) == split
    assert [name for names in parts for name in names] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(layers)),
        "norm",
        "lm_head",
    ]


def test_tied_embeddings_across_a_pipeline_are_refused() -> None:
    space = load_space(ROOT / "search_spaces" / "qwen3-0.6b-64xh100.yaml")
    plans = {plan.pp: plan for plan in space.plans()}
    assert "tie" in torchtitan_problems(make_job(space, plans[2]))[0]
    assert torchtitan_problems(make_job(space, plans[1])) == []
    assert 'MODULE="${MODULE:-qwen3}"' in render_plan(space, plans[1], "torchtitan")["train_torchtitan.sh"]


def test_models_that_torchtitan_lacks_are_refused_with_every_difference(tmp_path: Path) -> None:
    space = load_space(ROOT / "search_spaces" / "gpt2-cpu.yaml")
    plan = next(plan for plan in space.plans() if plan.pp == 2)
    with pytest.raises(UserError) as caught:
        export_plan(space, plan, "torchtitan", tmp_path / "out")
    for reason in ("gelu", "layernorm", "learned", "biases", "tie"):
        assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_printed_list_and_the_script_say_the_same(job_of: Any) -> None:
    job = job_of("1f1b", pp=2)
    files = render_plan(job.space, job.plan, "torchtitan")
    assert files["torchtitan_overrides.txt"].splitlines() == torchtitan_overrides(job)
    for override in torchtitan_overrides(job):
        assert f"  {override}\n" in files["train_torchtitan.sh"]
