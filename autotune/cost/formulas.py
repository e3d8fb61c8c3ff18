"""Published memory formulas, evaluated by this package's functions: they check the implementation, not the truth.

Korthikanti et al. (arXiv 2205.05198), Figures 1 and 7: states are 18 bytes a parameter of the layers' matrices;
activations of the first device are those of L (1 + (p-1)/(p v)) layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.cost.activations import layer_held
from autotune.cost.assumptions import MEGATRON, Assumptions, Recomputation
from autotune.cost.parameters import layer_matrix_parameters
from autotune.cost.pipeline import pipeline
from autotune.cost.published import published_models, read_rows
from autotune.space.model import ModelSpec

__all__ = ["formula_figures", "layers_in_flight"]

GIB = 1024.0**3
SOURCE = "Korthikanti et al., arXiv 2205.05198"
TP_ONLY = replace(MEGATRON, attention="unfused", dropout=True, sequence_parallel=False, sharding="none")
WITH_SP = replace(TP_ONLY, sequence_parallel=True)
VARIANTS: dict[str, tuple[Assumptions, Recomputation]] = {
    "tp_only": (TP_ONLY, "none"),
    "sequence_parallel": (WITH_SP, "none"),
    "selective": (TP_ONLY, "selective"),
    "both": (WITH_SP, "selective"),
    "full": (TP_ONLY, "full"),
}

Rows = list[tuple[str, float, float]]


def layers_in_flight(model: ModelSpec, pp: int, stages_per_device: int) -> float:
    """Layers whose activations the first device holds at its peak, counted in the schedule itself."""
    if pp == 1:
        return float(model.layers)
    name = "1f1b" if stages_per_device == 1 else "interleaved-1f1b"
    order = pipeline(name, pp, 4 * pp, stages_per_device).orders[0]
    live = most = 0
    for code in order.codes[: order.first[1]]:
        live += 1 if code // order.microbatches // order.stages == 0 else -1
        most = max(most, live)
    return most * model.layers / (pp * stages_per_device)


BAR_STEP = 8 / 45
"""Points of a per cent that bars of Figure 7 are apart: every printed value is a whole number of them, to print.

So the figure's values are those of a drawing, not of the equations: no formula gives them to the last digit.
"""


def _note(rows: Rows, resolution: float | None = None) -> str:
    """How many rows agree with the print: to its last digit, or within the resolution of the figure."""
    exact = sum(round(ours, 2) == printed for _, ours, printed in rows)
    told = f"formulas of the authors, not runs; {exact} of {len(rows)} exact to print"
    if resolution is None:
        return told
    near = sum(abs(ours - printed) < resolution for _, ours, printed in rows)
    return f"{told}: the bars are drawn in steps of {resolution:.3f} points, {near} are within one step"


def formula_figures() -> Iterator[tuple[str, str, str, Rows, str]]:
    """(name, source, unit, rows of (row, ours, printed), note) of each figure."""
    states: Rows = []
    activations: Rows = []
    shares: Rows = []
    models = published_models()
    for row in read_rows("memory_formulas.csv"):
        model, tp, pp = models[row["model"]], int(row["tp"]), int(row["pp"])
        state = TP_ONLY.state_bytes("bfloat16", 1).total * layer_matrix_parameters(model) * model.layers / (tp * pp)
        states.append((model.name, state / GIB, float(row["states_gib"])))
        held = {
            name: layer_held(model, tp, int(row["micro_batch_size"]), "bfloat16", assumptions, recomputation)
            for name, (assumptions, recomputation) in VARIANTS.items()
        }
        layers = layers_in_flight(model, pp, int(row["stages_per_device"]))
        for name in ("tp_only", "both"):
            activations.append((f"{model.name} {name}", layers * held[name] / GIB, float(row[f"{name}_gib"])))
        for name in ("sequence_parallel", "selective", "both", "full"):
            share = 100 * held[name] / held["tp_only"]
            shares.append((f"{model.name} {name}", share, float(row[f"{name}_percent"])))
    yield "Figure 1: parameters and optimizer", SOURCE, "GiB", states, _note(states)
    yield "Figure 1: activations", SOURCE, "GiB", activations, _note(activations)
    yield "Figure 7: activations of tensor parallelism alone", SOURCE, "%", shares, _note(shares, BAR_STEP)
