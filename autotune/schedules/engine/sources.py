"""Where pass costs come from: each source turns a placement into the costs of its stages.

A source answers with the ways it can cut the model into the placement's stages: none when it can't, one for most,
several when the layer split is open too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.errors import UserError
from autotune.schedules.costs import PassCosts

__all__ = ["CostSource", "Cut", "Hop", "LayerCosts", "fixed_stages", "node_latencies", "uniform_share"]

Hop = float | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Cut:
    """One way to cut the model: the costs of its stages, and the layers of each stage when layers are known."""

    costs: PassCosts
    layer_split: tuple[int, ...] | None = None


CostSource = Callable[[tuple[int, ...]], list[Cut]]


def uniform_share(
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    hop: Hop = 0.0,
    activation: float = 1.0,
    kept: float | None = None,
) -> CostSource:
    """Equal stages: every number is for one microbatch on one device's whole share; a stage costs 1/v of it.

    Args:
        hop: latency between devices, one number or a table [sender][receiver].
        kept: the part of `activation` that stays from B to W; None: all of it.
    """

    def cuts(placement: tuple[int, ...]) -> list[Cut]:
        costs = PassCosts.uniform(placement, forward, backward, weight, 0.0, activation=activation, kept=kept)
        return [Cut(_with_hop(costs, hop))]

    return cuts


def fixed_stages(costs: PassCosts) -> CostSource:
    """The model is cut already: only placements with this number of stages are possible."""

    def cuts(placement: tuple[int, ...]) -> list[Cut]:
        return [Cut(costs)] if len(placement) == costs.stages else []

    return cuts


@dataclass(frozen=True)
class LayerCosts:
    """Costs of every layer, and what embedding and head add to the first and the last stage; one microbatch.

    Attributes:
        forward, backward, weight, activation, kept: one value per layer, in model order.
        first, last: (forward, backward, weight, activation, kept) added to the first and to the last stage.
        hop: latency between devices, one number or a table [sender][receiver].
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    activation: tuple[float, ...]
    kept: tuple[float, ...]
    first: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    last: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    hop: Hop = 0.0

    def __post_init__(self) -> None:
        if len({len(self.forward), len(self.backward), len(self.weight), len(self.activation), len(self.kept)}) != 1:
            raise UserError("layer costs need the same number of layers in every list")

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.forward)

    def costs(self, split: Sequence[int]) -> PassCosts:
        """Costs of the stages when stage s holds `split[s]` layers."""
        if sum(split) != self.layers or min(split) < 0:
            raise UserError(f"layer split {list(split)} must sum to {self.layers} layers, none negative")
        sums: list[tuple[float, ...]] = []
        for number, values in enumerate((self.forward, self.backward, self.weight, self.activation, self.kept)):
            row, at = [], 0
            for layers in split:
                row.append(sum(values[at : at + layers]))
                at += layers
            row[0] += self.first[number]
            row[-1] += self.last[number]
            sums.append(tuple(row))
        forward, backward, weight, activation, kept = sums
        return PassCosts(forward, backward, weight, self.hop, activation, kept)


def node_latencies(devices: int, devices_per_node: int, intra: float, inter: float) -> tuple[tuple[float, ...], ...]:
    """The hop table of machines with `devices_per_node` devices each, filled in order."""
    if devices_per_node < 1:
        raise UserError(f"devices per node must be at least 1, not {devices_per_node}")
    return tuple(
        tuple(
            0.0 if a == b else intra if a // devices_per_node == b // devices_per_node else inter
            for b in range(devices)
        )
        for a in range(devices)
    )


def _with_hop(costs: PassCosts, hop: Hop) -> PassCosts:
    return PassCosts(
        forward=costs.forward,
        backward=costs.backward,
        weight=costs.weight,
        hop=hop,
        activation=costs.activation,
        kept=costs.kept,
    )
