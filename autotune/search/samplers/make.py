"""Samplers by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from autotune.results.predicted import Predicted
from autotune.search.samplers.fixed_order import Grid, Random
from autotune.search.samplers.proposer import Proposer
from autotune.space.plan import Plan

__all__ = ["SAMPLERS", "SamplerName", "make_proposer"]

SamplerName = Literal["auto", "grid", "random", "tpe", "nsga2", "gp"]
SAMPLERS: tuple[SamplerName, ...] = ("auto", "grid", "random", "tpe", "nsga2", "gp")


def make_proposer(
    name: SamplerName,
    plans: Sequence[Plan],
    seed: int,
    predicted: Mapping[Plan, Predicted],
    limit_bytes: int | None,
) -> Proposer:
    """The proposer called `name` over the legal `plans` of a space.

    Args:
        predicted: what the cost model says of the plans; empty where it knows nothing.
        limit_bytes: memory of a device; None for no limit.
    """
    # numpy and Optuna are loaded only where they are used.
    if name == "grid":
        return Grid()
    if name == "random":
        return Random(plans, seed)
    if name in ("tpe", "nsga2"):
        from autotune.search.samplers.optuna_samplers import Nsga2, Tpe

        return Tpe(plans, seed) if name == "tpe" else Nsga2(plans, seed, predicted, limit_bytes)
    from autotune.search.samplers.auto import Auto

    return Auto(plans, seed, predicted if name == "auto" else {}, limit_bytes, stops=name == "auto")
