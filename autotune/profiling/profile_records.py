"""What the profile of a stage holds, and how stages of any depth follow from two that were measured. No torch.

A stage is its layers and its ends: the embedding before them on the first stage, the head with the loss behind them on
the last. Layers are alike, so every figure of a stage (seconds, bytes, calls) is a line over its number of layers, and
two depths, `DEPTHS`, give it. Only a pass's temporary peak bends: it is the largest of several lines, of its ends and
its layers, so `METERED_DEPTHS` holds one depth more. docs/profiling.md shows how well that holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from autotune.space.plan import Recompute

__all__ = [
    "DEPTHS",
    "METERED_DEPTHS",
    "Axis",
    "DeviceFigures",
    "DeviceKey",
    "Ends",
    "HostFigures",
    "HostKey",
    "PassFigures",
    "PassesKey",
    "StageFigures",
    "StageKind",
    "device_at",
    "stage_at",
]

StageKind = Literal["first", "middle", "last", "whole"]
Ends = Literal["first", "middle", "last", "both"]
Axis = Literal["tp", "dp", "pp"]

DEPTHS = (1, 3)
"""Layers of the stages that are timed, and of all stages of the ranks that are."""

METERED_DEPTHS = (2,)
"""Layers of the stages whose memory alone is metered: their times lie between those of `DEPTHS`.

Where a backward recomputes its layers and leaves the weight gradients for later, what it keeps of the layers behind it
grows while it recomputes those before them. The slope between two neighbouring depths says by how much.
"""


@dataclass(frozen=True)
class PassesKey:
    """Everything beside model, dtype and device that decides what the passes of a stage take.

    Attributes:
        tp: tensor-parallel degree; the rank's shards are measured. (Data parallelism doesn't change passes: parameters
            are gathered before them and gradients reduced after.)
        whole: one stage that is the whole model; else a first, a middle and a last one.
        crowd: CPU processes that run meanwhile on the cores of this machine, this one included, as many as a run has
            ranks; 1 on GPUs.
    """

    tp: int
    micro_batch_size: int
    recompute: Recompute
    whole: bool
    crowd: int = 1


@dataclass(frozen=True)
class DeviceKey:
    """Everything beside model, dtype and device that decides what a rank does once a step.

    Attributes:
        ends: whether the rank's stages hold the embedding (first), the head (last), both or neither (middle).
        crowd: as of `PassesKey`.
    """

    tp: int
    dp: int
    ends: Ends
    crowd: int = 1


@dataclass(frozen=True)
class HostKey:
    """Communication among `ranks` CPU processes on a mesh axis.

    Collectives of passes (tp) or of gradients (dp), or messages between stages (pp).

    Attributes:
        world: processes that share the machine's cores meanwhile, those of the group included.
        clock: `cpu`: what collectives cost the ranks that call them, whatever the link; `wall`: all the time that
            communication takes on this machine.
    """

    axis: Axis
    ranks: int
    world: int
    clock: Literal["cpu", "wall"] = "cpu"


@dataclass(frozen=True)
class HostFigures:
    """What communication takes beside or on the link: `call_s` a collective or message and `byte_s` a byte.

    gloo copies, hands work to its threads and is woken again on the cores that compute. 0 on GPUs.

    Attributes:
        own_s: CPU time of a rank outside its passes for each message that it posts to send or to receive.
    """

    call_s: float
    byte_s: float
    own_s: float = 0.0

    def seconds(self, calls: float, size: float) -> float:
        """Time of `calls` collectives that send `size` bytes in all."""
        return self.call_s * calls + self.byte_s * size


@dataclass(frozen=True)
class PassFigures:
    """One kind of pass of one stage and microbatch.

    Attributes:
        seconds: on the rank's clock (CPU time of the thread, or GPU events), collectives taking no time.
        peak_bytes: most bytes beyond those held when the pass ends (F) or begins (B, W, BW).
        tp_bytes, tp_calls: what the rank sends in tp collectives, were each a ring; all-reduces are two calls.
    """

    seconds: float
    peak_bytes: float
    tp_bytes: float
    tp_calls: float


@dataclass(frozen=True)
class StageFigures:
    """The passes of one stage.

    Attributes:
        passes: by kind: F, B, W and BW.
        held_bytes: held from F to B beside the stage's input and output.
        kept_bytes: the part of what B leaves behind that W needs.
        hand_over_s: time of the rank outside of its passes for each pass: making tokens, moving tensors between passes.
    """

    passes: Mapping[str, PassFigures]
    held_bytes: float
    kept_bytes: float
    hand_over_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return {**vars(self), "passes": {kind: asdict(figures) for kind, figures in self.passes.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StageFigures:
        """The figures that `to_dict` wrote."""
        passes = {kind: PassFigures(**figures) for kind, figures in values["passes"].items()}
        return cls(**{**values, "passes": passes})


@dataclass(frozen=True)
class DeviceFigures:
    """What one rank does once a step, and what it holds for all of it.

    Attributes:
        outside_s: time outside the passes: clearing gradients, gathering parameters, reducing gradients, AdamW;
            collectives taking no time.
        optimizer_s: the AdamW step's part of it.
        parameter_bytes, gradient_bytes, optimizer_bytes: held while passes run (gathered copies count as parameters).
        outside_peak_bytes: most bytes held in all while no pass runs.
        dp_bytes, dp_calls, tied_bytes, tied_calls, tp_bytes, tp_calls: sent outside the passes, by mesh axis.
        parameters: on this rank, before data parallelism shards them.
    """

    outside_s: float
    optimizer_s: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    outside_peak_bytes: float
    dp_bytes: float
    dp_calls: float
    tied_bytes: float
    tied_calls: float
    tp_bytes: float
    tp_calls: float
    parameters: float

    @property
    def lasting_bytes(self) -> float:
        """Everything held while passes run that is no activation."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def stage_at(layers: int, measured: Mapping[int, StageFigures]) -> StageFigures:
    """The figures of a stage of `layers` layers from those of two depths, the deepest if there are more."""
    if layers in measured:
        return measured[layers]
    (a, low), (b, high) = sorted(measured.items())[-2:]
    share = (layers - a) / (b - a)
    return StageFigures(
        passes={kind: _pass_at(share, low.passes[kind], high.passes[kind]) for kind in low.passes},
        held_bytes=_line(low.held_bytes, high.held_bytes, share),
        kept_bytes=_line(low.kept_bytes, high.kept_bytes, share),
        # What lies between two passes doesn't depend on how long they are; a difference is noise.
        hand_over_s=min(low.hand_over_s, high.hand_over_s),
    )


def device_at(layers: int, measured: Mapping[int, DeviceFigures]) -> DeviceFigures:
    """The figures of a rank with `layers` layers from those of two depths."""
    if layers in measured:
        return measured[layers]
    (a, low), (b, high) = sorted(measured.items())
    share = (layers - a) / (b - a)
    values = {f.name: _line(getattr(low, f.name), getattr(high, f.name), share) for f in fields(DeviceFigures)}
    return DeviceFigures(**values)


def _pass_at(share: float, low: PassFigures, high: PassFigures) -> PassFigures:
    # The peak is the largest of several lines: between two depths it is at most the higher of them, and beyond them the
    # steepest goes on. A falling one is followed no further, for another one may take its place.
    peak = high.peak_bytes + max(0.0, share - 1) * max(0.0, high.peak_bytes - low.peak_bytes)
    if share < 1:
        peak = max(low.peak_bytes, high.peak_bytes)
    return PassFigures(
        seconds=_line(low.seconds, high.seconds, share),
        peak_bytes=peak,
        tp_bytes=_line(low.tp_bytes, high.tp_bytes, share),
        tp_calls=_line(low.tp_calls, high.tp_calls, share),
    )


def _line(low: float, high: float, share: float) -> float:
    return max(0.0, low + share * (high - low))
