"""The keys of the space file: one pydantic model a section, each key with its type, legal values and default.

What a key means, its unit and its default stand in its description; docs/space-file.md lists the same keys.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from autotune.errors import UserError
from autotune.schedules import registry
from autotune.space.devices import DEVICES
from autotune.space.machine import LEGAL, out_of_range
from autotune.space.plan import Recompute
from autotune.space.units import parse_bandwidth, parse_duration, parse_size, parse_time
from autotune.space.worker_section import WorkerSection

__all__ = [
    "SECTIONS",
    "TOLD",
    "ClusterSection",
    "LinkSection",
    "LinksSection",
    "MachineSection",
    "ModelSection",
    "SearchSection",
    "TrainingSection",
    "TrialSection",
    "WorkerSection",
]


TOLD = "told"  # kind of the errors whose message needs no value in front


def _number_from_text(value: Any) -> Any:
    """YAML 1.1 reads `1e-5` (no dot) as text."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    return value


def _known_device(name: str) -> str:
    """The name, if it is a device; else an error that is told as it stands."""
    if name in DEVICES:
        return name
    close = ["cuda"] if name.lower() in ("gpu", "nvidia") else difflib.get_close_matches(name.lower(), DEVICES, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    raise PydanticCustomError(TOLD, f"unknown device {name!r}{hint}; known: {', '.join(DEVICES)}")


def _known_schedule(name: str) -> str:
    """The schedule's own name; an unknown one is an error that is told as it stands."""
    try:
        return registry.find(name).name
    except UserError as error:
        raise PydanticCustomError(TOLD, str(error)) from error


def _as_list(value: Any) -> Any:
    """A scalar is a list of one."""
    return value if isinstance(value, list) else [value]


Count = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]
Number = Annotated[float, BeforeValidator(_number_from_text), Field(gt=0, allow_inf_nan=False)]
Figure = Annotated[float, BeforeValidator(_number_from_text)]
Fraction = Annotated[float, BeforeValidator(_number_from_text), Field(gt=0, le=1)]
Size = Annotated[int, BeforeValidator(parse_size)]
Time = Annotated[float, BeforeValidator(parse_time)]
Patience = Annotated[float, BeforeValidator(parse_duration)]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth)]
Counts = Annotated[list[Count], BeforeValidator(_as_list), Field(min_length=1)]
Recomputes = Annotated[list[Recompute], BeforeValidator(_as_list), Field(min_length=1)]
Device = Annotated[StrictStr, AfterValidator(_known_device)]
Schedules = Annotated[
    list[Annotated[StrictStr, AfterValidator(_known_schedule)]], BeforeValidator(_as_list), Field(min_length=1)
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RopeScalingSection(_Section):
    """How the rope frequencies of a longer context follow from the original one's."""

    kind: Literal["linear", "llama3"] = Field(description="linear: divide all; llama3: divide the slow ones")
    factor: Number = Field(description="how many times longer the context becomes")
    low_freq_factor: Number = Field(1.0, description="llama3: wavelengths above original_positions / this are divided")
    high_freq_factor: Number = Field(4.0, description="llama3: those below original_positions / this are kept")
    original_positions: Count = Field(8192, description="llama3: tokens of the context before scaling")

    @model_validator(mode="after")
    def _ordered(self) -> RopeScalingSection:
        if self.high_freq_factor <= self.low_freq_factor:
            raise PydanticCustomError(TOLD, f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor")
        return self


class ModelSection(_Section):
    """The decoder-only transformer: a Hugging Face config, or its fields."""

    sequence_length: Count = Field(description="tokens of one sample")
    hf_config: StrictStr | None = Field(None, description="path of a config.json, relative to the space file")
    layers: Count | None = Field(None, description="transformer blocks")
    hidden: Count | None = Field(None, description="width of the model")
    heads: Count | None = Field(None, description="attention heads")
    kv_heads: Count | None = Field(None, description="key/value heads; default: heads")
    head_dim: Count | None = Field(None, description="width of one head; default: hidden / heads")
    ffn_hidden: Count | None = Field(None, description="width of the MLP")
    vocab: Count | None = Field(None, description="rows of the token table, before padding to a multiple of tp")
    activation: Literal["swiglu", "gelu"] = Field("swiglu", description="swiglu: gate, up, down; gelu: up, down")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="norm before attention, MLP and head")
    positions: Literal["rope", "learned"] = Field("rope", description="how positions enter")
    tied_embeddings: StrictBool = Field(False, description="the head reuses the token table")
    max_positions: Count | None = Field(None, description="rows of the learned table; default: sequence_length")
    qkv_bias: StrictBool = Field(False, description="biases on q, k and v")
    attention_output_bias: StrictBool = Field(False, description="bias on the attention output")
    mlp_bias: StrictBool = Field(False, description="biases in the MLP")
    qk_norm: StrictBool = Field(False, description="RMS norm of q and k (Qwen3)")
    parallel_residual: StrictBool = Field(False, description="attention and MLP read the same input (GPT-NeoX)")
    gelu_tanh: StrictBool = Field(False, description="the tanh approximation of gelu (GPT-2)")
    norm_epsilon: Number = Field(1e-5, description="epsilon of the norms")
    rope_theta: Number = Field(10000.0, description="base of the rope frequencies")
    rotary_fraction: Fraction = Field(1.0, description="leading share of a head that rope turns (GPT-NeoX)")
    rope_scaling: RopeScalingSection | None = Field(None, description="stretches the rope frequencies")
    name: StrictStr | None = Field(None, description="name in tables; default: the config's folder or file name")


class LinkSection(_Section):
    """One level of the network."""

    latency: Time | None = Field(default=None, description="time of a small message, such as 5us")
    bandwidth: Bandwidth | None = Field(
        default=None, description="per device and direction, such as 300GB/s or 200Gbit/s"
    )


class LinksSection(_Section):
    """The network; what is left out comes from the device's defaults."""

    intra_node: LinkSection = Field(default=LinkSection(), description="between devices of one node")
    inter_node: LinkSection = Field(default=LinkSection(), description="between nodes")


class MachineSection(_Section):
    """Figures of one device for predictions, as `autotune calibrate` writes them; see `autotune.space.machine`."""

    name: StrictStr | None = Field(None, description="name of the device; default: cluster.device")
    peak_flops: Figure = Field(description="dense matmul FLOP/s of half precision")
    peak_flops_float32: Figure = Field(description="dense matmul FLOP/s of float32")
    memory_bytes: Figure | None = Field(None, description="memory of the device")
    memory_bytes_per_s: Figure = Field(description="bandwidth of the device's memory")
    efficiency: Figure = Field(1.0, description="share of the peak that large matmuls reach")
    kernel_s: Figure = Field(0.0, description="fixed seconds of a kernel")
    memory_efficiency: Figure = Field(0.85, description="share of the memory's bandwidth that kernels reach")
    attention_efficiency: Figure = Field(0.75, description="FLOP/s of attention relative to a large matmul")
    link_efficiency: Figure = Field(0.8, description="share of a link's bandwidth that messages reach")
    visit_s: Figure = Field(0.0, description="seconds lost on each visit of a microbatch to a stage")
    layer_host_s: Figure = Field(0.0, description="least seconds of one layer's passes together")

    @field_validator(*LEGAL)
    @classmethod
    def _legal(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.field_name and (problem := out_of_range(info.field_name, value)):
            raise ValueError(problem)
        return value


class ClusterSection(_Section):
    """The machines a plan runs on. Every plan uses all devices."""

    nodes: Annotated[StrictInt, Field(ge=1, le=100_000)] = Field(1, description="machines")
    devices_per_node: Annotated[StrictInt, Field(ge=1, le=1024)] = Field(description="devices of one machine")
    device: Device = Field("cpu", description="cpu, cuda, or the name of an accelerator")
    memory_limit: Size | None = Field(None, description="most memory a device may use at its peak, such as 8GiB")
    links: LinksSection = Field(default=LinksSection(), description="latency and bandwidth of the network")
    machine: MachineSection | None = Field(
        default=None, description="figures of one device for predictions; default: the catalogue's"
    )
    file: StrictStr | None = Field(
        default=None, description="path of a cluster file, relative to the space file; keys beside it override its own"
    )


class TrainingSection(_Section):
    """What one optimizer step trains; the same for every plan."""

    global_batch_size: Count = Field(description="samples of one optimizer step, over all devices")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of parameters and activations")
    optimizer: Literal["adamw"] = Field("adamw", description="the optimizer")
    seed: Annotated[StrictInt, Field(ge=0, le=2**63 - 1)] = Field(0, description="of initial weights and tokens")
    sum_tied_gradients: StrictBool = Field(
        True,
        description="whether the worker adds the gradients of a tied embedding on two devices; ours does, and "
        "Megatron-LM; false by default for other commands of the section worker",
    )


class SearchSection(_Section):
    """The values to search; dp and the number of microbatches follow from them."""

    pp: Counts | None = Field(None, description="pipeline degrees; default: every divisor of the devices")
    tp: Counts | None = Field(None, description="tensor degrees; default: every divisor of devices_per_node")
    micro_batch_size: Counts = Field([1, 2, 4], description="samples of one microbatch")
    schedule: Schedules | None = Field(None, description="pipeline schedules; default: 1f1b and its five usual rivals")
    stages_per_device: Counts = Field([2], description="stages of a device, for interleaved schedules alone")
    recompute: Recomputes = Field(["none"], description="full: keep a block's input alone and run its forward again")
    baseline: StrictBool = Field(True, description="add 1f1b to the schedules when it is missing")


class TrialSection(_Section):
    """How one plan is measured."""

    warmup_steps: Count = Field(1, description="optimizer steps before the measured ones")
    measured_steps: Annotated[StrictInt, Field(ge=3, le=10**6)] = Field(3, description="optimizer steps measured")
    timeout_s: Patience = Field(600.0, description="time after which a trial is stopped, in seconds or with a unit")
    hang_timeout_s: Patience | None = Field(
        None, description="time without progress of any rank after which a trial is stopped"
    )


SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelSection,
    "cluster": ClusterSection,
    "training": TrainingSection,
    "search": SearchSection,
    "trial": TrialSection,
    "worker": WorkerSection,
}
