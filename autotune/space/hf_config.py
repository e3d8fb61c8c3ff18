"""Reads the `config.json` of a Hugging Face model into a `ModelSpec`, without transformers.

Each family has its own names and its own defaults for what the file leaves out (transformers'
`models/*/configuration_*.py`). What changes the model and isn't modelled here is refused by name; nothing is read as
something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.space.model import ModelSpec
from autotune.space.rope import RopeScaling

__all__ = ["HF_FAMILIES", "HfModel", "model_from_hf", "read_hf_config"]

SILU = frozenset({"silu", "swish"})
GELU_EXACT = frozenset({"gelu"})
GELU_TANH = frozenset({"gelu_new", "gelu_pytorch_tanh", "gelu_fast"})

# Keys that turn a dense family into something else, whatever `model_type` says.
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


@dataclass(frozen=True)
class HfModel:
    """A model read from a config, and what the reader should know about it.

    Attributes:
        notes: parts of the config that training leaves out without changing parameters or work (dropout).
    """

    spec: ModelSpec
    notes: tuple[str, ...] = ()


@dataclass
class _Reader:
    """Takes typed values out of a config and collects every problem, so that all are told at once."""

    values: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    def refuse(self, key: str, message: str) -> None:
        self.problems.append(f"{key}: {message}")

    def whole(self, key: str, default: int | None, aliases: tuple[str, ...] = ()) -> int:
        """A whole number above 0; `default` when absent, or when null and the family reads null as its default."""
        for name in (key, *aliases):
            if self.values.get(name) is not None:
                value = self.values[name]
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
                self.refuse(name, f"{_show(value)} is not a whole number above 0")
                return 1
        if default is None or (key in self.values and key not in _NULL_MEANS_DEFAULT):
            self.refuse(key, "null, but the model needs a whole number above 0")
            return 1
        return default

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value)
        self.refuse(key, f"{_show(value)} is not a number above 0")
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.refuse(key, f"{_show(value)} is neither true nor false")
        return default

    def activation(self, key: str, default: str, legal: frozenset[str]) -> str:
        value = self.values.get(key, default)
        if value in legal:
            return value
        self.refuse(key, f"activation {_show(value)} is not modelled for this family; modelled: {_list(legal)}")
        return default

    def fixed(self, key: str, expected: bool, why: str) -> None:
        """Refuses a flag that, set otherwise, makes another model of it."""
        if self.flag(key, expected) is not expected:
            self.refuse(key, f"{json.dumps(not expected)} is not modelled ({why})")


_NULL_MEANS_DEFAULT = frozenset({"num_key_value_heads", "n_inner", "head_dim"})


def read_hf_config(path: Path, sequence_length: int) -> HfModel:
    """The model that `path` (a `config.json`, or the folder that holds one) describes.

    Raises:
        UserError: the file can't be read, or describes a model that isn't modelled; every reason is listed.
    """
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: can't read the model config: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file: {str(error)[:200]}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a model config: the file holds a {type(values).__name__}, not an object")
    try:
        return model_from_hf(values, sequence_length, name=path.parent.name if path.stem == "config" else path.stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def model_from_hf(values: dict[str, Any], sequence_length: int, name: str = "model") -> HfModel:
    """The model that the parsed config `values` describes, to be trained on samples of `sequence_length` tokens.

    Raises:
        UserError: it is of a kind that isn't modelled; every reason is listed.
    """
    kind = values.get("model_type")
    if kind is None:
        raise UserError(f"model_type: missing; modelled: {_list(HF_FAMILIES)}")
    family = HF_FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(f"model_type: {_show(kind)} is not modelled; modelled: {_list(HF_FAMILIES)}")
    reader = _Reader(values)
    _refuse_other_models(reader, family)
    spec = family.read(reader, sequence_length, name)
    _check_shape(reader, spec)
    if reader.problems:
        raise UserError(f"this {kind} model can't be tuned:\n  " + "\n  ".join(reader.problems))
    return HfModel(spec, _dropout_notes(values, family))


def _refuse_other_models(reader: _Reader, family: _Family) -> None:
    """What would make another model of a known family: experts, quantised weights, own code, other heads."""
    values = reader.values
    for key in _EXPERT_KEYS:
        if isinstance(values.get(key), int) and values[key] > 1:
            reader.refuse(key, f"{values[key]} experts: mixture-of-experts models are not modelled")
    if values.get("quantization_config") is not None:
        reader.refuse("quantization_config", "quantised weights are not modelled; use the config of the original model")
    classes = values.get("architectures")
    if isinstance(classes, list) and classes and not any(c in family.classes for c in classes):
        reader.refuse("architectures", f"{_show(classes)} is not modelled; modelled: {_list(family.classes)}")


def _check_shape(reader: _Reader, spec: ModelSpec) -> None:
    if reader.problems:
        return  # the shape holds stand-ins then
    if spec.heads % spec.kv_heads:
        reader.refuse("num_key_value_heads", f"{spec.kv_heads} doesn't divide {spec.heads} attention heads")
    if spec.positions == "learned" and spec.sequence_length > spec.max_positions:
        reader.refuse(
            "n_positions",
            f"sequence_length {spec.sequence_length} is more than the {spec.max_positions} learned positions",
        )
    turned = int(spec.head_dim * spec.rotary_fraction)
    if spec.positions == "rope" and (turned < 2 or turned % 2):
        reader.refuse("head_dim", f"rope would turn {turned} of {spec.head_dim} values of a head: not an even number")


def _dropout_notes(values: dict[str, Any], family: _Family) -> tuple[str, ...]:
    rates = {key: values.get(key, default) for key, default in family.dropouts.items()}
    told = ", ".join(f"{key} {rate}" for key, rate in rates.items() if isinstance(rate, (int, float)) and rate > 0)
    return (f"dropout is not modelled, trials train without it ({told})",) if told else ()


def _head_dim(reader: _Reader, hidden: int, heads: int, default: int | None = None) -> int:
    if reader.values.get("head_dim") is not None or default is not None:
        return reader.whole("head_dim", default)
    if hidden % heads:
        reader.refuse("hidden_size", f"{hidden} is not a multiple of {heads} attention heads, and head_dim is not set")
    return max(1, hidden // heads)


def _rope(reader: _Reader, default_fraction: float = 1.0) -> tuple[float, float, RopeScaling | None]:
    """(theta, fraction of a head that is turned, scaling); a scaling we don't model is refused.

    Read in the old spelling (`rope_theta`, `rope_scaling`, `rotary_pct`, `rotary_emb_base`) or the new one
    (`rope_parameters`).
    """
    values = reader.values
    nested = values.get("rope_parameters")
    if nested is not None and not isinstance(nested, dict):
        reader.refuse("rope_parameters", f"{_show(nested)} is not an object")
        nested = None
    merged = dict(nested or {})
    fraction_key = "rotary_pct" if "rotary_pct" in values else "partial_rotary_factor"
    for new, old in (
        ("rope_theta", "rope_theta"),
        ("rope_theta", "rotary_emb_base"),
        ("partial_rotary_factor", fraction_key),
    ):
        if merged.get(new) is None:
            merged[new] = values.get(old)
    if any(isinstance(part, dict) for part in (nested or {}).values()):
        reader.refuse("rope_parameters", "different rope parameters for different layers are not modelled")
        return 10000.0, default_fraction, None
    key = "rope_scaling" if values.get("rope_scaling") is not None else "rope_parameters"
    scaling = _rope_scaling(reader, key, nested if key == "rope_parameters" else values[key])
    inner = _Reader(merged, reader.problems)
    theta = inner.number("rope_theta", 10000.0)
    fraction = inner.number("partial_rotary_factor", default_fraction)
    if fraction > 1 or (default_fraction == 1.0 and fraction != 1.0):
        reader.refuse(fraction_key, f"{fraction} is not modelled for this family")
    return theta, fraction, scaling


def _rope_scaling(reader: _Reader, key: str, values: object) -> RopeScaling | None:
    if values is None:
        return None
    if not isinstance(values, dict):
        reader.refuse(key, f"{_show(values)} is not an object")
        return None
    kind = values.get("rope_type", values.get("type"))
    if kind in (None, "default"):
        return None
    if kind not in ("linear", "llama3"):
        known = 'none (null or "default"), "linear", "llama3"'
        reader.refuse(key, f"rope scaling {_show(kind)} is not modelled; modelled: {known}")
        return None
    inner = _Reader(values, [])
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {name: inner.number(name, 1.0) for name in needed}
    missing = [name for name in needed if values.get(name) is None]
    if kind == "llama3" and not missing:
        if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
            inner.refuse("high_freq_factor", f"{numbers['high_freq_factor']} is not above low_freq_factor")
        numbers["original_positions"] = inner.whole("original_max_position_embeddings", None)
    reader.problems += [f"{key}.{problem}" for problem in inner.problems]
    if missing:
        reader.refuse(key, f"rope scaling {_show(kind)} needs {', '.join(missing)}")
        return None
    return RopeScaling(kind, **numbers)  # type: ignore[arg-type]


def _refuse_sliding_window(reader: _Reader, window: object, layers: int, sequence_length: int) -> None:
    """A window at least as long as the sample masks nothing; a shorter one makes another model."""
    if window is None or layers == 0:
        return
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        reader.refuse("sliding_window", f"{_show(window)} is not a whole number above 0")
    elif sequence_length > window:
        reader.refuse(
            "sliding_window",
            f"sequence_length {sequence_length} is more than the window of {window} tokens in {layers} layers; "
            f"sliding-window attention is not modelled, use a sequence_length of at most {window}",
        )


def _sliding_layers(reader: _Reader, layers: int, window: object) -> int:
    """Layers with a window in the Qwen families: by `layer_types`, else from `max_window_layers` on."""
    kinds = reader.values.get("layer_types")
    if kinds is None:
        first = reader.values.get("max_window_layers", 28)
        full = first if isinstance(first, int) and not isinstance(first, bool) else 0
        return max(0, layers - full) if window is not None else 0
    if not isinstance(kinds, list) or len(kinds) != layers:
        reader.refuse("layer_types", f"must list one kind for each of {layers} layers")
        return 0
    for kind in sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"}):
        reader.refuse("layer_types", f"{_show(kind)} is not modelled; modelled: full_attention")
    return kinds.count("sliding_attention")


def _llama(reader: _Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("hidden_size", 4096)
    heads = reader.whole("num_attention_heads", 32)
    reader.activation("hidden_act", "silu", SILU)
    theta, _, scaling = _rope(reader)
    bias = reader.flag("attention_bias", False)
    return ModelSpec(
        layers=reader.whole("num_hidden_layers", 32),
        hidden=hidden,
        heads=heads,
        kv_heads=reader.whole("num_key_value_heads", heads),
        head_dim=_head_dim(reader, hidden, heads),
        ffn_hidden=reader.whole("intermediate_size", 11008),
        vocab=reader.whole("vocab_size", 32000),
        sequence_length=sequence_length,
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=reader.flag("mlp_bias", False),
        norm_epsilon=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        name=name,
    )


def _mistral(reader: _Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("hidden_size", 4096)
    heads = reader.whole("num_attention_heads", 32)
    # absent means 8 key/value heads, null means as many as heads
    kv_default = heads if "num_key_value_heads" in reader.values else 8
    layers = reader.whole("num_hidden_layers", 32)
    reader.activation("hidden_act", "silu", SILU)
    theta, _, scaling = _rope(reader)
    window = reader.values.get("sliding_window", 4096)
    if reader.values.get("layer_types") is not None:
        windowed = _sliding_layers(reader, layers, window)
    else:
        windowed = layers
    _refuse_sliding_window(reader, window, windowed, sequence_length)
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=reader.whole("num_key_value_heads", kv_default),
        head_dim=_head_dim(reader, hidden, heads),
        ffn_hidden=reader.whole("intermediate_size", 14336),
        vocab=reader.whole("vocab_size", 32000),
        sequence_length=sequence_length,
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        norm_epsilon=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        name=name,
    )


def _qwen(reader: _Reader, sequence_length: int, name: str, third: bool) -> ModelSpec:
    hidden = reader.whole("hidden_size", 4096)
    heads = reader.whole("num_attention_heads", 32)
    # absent means 32 key/value heads, null means as many as heads
    kv_default = heads if "num_key_value_heads" in reader.values else 32
    layers = reader.whole("num_hidden_layers", 32)
    reader.activation("hidden_act", "silu", SILU)
    theta, _, scaling = _rope(reader)
    window = reader.values.get("sliding_window", 4096) if reader.flag("use_sliding_window", False) else None
    _refuse_sliding_window(reader, window, _sliding_layers(reader, layers, window), sequence_length)
    if third and "head_dim" in reader.values and reader.values["head_dim"] is None:
        reader.refuse("head_dim", "null, but Qwen3 needs a whole number (128 when left out)")
    bias = reader.flag("attention_bias", False) if third else True
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=reader.whole("num_key_value_heads", kv_default),
        head_dim=_head_dim(reader, hidden, heads, default=128 if third else None),
        ffn_hidden=reader.whole("intermediate_size", 22016),
        vocab=reader.whole("vocab_size", 151936),
        sequence_length=sequence_length,
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        attention_output_bias=bias and third,
        qk_norm=third,
        norm_epsilon=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        name=name,
    )


def _qwen2(reader: _Reader, sequence_length: int, name: str) -> ModelSpec:
    return _qwen(reader, sequence_length, name, third=False)


def _qwen3(reader: _Reader, sequence_length: int, name: str) -> ModelSpec:
    return _qwen(reader, sequence_length, name, third=True)


def _gpt2(reader: _Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("n_embd", 768, ("hidden_size",))
    heads = reader.whole("n_head", 12, ("num_attention_heads",))
    if hidden % heads:
        reader.refuse("n_embd", f"{hidden} is not a multiple of {heads} attention heads")
    activation = reader.activation("activation_function", "gelu_new", GELU_TANH | GELU_EXACT)
    reader.fixed("scale_attn_weights", True, "attention scores without the 1/sqrt(head_dim) factor")
    reader.fixed("scale_attn_by_inverse_layer_idx", False, "attention scores divided by the layer's number")
    reader.fixed("add_cross_attention", False, "cross attention")
    return ModelSpec(
        layers=reader.whole("n_layer", 12, ("num_hidden_layers",)),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=max(1, hidden // heads),
        ffn_hidden=reader.whole("n_inner", 4 * hidden),
        vocab=reader.whole("vocab_size", 50257),
        sequence_length=sequence_length,
        activation="gelu",
        norm="layernorm",
        positions="learned",
        tied_embeddings=reader.flag("tie_word_embeddings", True),
        max_positions=reader.whole("n_positions", 1024, ("max_position_embeddings",)),
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        gelu_tanh=activation in GELU_TANH,
        norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        name=name,
    )


def _gpt_neox(reader: _Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("hidden_size", 6144)
    heads = reader.whole("num_attention_heads", 64)
    if hidden % heads:
        reader.refuse("hidden_size", f"{hidden} is not a multiple of {heads} attention heads")
    activation = reader.activation("hidden_act", "gelu", GELU_TANH | GELU_EXACT)
    theta, fraction, scaling = _rope(reader, default_fraction=0.25)
    bias = reader.flag("attention_bias", True)
    return ModelSpec(
        layers=reader.whole("num_hidden_layers", 44),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=max(1, hidden // heads),
        ffn_hidden=reader.whole("intermediate_size", 24576),
        vocab=reader.whole("vocab_size", 50432),
        sequence_length=sequence_length,
        activation="gelu",
        norm="layernorm",
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=True,
        parallel_residual=reader.flag("use_parallel_residual", True),
        gelu_tanh=activation in GELU_TANH,
        norm_epsilon=reader.number("layer_norm_eps", 1e-5),
        rope_theta=theta,
        rotary_fraction=fraction,
        rope_scaling=scaling,
        name=name,
    )


@dataclass(frozen=True)
class _Family:
    """One `model_type`: its reader, the model classes it covers, and the dropout keys with their defaults."""

    read: Callable[[_Reader, int, str], ModelSpec]
    classes: tuple[str, ...]
    dropouts: dict[str, float]


HF_FAMILIES: dict[str, _Family] = {
    "llama": _Family(_llama, ("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"), {"attention_dropout": 0.0}),
    "mistral": _Family(_mistral, ("MistralForCausalLM", "MistralModel"), {"attention_dropout": 0.0}),
    "qwen2": _Family(_qwen2, ("Qwen2ForCausalLM", "Qwen2Model"), {"attention_dropout": 0.0}),
    "qwen3": _Family(_qwen3, ("Qwen3ForCausalLM", "Qwen3Model"), {"attention_dropout": 0.0}),
    "gpt2": _Family(
        _gpt2,
        ("GPT2LMHeadModel", "GPT2Model"),
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    ),
    "gpt_neox": _Family(
        _gpt_neox,
        ("GPTNeoXForCausalLM", "GPTNeoXModel"),
        {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    ),
}


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _list(names: object) -> str:
    return ", ".join(sorted(names))  # type: ignore[call-overload]
