"""The hybrid grid of "Pipeline Parallelism with Controllable Memory" (98.5B on 40 A100), predicted.

    python benchmarks/prediction_grid.py

Prints the six methods at the published plan beside the paper's MFU, the best plans that fit, and the gain of the best
over the best 1F1B. Machine numbers are those fitted to the same group's zero-bubble runs (`autotune validate`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.cost.assumptions import ZERO_BUBBLE
from autotune.cost.devices import machine
from autotune.cost.explain import summary_line
from autotune.cost.predict import Predictor
from autotune.space.space import load_space

SPACE = Path(__file__).parents[1] / "search_spaces/paper-98b-a100.yaml"
PAPER_MFU = {
    ("1f1b", "none"): 49.81,
    ("1f1b", "full"): 37.15,
    ("zb-1p", "none"): 54.52,
    ("v-half", "none"): 52.60,
    ("v-min", "none"): 48.02,
    ("v-zb", "none"): 57.58,
}
EFFICIENCY = 0.727  # zero-bubble: step time, fitted


def main() -> None:
    """Prints the comparison."""
    space = load_space(SPACE)
    software = replace(ZERO_BUBBLE, sequence_parallel=True, sharding="zero1")
    figures = machine(space.cluster.device).with_numbers(efficiency=EFFICIENCY)
    predictor = Predictor(space.model, space.cluster, space.training, software, figures)
    predictions = {plan: predictor.predict(plan, exact=True) for plan in space.plans()}
    at_published = {
        (plan.schedule, plan.recompute): p
        for plan, p in predictions.items()
        if (plan.pp, plan.dp, plan.micro_batch_size) == (5, 2, 2)
    }
    base = at_published["1f1b", "none"].mfu
    print("At dp 2, tp 4, pp 5, micro-batch 2: MFU % and its ratio to 1F1B's (paper: arXiv 2405.15362, section 4)")
    for method, paper in PAPER_MFU.items():
        got = at_published[method]
        ratio, published = got.mfu / base, paper / PAPER_MFU["1f1b", "none"]
        print(
            f"  {' '.join(method):<12} {100 * got.mfu:6.2f} (paper {paper:5.2f})   ratio {ratio:.3f} "
            f"(paper {published:.3f}, {ratio - published:+.3f})   peak {got.peak_memory_bytes / 1024**3:.1f} GiB"
        )
    limit = space.cluster.memory_limit_bytes
    fitting = sorted((p for p in predictions.values() if p.refusal(limit) is None), key=lambda p: p.step_time_s)
    plain = next(p for p in fitting if p.plan.schedule == "1f1b")
    published = at_published["1f1b", "none"]
    print(
        f"Of {len(predictions)} plans {len(fitting)} fit {limit / 1024**3 if limit else 0:.0f} GiB; the five fastest:"
    )
    for prediction in fitting[:5]:
        print("  " + summary_line(prediction))
    print(f"Best 1F1B: {summary_line(plain)}")
    print(f"The published 1F1B plan takes {published.step_time_s / plain.step_time_s - 1:+.2%} against it.")
    print(f"Best plan over best 1F1B: {plain.step_time_s / fitting[0].step_time_s - 1:+.1%} (paper: +15.6 %).")


if __name__ == "__main__":
    main()
