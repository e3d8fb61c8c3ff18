"""The file of real costs, `costs.yaml`: validated, and turned into a cost source (format: docs/schedule-engine.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune.errors import UserError
from autotune.schedules.costs import PassCosts
from autotune.schedules.engine.balance import layer_cuts
from autotune.schedules.engine.sources import (
    CostSource,
    Hop,
    LayerCosts,
    fixed_stages,
    node_latencies,
    uniform_share,
)

__all__ = ["CostsFile", "read_costs"]


def _calculable(time: float) -> float:
    # Sums over millions of passes stay far from where floats overflow or vanish.
    if time and time < 1e-9:
        raise ValueError("a time must be 0 or from 1e-09 to 1e+12; choose another unit")
    return time


Time = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False), AfterValidator(_calculable)]
Memory = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Limit = Annotated[float, Field(gt=0, le=1e24, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Share(_Strict):
    """Costs of one microbatch on one part of the model."""

    forward: Time
    backward: Time
    weight: Time
    activation: Memory = 1.0
    kept: Memory | None = None

    @model_validator(mode="after")
    def _kept_is_a_part(self) -> _Share:
        if self.kept is not None and self.kept > self.activation:
            raise ValueError(f"kept {self.kept:g} is more than the activation {self.activation:g} it is a part of")
        return self

    def values(self) -> tuple[float, float, float, float, float]:
        """forward, backward, weight, activation, kept."""
        kept = self.activation if self.kept is None else self.kept
        return self.forward, self.backward, self.weight, self.activation, kept


class _Extra(_Share):
    """What embedding or head adds to its stage."""

    forward: Time = 0.0
    backward: Time = 0.0
    weight: Time = 0.0
    activation: Memory = 0.0


class _Layers(_Share):
    """`count` equal layers."""

    count: Annotated[int, Field(ge=1)]


class _Latency(_Strict):
    """Latency of a hop inside a node and between nodes."""

    intra_node: Time
    inter_node: Time
    devices_per_node: Annotated[int, Field(ge=1)]


class CostsFile(_Strict):
    """The contents of a costs file; exactly one of `device`, `stages` and `layers` is given.

    Attributes:
        latency: of a hop between devices: one number, or inside and between nodes.
        device: the share of one device, cut into equal stages on any placement.
        stages: every stage of a model that is cut already.
        layers: equal layers in a number, or a list of layers, to be cut into stages.
        embedding, head: what they add to the first and the last stage; with `layers`.
        memory_limit: most activation of a device: one number, or one per device.
    """

    latency: Time | _Latency = 0.0
    device: _Share | None = None
    stages: Annotated[list[_Share], Field(min_length=1)] | None = None
    layers: _Layers | Annotated[list[_Share], Field(min_length=1)] | None = None
    embedding: _Extra | None = None
    head: _Extra | None = None
    memory_limit: Limit | list[Limit] | None = None

    @model_validator(mode="after")
    def _one_kind_of_costs(self) -> CostsFile:
        given = [name for name in ("device", "stages", "layers") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of device, stages and layers, not {', '.join(given) or 'none of them'}")
        if (self.embedding or self.head) and self.layers is None:
            raise ValueError("embedding and head go with layers; add them to the first and last of the stages instead")
        return self

    @model_validator(mode="after")
    def _times_compare(self) -> CostsFile:
        shares: list[_Share] = [share for share in (self.device, self.embedding, self.head) if share is not None]
        shares += self.stages or []
        shares += [self.layers] if isinstance(self.layers, _Layers) else self.layers or []
        given = [time for share in shares for time in (share.forward, share.backward, share.weight)]
        latency = self.latency
        given += [latency.intra_node, latency.inter_node] if isinstance(latency, _Latency) else [latency]
        above = [time for time in given if time]
        # Beyond this the short times are rounding errors of the long ones.
        if above and max(above) > 1e9 * min(above):
            raise ValueError(
                f"times and latencies range from {min(above):g} to {max(above):g}: none may be more than a billion "
                "times another, unless it is 0"
            )
        return self

    def hop(self, devices: int) -> Hop:
        """The latency between devices."""
        if isinstance(self.latency, _Latency):
            nodes = self.latency
            return node_latencies(devices, nodes.devices_per_node, nodes.intra_node, nodes.inter_node)
        return self.latency

    def source(self, devices: int, balance: bool) -> CostSource:
        """The cost source of the file on `devices` devices.

        Raises:
            UserError: `balance` without layers: there is nothing to move.
        """
        if balance and self.layers is None:
            raise UserError("a balanced layer split needs the costs of layers, not of a device or of stages")
        hop = self.hop(devices)
        if self.device is not None:
            f, b, w, activation, kept = self.device.values()
            return uniform_share(f, b, w, hop, activation, kept)
        if self.stages is not None:
            forward, backward, weight, activations, keeps = _columns(self.stages)
            return fixed_stages(PassCosts(forward, backward, weight, hop, activations, keeps))
        layers = self.layers
        assert layers is not None, "one of the three is given"
        listed: Sequence[_Share] = [layers] * layers.count if isinstance(layers, _Layers) else layers
        nothing = (0.0, 0.0, 0.0, 0.0, 0.0)
        forward, backward, weight, activations, keeps = _columns(listed)
        model = LayerCosts(
            forward,
            backward,
            weight,
            activations,
            keeps,
            first=nothing if self.embedding is None else self.embedding.values(),
            last=nothing if self.head is None else self.head.values(),
            hop=hop,
        )
        return layer_cuts(model, balance)


def read_costs(path: Path) -> CostsFile:
    """Read and check a costs file.

    Raises:
        UserError: it can't be read, is no YAML, or breaks a rule; names the field.
    """
    try:
        values: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys such as device, stages or layers, and latency")
    try:
        return CostsFile.model_validate(values)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors()]
        raise UserError(f"{path} is not a valid costs file:\n" + "\n".join(lines)) from None


def _columns(shares: Sequence[_Share]) -> tuple[tuple[float, ...], ...]:
    """forward, backward, weight, activation and kept, each of all shares."""
    return tuple(zip(*(share.values() for share in shares), strict=True))
