"""Hugging Face configs are read as transformers reads them, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.space.hf_config import model_from_hf, read_hf_config

MODELS = Path(__file__).parents[2] / "search_spaces" / "models"

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_window_layers": 21,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "sliding_window": None}

# parameter counts as published with the weights (safetensors metadata and model cards)
PUBLISHED_FILES = {
    "gpt2": 124_439_808,
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "pythia-70m": 70_426_624,
}
PUBLISHED = [
    (LLAMA, 1_100_048_384),  # TinyLlama-1.1B
    (QWEN2, 494_032_768),  # Qwen2.5-0.5B
    (MISTRAL | {"num_key_value_heads": 8}, 7_241_732_096),  # Mistral-7B-v0.1
    ({"model_type": "llama"}, 6_738_415_616),  # Llama-2-7B is the class defaults
    ({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),  # GPT-2 XL
]


def refusal(config: dict[str, Any], sequence_length: int = 512) -> str:
    with pytest.raises(UserError) as caught:
        model_from_hf(config, sequence_length)
    return str(caught.value)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_FILES.items())
def test_shipped_configs_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert read_hf_config(MODELS / name / "config.json", 128).spec.parameter_count() == parameters


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED)
def test_known_models_have_the_published_number_of_parameters(config: dict[str, Any], parameters: int) -> None:
    assert model_from_hf(config, 128).spec.parameter_count() == parameters


def test_a_folder_is_read_like_its_config_and_names_the_model() -> None:
    assert read_hf_config(MODELS / "gpt2", 64) == read_hf_config(MODELS / "gpt2" / "config.json", 64)
    assert read_hf_config(MODELS / "gpt2", 64).spec.name == "gpt2"


def test_each_family_has_its_own_default_for_tied_embeddings() -> None:
    tied = {
        kind: model_from_hf({"model_type": kind, "sliding_window": None}, 64).spec.tied_embeddings
        for kind in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox")
    }
    assert tied == {"gpt2": True, "llama": False, "mistral": False, "qwen2": False, "qwen3": False, "gpt_neox": False}


def test_null_key_value_heads_mean_as_many_as_heads_and_absent_ones_the_family_default() -> None:
    for kind, absent in (("llama", 16), ("mistral", 8), ("qwen2", 32), ("qwen3", 32)):
        base = {"model_type": kind, "num_attention_heads": 16 if kind in ("llama", "mistral") else 32}
        base["sliding_window"] = None
        assert model_from_hf(base, 64).spec.kv_heads == absent
        null = base | {"num_key_value_heads": None, "num_attention_heads": 16}
        assert model_from_hf(null, 64).spec.kv_heads == 16


def test_head_dim_is_honoured_and_qwen3_has_its_own_default() -> None:
    assert model_from_hf(LLAMA | {"head_dim": 128}, 64).spec.head_dim == 128
    assert model_from_hf(LLAMA | {"head_dim": None}, 64).spec.head_dim == 64
    assert model_from_hf({"model_type": "qwen3", "hidden_size": 1024}, 64).spec.head_dim == 128
    assert "head_dim" in refusal({"model_type": "qwen3", "head_dim": None})


def test_biases_follow_the_family() -> None:
    llama = model_from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True}, 64).spec
    assert (llama.qkv_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = model_from_hf(QWEN2, 64).spec
    assert (qwen2.qkv_bias, qwen2.attention_output_bias, qwen2.mlp_bias) == (True, False, False)
    qwen3 = model_from_hf({"model_type": "qwen3"}, 64).spec
    assert (qwen3.qkv_bias, qwen3.attention_output_bias, qwen3.qk_norm) == (False, False, True)
    neox = model_from_hf({"model_type": "gpt_neox", "attention_bias": False}, 64).spec
    assert (neox.qkv_bias, neox.attention_output_bias, neox.mlp_bias) == (False, False, True)


def test_gpt2_inner_width_null_or_absent_is_four_times_the_model() -> None:
    assert model_from_hf({"model_type": "gpt2", "n_inner": None}, 64).spec.ffn_hidden == 4 * 768
    assert model_from_hf({"model_type": "gpt2", "n_inner": 1000}, 64).spec.ffn_hidden == 1000
    assert model_from_hf({"model_type": "gpt2", "hidden_size": 960, "num_hidden_layers": 3}, 64).spec.layers == 3


@pytest.mark.parametrize(
    ("config", "theta", "fraction"),
    [
        ({"model_type": "llama", "rope_theta": 5e5}, 5e5, 1.0),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, 1.0),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "default"}, "rope_theta": 7e4}, 7e4, 1.0),
        ({"model_type": "llama", "rope_scaling": {"type": "default"}}, 1e4, 1.0),
        ({"model_type": "llama", "rope_scaling": {"type": "default", "rope_theta": 5e5}}, 5e5, 1.0),
        ({"model_type": "llama", "rope_scaling": {"rope_theta": 5e5}, "rope_theta": 500000}, 5e5, 1.0),
        ({"model_type": "gpt_neox"}, 1e4, 0.25),
        ({"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 20000}, 2e4, 0.5),
        ({"model_type": "gpt_neox", "rope_parameters": {"rope_theta": 3e4, "partial_rotary_factor": 1.0}}, 3e4, 1.0),
    ],
)
def test_rope_is_read_in_its_old_and_new_spelling(config: dict[str, Any], theta: float, fraction: float) -> None:
    spec = model_from_hf(config, 64).spec
    assert (spec.rope_theta, spec.rotary_fraction) == (theta, fraction)


LINEAR = {"rope_type": "linear", "factor": 4.0}


def test_rope_scaling_and_rope_parameters_may_both_be_given_when_they_agree() -> None:
    both = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": LINEAR | {"rope_theta": 5e5}}
    spec = model_from_hf(both, 64).spec
    assert spec.rope_scaling is not None
    assert (spec.rope_scaling.kind, spec.rope_scaling.factor, spec.rope_theta) == ("linear", 4.0, 5e5)
    beside = LLAMA | {"rope_scaling": {"rope_theta": 5e5}, "rope_parameters": LINEAR}
    assert model_from_hf(beside, 64).spec.rope_scaling == spec.rope_scaling


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, '"yarn"'),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": LINEAR}, "differs from rope_parameters"),
        ({"rope_scaling": LINEAR | {"factor": 2.0}, "rope_parameters": LINEAR}, "differs from rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2.0}}, 'type "default"'),
        ({"rope_scaling": {"rope_type": None, "type": "yarn", "factor": 2.0}}, '"yarn"'),
        ({"rope_scaling": {"factor": 2.0}}, "no rope_type"),
        ({"rope_scaling": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_scaling.rope_theta 500000"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta 10000"),
        ({"rope_scaling": {"full_attention": {"rope_theta": 1e4}}}, "different layers"),
        ({"rope_scaling": {"rope_theta": "big"}}, "rope_scaling.rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
    ],
)
def test_rope_that_contradicts_itself_is_refused(change: dict[str, Any], named: str) -> None:
    assert named in refusal(LLAMA | change)


def test_activations_are_told_apart() -> None:
    assert model_from_hf({"model_type": "gpt2"}, 64).spec.gelu_tanh
    assert not model_from_hf({"model_type": "gpt2", "activation_function": "gelu"}, 64).spec.gelu_tanh
    assert not model_from_hf({"model_type": "gpt_neox"}, 64).spec.gelu_tanh
    assert '"relu"' in refusal({"model_type": "gpt2", "activation_function": "relu"})
    assert '"gelu"' in refusal(LLAMA | {"hidden_act": "gelu"})


def test_gpt_neox_may_turn_the_parallel_residual_off() -> None:
    assert model_from_hf({"model_type": "gpt_neox"}, 64).spec.parallel_residual
    assert not model_from_hf({"model_type": "gpt_neox", "use_parallel_residual": False}, 64).spec.parallel_residual


def test_a_sliding_window_matters_only_when_the_sample_is_longer() -> None:
    mistral = {"model_type": "mistral"}  # window 4096 by default
    assert model_from_hf(mistral, 4096).spec.sequence_length == 4096
    message = refusal(mistral, 4097)
    assert "4097" in message
    assert "4096" in message
    assert model_from_hf(mistral | {"sliding_window": None}, 8192)
    assert model_from_hf(QWEN2, 65536)  # use_sliding_window is false
    used = QWEN2 | {"use_sliding_window": True, "sliding_window": 1024}
    assert "3 layers" in refusal(used, 2048)  # from max_window_layers 21 of 24 on
    assert model_from_hf(used | {"max_window_layers": 24}, 2048)
    layered = used | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 22}
    assert "2 layers" in refusal(layered, 2048)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_families_without_a_window_refuse_one_that_the_sample_exceeds(kind: str) -> None:
    windowed = {"model_type": kind, "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    message = refusal(windowed | {"sliding_window": 256}, 257)
    assert "257" in message
    assert "256" in message
    assert model_from_hf(windowed | {"sliding_window": 256}, 256).spec.sequence_length == 256
    assert "no sliding_window is given" in refusal(windowed, 64)
    full = windowed | {"layer_types": ["full_attention"] * 2}
    assert model_from_hf(full | {"sliding_window": 256}, 512).spec.layers == 2
    assert "chunked_attention" in refusal(full | {"layer_types": ["full_attention", "chunked_attention"]})


def test_counts_up_to_the_largest_and_one_expert_are_read() -> None:
    spec = model_from_hf(LLAMA | {"vocab_size": 2**31 - 1, "num_local_experts": 1, "auto_map": None}, 64).spec
    assert spec.vocab == 2**31 - 1


@pytest.mark.parametrize(
    "kind",
    ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gemma", "gemma2", "phi", "phi3", "gpt_oss", "opt", "mamba"],
)
def test_other_kinds_of_models_are_refused_by_name(kind: str) -> None:
    message = refusal(LLAMA | {"model_type": kind})
    assert kind in message
    assert "llama" in message  # names what is modelled


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_local_experts": 8}, "8 experts"),
        ({"num_local_experts": "8"}, 'num_local_experts: "8"'),
        ({"num_local_experts": 8.0}, "num_local_experts: 8.0"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}, "OwnForCausalLM"),
        ({"architectures": "LlamaForTokenClassification"}, "LlamaForTokenClassification"),
        ({"architectures": ["LlamaForCausalLM", "LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"is_causal": False}, "is_causal"),
        ({"hidden_act": ["silu"]}, 'hidden_act: activation ["silu"]'),
        ({"hidden_act": {"name": "silu"}}, "hidden_act"),
        ({"vocab_size": 10**26}, "from 1 to 2147483647"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers: 2147483648"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, '"2"'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, '"dynamic"'),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, '"yarn"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": 2050}, "2050"),
        ({"num_key_value_heads": 5}, "5"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "32000"}, '"32000"'),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_would_be_another_llama_is_refused_with_its_value(change: dict[str, Any], named: str) -> None:
    assert named in refusal(LLAMA | change)


@pytest.mark.parametrize(
    "change", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"add_cross_attention": True}]
)
def test_gpt2_variants_that_compute_something_else_are_refused(change: dict[str, Any]) -> None:
    assert next(iter(change)) in refusal({"model_type": "gpt2"} | change)


def test_a_gpt2_for_another_task_is_refused_however_its_class_is_written() -> None:
    for classes in ("GPT2ForTokenClassification", ["GPT2ForTokenClassification"], ["GPT2LMHeadModel", {"a": 1}]):
        assert "architectures" in refusal({"model_type": "gpt2", "architectures": classes})


def test_every_reason_is_told_at_once() -> None:
    message = refusal(LLAMA | {"hidden_act": "relu", "num_experts": 4, "rope_scaling": {"type": "yarn"}})
    for key in ("hidden_act", "num_experts", "rope_scaling"):
        assert key in message


def test_gpt2_with_fewer_positions_than_the_sample_is_refused_with_both_numbers() -> None:
    message = refusal({"model_type": "gpt2"}, 1025)
    assert "1025" in message
    assert "1024" in message


def test_dropout_is_noted_not_hidden() -> None:
    (note,) = model_from_hf({"model_type": "gpt2"}, 64).notes
    assert "attn_pdrop 0.1" in note
    assert model_from_hf({"model_type": "gpt2", "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}, 64).notes == ()
    assert model_from_hf(LLAMA, 64).notes == ()


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model_type": "llama", "hidden_size": NaN}'])
def test_files_that_are_no_model_config_are_refused_with_their_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_hf_config(path, 64)


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json"):
        read_hf_config(tmp_path / "nowhere.json", 64)


def test_the_file_may_carry_any_other_key(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"_name_or_path": "x", "torch_dtype": "bfloat16", "pretraining_tp": 1}))
    assert read_hf_config(path, 64).spec.parameter_count() == 1_100_048_384
