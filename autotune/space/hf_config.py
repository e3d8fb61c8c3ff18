"""Reads the `config.json` of a Hugging Face model into a `ModelSpec`, without transformers.

Each family has its own names and its own defaults for what the file leaves out (transformers'
`models/*/configuration_*.py`). What changes the model and isn't modelled here is refused by name; nothing is read as
something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.space.hf_reader import Reader, is_whole, listed, show
from autotune.space.hf_rope import read_rope
from autotune.space.model import ModelSpec

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
        raise UserError(f"model_type: missing; modelled: {listed(HF_FAMILIES)}")
    family = HF_FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(f"model_type: {show(kind)} is not modelled; modelled: {listed(HF_FAMILIES)}")
    reader = Reader(values)
    _refuse_other_models(reader, family)
    spec = family.read(reader, sequence_length, name)
    _check_shape(reader, spec)
    if reader.problems:
        raise UserError(f"this {kind} model can't be tuned:\n  " + "\n  ".join(reader.problems))
    return HfModel(spec, _dropout_notes(values, family))


def _refuse_other_models(reader: Reader, family: _Family) -> None:
    """What would make another model of a known family: experts, quantised weights, own code, other heads."""
    values = reader.values
    for key in _EXPERT_KEYS:
        experts = values.get(key)
        if experts is None or (is_whole(experts) and experts in (0, 1)):
            continue
        if is_whole(experts) and experts > 1:
            reader.refuse(key, f"{show(experts)} experts: mixture-of-experts models are not modelled")
        else:
            reader.refuse(key, f"{show(experts)} is no number of experts of a dense model (null, 0 or 1)")
    if values.get("quantization_config") is not None:
        reader.refuse("quantization_config", "quantised weights are not modelled; use the config of the original model")
    if values.get("auto_map"):
        reader.refuse("auto_map", f"{show(values['auto_map'])}: models with code of their own are not modelled")
    classes = values.get("architectures")
    if classes is not None and not isinstance(classes, list):
        reader.refuse("architectures", f"{show(classes)} is not a list of classes")
    elif classes and not all(c in family.classes for c in classes):
        reader.refuse("architectures", f"{show(classes)} is not modelled; modelled: {listed(family.classes)}")
    reader.fixed("use_bidirectional_attention", False, "attention to later tokens")
    reader.fixed("is_causal", True, "attention to later tokens")
    reader.fixed("is_encoder_decoder", False, "an encoder beside the decoder")


def _check_shape(reader: Reader, spec: ModelSpec) -> None:
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


def _head_dim(reader: Reader, hidden: int, heads: int, default: int | None = None) -> int:
    if reader.values.get("head_dim") is not None or default is not None:
        return reader.whole("head_dim", default)
    if hidden % heads:
        reader.refuse("hidden_size", f"{hidden} is not a multiple of {heads} attention heads, and head_dim is not set")
    return max(1, hidden // heads)


def _refuse_sliding_window(reader: Reader, window: object, layers: int, sequence_length: int) -> None:
    """A window at least as long as the sample masks nothing; a shorter one makes another model."""
    if window is None or layers == 0:
        return
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        reader.refuse("sliding_window", f"{show(window)} is not a whole number above 0")
    elif sequence_length > window:
        reader.refuse(
            "sliding_window",
            f"sequence_length {sequence_length} is more than the window of {window} tokens in {layers} layers; "
            f"sliding-window attention is not modelled, use a sequence_length of at most {window}",
        )


def _refuse_unread_window(reader: Reader, layers: int, sequence_length: int) -> None:
    """Families whose attention has no window: a config that asks for one describes another model."""
    window = reader.values.get("sliding_window")
    if not reader.flag("use_sliding_window", True):
        return
    windowed = layers
    if reader.values.get("layer_types") is not None:
        windowed = _sliding_layers(reader, layers, window)
        if windowed and "sliding_window" not in reader.values:
            reader.refuse("layer_types", f"sliding_attention in {windowed} layers, but no sliding_window is given")
    _refuse_sliding_window(reader, window, windowed, sequence_length)


def _sliding_layers(reader: Reader, layers: int, window: object) -> int:
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
        reader.refuse("layer_types", f"{show(kind)} is not modelled; modelled: full_attention")
    return kinds.count("sliding_attention")


def _llama(reader: Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("hidden_size", 4096)
    heads = reader.whole("num_attention_heads", 32)
    reader.activation("hidden_act", "silu", SILU)
    theta, _, scaling = read_rope(reader)
    bias = reader.flag("attention_bias", False)
    layers = reader.whole("num_hidden_layers", 32)
    _refuse_unread_window(reader, layers, sequence_length)
    return ModelSpec(
        layers=layers,
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


def _mistral(reader: Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("hidden_size", 4096)
    heads = reader.whole("num_attention_heads", 32)
    # absent means 8 key/value heads, null means as many as heads
    kv_default = heads if "num_key_value_heads" in reader.values else 8
    layers = reader.whole("num_hidden_layers", 32)
    reader.activation("hidden_act", "silu", SILU)
    theta, _, scaling = read_rope(reader)
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


def _qwen(reader: Reader, sequence_length: int, name: str, third: bool) -> ModelSpec:
    hidden = reader.whole("hidden_size", 4096)
    heads = reader.whole("num_attention_heads", 32)
    # absent means 32 key/value heads, null means as many as heads
    kv_default = heads if "num_key_value_heads" in reader.values else 32
    layers = reader.whole("num_hidden_layers", 32)
    reader.activation("hidden_act", "silu", SILU)
    theta, _, scaling = read_rope(reader)
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


def _qwen2(reader: Reader, sequence_length: int, name: str) -> ModelSpec:
    return _qwen(reader, sequence_length, name, third=False)


def _qwen3(reader: Reader, sequence_length: int, name: str) -> ModelSpec:
    return _qwen(reader, sequence_length, name, third=True)


def _gpt2(reader: Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("n_embd", 768, ("hidden_size",))
    heads = reader.whole("n_head", 12, ("num_attention_heads",))
    if hidden % heads:
        reader.refuse("n_embd", f"{hidden} is not a multiple of {heads} attention heads")
    activation = reader.activation("activation_function", "gelu_new", GELU_TANH | GELU_EXACT)
    reader.fixed("scale_attn_weights", True, "attention scores without the 1/sqrt(head_dim) factor")
    reader.fixed("scale_attn_by_inverse_layer_idx", False, "attention scores divided by the layer's number")
    reader.fixed("add_cross_attention", False, "cross attention")
    layers = reader.whole("n_layer", 12, ("num_hidden_layers",))
    _refuse_unread_window(reader, layers, sequence_length)
    return ModelSpec(
        layers=layers,
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


def _gpt_neox(reader: Reader, sequence_length: int, name: str) -> ModelSpec:
    hidden = reader.whole("hidden_size", 6144)
    heads = reader.whole("num_attention_heads", 64)
    if hidden % heads:
        reader.refuse("hidden_size", f"{hidden} is not a multiple of {heads} attention heads")
    activation = reader.activation("hidden_act", "gelu", GELU_TANH | GELU_EXACT)
    theta, fraction, scaling = read_rope(reader, default_fraction=0.25)
    bias = reader.flag("attention_bias", True)
    layers = reader.whole("num_hidden_layers", 44)
    _refuse_unread_window(reader, layers, sequence_length)
    return ModelSpec(
        layers=layers,
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

    read: Callable[[Reader, int, str], ModelSpec]
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
