"""What passes cost: time of each, latency of each hop, activation each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import UserError

__all__ = ["PassCosts"]


@dataclass(frozen=True)
class PassCosts:
    """Costs of every pass of a pipeline, in one unit of time and one unit of memory.

    Attributes:
        forward, backward, weight: time of F, B and W of every stage; length S each. BW takes B + W.
        hop: latency from the end of a pass to the start of its reader on another device: one number for all ordered
            pairs of devices, or a p x p table `hop[sender][receiver]`. It occupies no device; links have no contention.
        activation: what a stage holds for one microbatch from the start of its F to the end of its B; length S.
        kept: the part of it that stays until the end of its W; length S.
        wrap_every: on hops between the last device and device 0 only every n-th microbatch (0, n, 2n, ...) waits for
            what it reads. 1, the default, is what a machine does. The published bubble rates of interleaved 1F1B
            (arXiv 2401.10241, table 5) let only the first microbatch of each group of p wait: p reproduces them.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    hop: float | tuple[tuple[float, ...], ...]
    activation: tuple[float, ...]
    kept: tuple[float, ...]
    wrap_every: int = 1

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("forward", "backward", "weight", "activation", "kept"):
            values = getattr(self, name)
            if len(values) != stages:
                raise UserError(f"pass costs need one value per stage: forward has {stages}, {name} has {len(values)}")
            if not all(0 <= value < float("inf") for value in values):
                raise UserError(f"pass costs must be finite and not negative: {name} is {list(values)}")
        rows = [(self.hop,)] if isinstance(self.hop, (int, float)) else self.hop
        if any(len(row) != len(rows) or not all(0 <= value < float("inf") for value in row) for row in rows):
            raise UserError("hop latencies must be one number or a square table, finite and not negative")
        if self.wrap_every < 1:
            raise UserError(f"wrap_every must be at least 1, not {self.wrap_every}")

    @classmethod
    def uniform(
        cls,
        placement: Sequence[int],
        f: float = 1.0,
        b: float = 1.0,
        w: float = 1.0,
        comm: float = 0.0,
        *,
        activation: float = 1.0,
        kept: float | None = None,
        wrap_every: int = 1,
    ) -> PassCosts:
        """Costs of a model cut into equal stages.

        Args:
            placement: stage -> device.
            f, b, w: time of one microbatch on one device's whole share of the model; a stage costs 1/v of it.
            comm: latency of one hop between devices.
            activation: what one microbatch holds on a device's whole share; a stage holds 1/v of it.
            kept: the part of `activation` that stays from B to W; None: all of it.
        """
        share = [1.0 / placement.count(device) for device in placement]
        kept = activation if kept is None else kept
        return cls(
            forward=tuple(f * part for part in share),
            backward=tuple(b * part for part in share),
            weight=tuple(w * part for part in share),
            hop=comm,
            activation=tuple(activation * part for part in share),
            kept=tuple(kept * part for part in share),
            wrap_every=wrap_every,
        )

    @property
    def stages(self) -> int:
        """Stages of the pipeline (S)."""
        return len(self.forward)

    def latency(self, sender: int, receiver: int) -> float:
        """Latency of one hop between two devices; 0 on one device."""
        if sender == receiver:
            return 0.0
        return self.hop if isinstance(self.hop, (int, float)) else self.hop[sender][receiver]

    def edge_latency(self, placement: Sequence[int], from_stage: int, to_stage: int) -> float:
        """Latency from one stage to a neighbouring one under `placement`."""
        return self.latency(placement[from_stage], placement[to_stage])

    def edge_every(self, placement: Sequence[int], from_stage: int, to_stage: int) -> int:
        """Every how many microbatches the hop between two stages is waited for (see `wrap_every`)."""
        last = max(placement)
        # Forward a chunk ends on the last device and the next one begins on device 0; backward the other way round.
        wrap = (last, 0) if to_stage > from_stage else (0, last)
        return self.wrap_every if last and (placement[from_stage], placement[to_stage]) == wrap else 1
