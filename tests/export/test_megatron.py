"""Megatron-LM arguments say exactly the plan, or the export refuses with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.export.exporter import export_plan, render_plan
from autotune.export.job import Job, make_job
from autotune.export.megatron import megatron_arguments, megatron_problems
from autotune.space.space import load_space

ROOT = Path(__file__).parents[2]


def options(job: Job) -> dict[str, str]:
    """Option -> value ('' for a flag); no option stands twice."""
    pairs = [argument.partition(" ")[::2] for argument in megatron_arguments(job)]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_degrees_batch_and_model_are_those_of_the_plan(job_of: Any) -> None:
    given = options(job_of(pp=4, tp=2, dp=2, micro_batch_size=2, microbatches=8, training={"dtype": "bfloat16"}))
    expected = {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--micro-batch-size": "2",
        "--global-batch-size": "32",
        "--sequence-parallel": "",
        "--use-distributed-optimizer": "",
        "--bf16": "",
        "--num-layers": "8",
        "--hidden-size": "128",
        "--ffn-hidden-size": "352",
        "--num-attention-heads": "4",
        "--kv-channels": "32",
        "--group-query-attention": "",
        "--num-query-groups": "2",
        "--seq-length": "64",
        "--max-position-embeddings": "64",
        "--vocab-size": "512",
        "--make-vocab-size-divisible-by": "1",
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--rotary-base": "10000",
        "--swiglu": "",
        "--disable-bias-linear": "",
        "--untie-embeddings-and-output-weights": "",
    }
    assert expected.items() <= given.items()
    assert not [name for name in given if "virtual" in name or "layout" in name or "decoder" in name]


def test_options_that_the_plan_does_not_need_are_absent(job_of: Any) -> None:
    given = options(job_of(pp=2))
    for name in ("--sequence-parallel", "--use-distributed-optimizer", "--bf16", "--recompute-granularity"):
        assert name not in given


def test_full_recompute_is_uniform_over_single_layers(job_of: Any) -> None:
    given = options(job_of(recompute="full"))
    assert given["--recompute-granularity"] == "full"
    assert given["--recompute-method"] == "uniform"
    assert given["--recompute-num-layers"] == "1"


def test_even_interleaving_is_said_by_layers_per_virtual_stage(job_of: Any) -> None:
    given = options(job_of("interleaved-1f1b", pp=2, stages=2))
    assert given["--num-layers-per-virtual-pipeline-stage"] == "2"
    assert not {"--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"} & set(given)


@pytest.mark.parametrize(
    ("layers", "pp", "first", "last"),
    [(6, 4, "1", "1"), (10, 4, "2", "2"), (11, 4, "3", "2"), (9, 2, "5", "4")],
)
def test_uneven_splits_with_an_even_middle_are_said_by_first_and_last(
    layers: int, pp: int, first: str, last: str, job_of: Any
) -> None:
    job = job_of(pp=pp, model={"layers": layers})
    given = options(job)
    assert given["--decoder-first-pipeline-num-layers"] == first
    assert given["--decoder-last-pipeline-num-layers"] == last
    middle = layers - int(first) - int(last)
    assert middle % max(1, pp - 2) == 0  # Megatron-LM's own condition
    assert (int(first), int(last)) == (job.plan.layer_split[0], job.plan.layer_split[-1])


@pytest.mark.parametrize(("schedule", "pp", "stages", "layers"), [("1f1b", 4, 1, 9), ("interleaved-1f1b", 2, 2, 7)])
def test_other_uneven_splits_are_said_by_the_layout(
    schedule: str, pp: int, stages: int, layers: int, job_of: Any
) -> None:
    job = job_of(schedule, pp=pp, stages=stages, model={"layers": layers})
    given = options(job)
    layout = given["--pipeline-model-parallel-layout"].split("|")
    assert tuple(stage.count("t") for stage in layout) == job.plan.layer_split
    assert (layout[0][0], layout[-1][-1]) == ("E", "L")
    assert not {
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--decoder-first-pipeline-num-layers",
    } & set(given)
    script = render_plan(job.space, job.plan, "megatron")["train_megatron.sh"]
    assert f"'{given['--pipeline-model-parallel-layout']}'" in script  # the bars would be pipes


@pytest.mark.parametrize(
    ("schedule", "stages", "flags"),
    [
        ("zb-h1", 1, "--enable-zero-bubble --zero-bubble-max-pending-backward 4"),
        ("zb-h2", 1, "--enable-zero-bubble --zero-bubble-max-pending-backward 8"),
        ("zb-v", 2, "--zero-bubble-v-schedule-mem-setup zb"),
        ("v-half", 2, "--zero-bubble-v-schedule-mem-setup half"),
        ("v-min", 2, "--zero-bubble-v-schedule-mem-setup min"),
    ],
)
def test_zero_bubble_and_v_schedules_are_refused_naming_the_fork_and_its_flags(
    schedule: str, stages: int, flags: str, job_of: Any, tmp_path: Path
) -> None:
    job = job_of(schedule, pp=4, stages=stages, microbatches=8)
    with pytest.raises(UserError) as caught:
        export_plan(job.space, job.plan, "megatron", tmp_path / "out")
    assert schedule in str(caught.value)
    assert "sail-sg" in str(caught.value)
    assert flags in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_gpipe_is_refused(job_of: Any) -> None:
    assert "not gpipe" in megatron_problems(job_of("gpipe"))[0]


def test_every_reason_is_listed(job_of: Any) -> None:
    job = job_of("zb-h1", model={"parallel_residual": True, "mlp_bias": True, "rope_theta": 0.5})
    with pytest.raises(UserError) as caught:
        megatron_arguments(job)
    for reason in ("zb-h1", "parallel residual", "biases", "rotary-base"):
        assert reason in str(caught.value)


def test_a_real_gpt2_has_megatrons_gpt2_options() -> None:
    space = load_space(ROOT / "search_spaces" / "gpt2-cpu.yaml")
    plan = next(plan for plan in space.plans() if plan.pp == 2 and plan.schedule == "1f1b")
    given = options(make_job(space, plan))
    assert given["--position-embedding-type"] == "learned_absolute"
    assert given["--max-position-embeddings"] == "1024"
    assert given["--normalization"] == "LayerNorm"
    assert given["--vocab-size"] == "50257"
    for absent in (
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--swiglu",
        "--no-bias-gelu-fusion",
        "--rotary-base",
    ):
        assert absent not in given


def test_a_real_qwen3_has_qk_norm_and_its_own_head_width() -> None:
    space = load_space(ROOT / "search_spaces" / "qwen3-0.6b-64xh100.yaml")
    plan = next(plan for plan in space.plans() if plan.schedule == "interleaved-1f1b" and plan.tp == 2)
    given = options(make_job(space, plan))
    assert given["--kv-channels"] == "128"
    assert "--qk-layernorm" in given
    assert given["--rotary-base"] == "1000000"


def test_the_printed_list_and_the_script_say_the_same(job_of: Any) -> None:
    job = job_of(pp=2, tp=2)
    files = render_plan(job.space, job.plan, "megatron")
    assert files["megatron_args.txt"].splitlines() == megatron_arguments(job)
    for argument in megatron_arguments(job):
        assert f"  {argument}\n" in files["train_megatron.sh"]


@pytest.mark.parametrize("evaluated", ["measured", "profiled", "predicted"])
def test_the_script_says_how_the_study_came_by_its_figures(job_of: Any, evaluated: Any) -> None:
    job = job_of()
    text = render_plan(job.space, job.plan, "megatron", evaluated=evaluated)["train_megatron.sh"]
    assert f"The plan was {evaluated} with 512 rows of vocabulary." in text
    assert ("was measured" in text) == (evaluated == "measured")
    never = render_plan(job.space, job.plan, "megatron", evaluated="not evaluated")["train_megatron.sh"]
    assert "The plan is for 512 rows of vocabulary." in never
