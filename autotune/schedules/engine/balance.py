"""Layer splits: how many layers each stage holds when embedding and head make the ends heavier."""

from __future__ import annotations

from autotune.errors import UserError
from autotune.schedules.engine.sources import CostSource, Cut, LayerCosts

__all__ = ["balanced_split", "even_split", "layer_cuts"]


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage, as even as can be; the first and the last stage get the smaller share.

    >>> even_split(10, 4)
    (2, 3, 3, 2)

    Raises:
        UserError: there are fewer layers than stages.
    """
    if layers < stages:
        raise UserError(f"{stages} stages need at least {stages} layers, the model has {layers}")
    share, extra = divmod(layers, stages)
    split = [share] * stages
    for stage in sorted(range(stages), key=lambda s: (s in (0, stages - 1), s == stages - 1, s))[:extra]:
        split[stage] += 1
    return tuple(split)


def balanced_split(model: LayerCosts, placement: tuple[int, ...]) -> tuple[int, ...]:
    """The layer split with the smallest work on the busiest device, found by moving single layers.

    Of splits with equal busiest devices it takes the one with the smallest sum of squared works, of devices and of
    stages. Every stage keeps at least one layer.
    """
    split = even_split(model.layers, len(placement))
    best, busiest = _imbalance(model, split, placement)
    while True:
        step = None
        for giver, device in enumerate(placement):
            if device != busiest or split[giver] == 1:
                continue
            for taker in range(len(split)):
                moved = list(split)
                moved[giver] -= 1
                moved[taker] += 1
                value, device = _imbalance(model, tuple(moved), placement)
                if value < best:
                    step, best, busiest = tuple(moved), value, device
        if step is None:
            return split
        split = step


def _imbalance(
    model: LayerCosts, split: tuple[int, ...], placement: tuple[int, ...]
) -> tuple[tuple[float, float, float], int]:
    """What `balanced_split` makes small, and the busiest device."""
    costs = model.costs(split)
    stages = [sum(times) for times in zip(costs.forward, costs.backward, costs.weight, strict=True)]
    devices = [0.0] * (max(placement) + 1)
    for device, time in zip(placement, stages, strict=True):
        devices[device] += time
    # Sums in another order must not count as an improvement for ever.
    values = (max(devices), sum(d * d for d in devices), sum(s * s for s in stages))
    rounded = tuple(float(f"{value:.11g}") for value in values)
    return rounded, devices.index(values[0])  # type: ignore[return-value]


def layer_cuts(model: LayerCosts, balance: bool) -> CostSource:
    """A source that cuts layers evenly and, with `balance`, also by `balanced_split`."""

    def cuts(placement: tuple[int, ...]) -> list[Cut]:
        if model.layers < len(placement):
            return []
        splits = [even_split(model.layers, len(placement))]
        if balance:
            splits.append(balanced_split(model, placement))
        return [Cut(model.costs(split), split) for split in dict.fromkeys(splits)]

    return cuts
