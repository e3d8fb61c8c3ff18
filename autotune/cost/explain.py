"""A prediction as text: where the step goes, and what fills every device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autotune.cost.memory import MEMORY_ERROR, OVER_LIMIT
from autotune.cost.predict import Prediction
from autotune.space.units import format_bytes

__all__ = ["explain", "over_limit_legend", "prediction_row", "summary_line", "to_dict"]


def prediction_row(prediction: Prediction) -> dict[str, float | int]:
    """The columns that a results table takes from a prediction."""
    parts = {f"predicted_{name}": value for name, value in asdict(prediction.breakdown).items()}
    return {
        "predicted_step_time_s": prediction.step_time_s,
        "predicted_peak_memory_bytes": prediction.peak_memory_bytes,
        **parts,
    }


def over_limit_legend(limit_bytes: float) -> str:
    """What `OVER_LIMIT` on a plan's line means."""
    return (
        f"{OVER_LIMIT}: the predicted peak is over the memory limit of {format_bytes(limit_bytes)}, but by no more "
        f"than the model's error ({MEMORY_ERROR:.0%}), so the plan isn't refused"
    )


def summary_line(prediction: Prediction, limit_bytes: float | None = None) -> str:
    """One line: the plan, its step time, throughput, utilisation, bubble and peak memory.

    Args:
        limit_bytes: memory of a device; a plan that is over it, but not refused, is marked `OVER_LIMIT`.
    """
    return (
        f"{prediction.plan.describe()}: {_time(prediction.step_time_s)} a step, "
        f"{prediction.tokens_per_s:,.0f} tokens/s, MFU {prediction.mfu:.1%}, bubble {prediction.bubble_rate:.1%}, "
        f"peak {format_bytes(prediction.peak_memory_bytes)} on device {prediction.heaviest}"
        + (f", {OVER_LIMIT}" if prediction.is_over(limit_bytes) else "")
    )


def explain(prediction: Prediction, limit_bytes: float | None = None) -> str:
    """The whole prediction: summary, breakdown of the step, pass times of every stage, memory of every device.

    Args:
        limit_bytes: memory of a device; devices above it are marked.
    """
    lines = [summary_line(prediction, limit_bytes), ""]
    lines += [*_step_lines(prediction), "", *_stage_lines(prediction), "", *_memory_lines(prediction, limit_bytes)]
    refusal = prediction.refusal(limit_bytes)
    if refusal:
        lines += ["", refusal]
    return "\n".join(lines)


def _step_lines(prediction: Prediction) -> list[str]:
    names = {
        "compute_s": "compute",
        "tp_s": "tensor-parallel collectives",
        "pp_s": "bubble: messages under way",
        "overhead_s": "fixed loss a stage visit",
        "bubble_s": "bubble: waiting for passes",
        "dp_s": "data-parallel traffic",
        "optimizer_s": "optimizer",
    }
    how = "simulated in full" if prediction.exact else "extrapolated from shorter steps"
    lines = [f"Step of the busiest pipeline device ({prediction.busiest}), {how}:"]
    for name, value in asdict(prediction.breakdown).items():
        lines.append(f"  {names[name]:<28} {_time(value):>10}  {value / prediction.step_time_s:6.1%}")
    lines.append(f"  {'step':<28} {_time(prediction.step_time_s):>10}")
    parts = prediction.breakdown
    lines.append(
        f"Bubble rate {prediction.bubble_rate:.1%}: {_time(parts.bubble_s + parts.pp_s)} of the "
        f"{_time(parts.pipeline_s)} of the pipeline, which is the step without data-parallel traffic and optimizer."
    )
    return lines


def _stage_lines(prediction: Prediction) -> list[str]:
    costs, plan = prediction.pass_costs, prediction.plan
    lines = ["Stages, one microbatch:", f"  {'stage':>5} {'layers':>6} {'F':>10} {'B':>10} {'W':>10} {'held':>11}"]
    for stage, layers in enumerate(plan.layer_split):
        lines.append(
            f"  {stage:>5} {layers:>6} {_time(costs.forward[stage]):>10} {_time(costs.backward[stage]):>10} "
            f"{_time(costs.weight[stage]):>10} {format_bytes(costs.activation[stage]):>11}"
        )
    return lines


def _memory_lines(prediction: Prediction, limit_bytes: float | None) -> list[str]:
    names = list(prediction.memory[0].__dataclass_fields__)
    lines = ["Peak memory of each pipeline device:"]
    lines.append(f"  {'device':>6} {'total':>11} " + " ".join(f"{name:>11}" for name in names))
    for device, memory in enumerate(prediction.memory):
        sizes = " ".join(f"{format_bytes(getattr(memory, name)):>11}" for name in names)
        mark = "  heaviest" if device == prediction.heaviest else ""
        if limit_bytes is not None and memory.total > limit_bytes:
            mark += f"  above the limit of {format_bytes(limit_bytes)}"
        lines.append(f"  {device:>6} {format_bytes(memory.total):>11} {sizes}{mark}")
    return lines


def to_dict(prediction: Prediction, limit_bytes: float | None = None) -> dict[str, Any]:
    """Plain JSON values of a prediction; times in seconds, sizes in bytes."""
    return {
        "plan": prediction.plan.to_dict(),
        "step_time_s": prediction.step_time_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "bubble_rate": prediction.bubble_rate,
        "pipeline_s": prediction.breakdown.pipeline_s,
        "exact": prediction.exact,
        "busiest_device": prediction.busiest,
        "breakdown_s": {name.removesuffix("_s"): value for name, value in asdict(prediction.breakdown).items()},
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "heaviest_device": prediction.heaviest,
        "memory_bytes": [memory.parts() | {"total": memory.total} for memory in prediction.memory],
        "stages": [
            {"layers": layers, "forward_s": f, "backward_s": b, "weight_s": w, "held_bytes": held, "kept_bytes": kept}
            for layers, f, b, w, held, kept in zip(
                prediction.plan.layer_split,
                prediction.pass_costs.forward,
                prediction.pass_costs.backward,
                prediction.pass_costs.weight,
                prediction.pass_costs.activation,
                prediction.pass_costs.kept,
                strict=True,
            )
        ],
        "memory_limit_bytes": limit_bytes,
        "fits": prediction.fits(limit_bytes),
        "refusal": prediction.refusal(limit_bytes),
    }


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
