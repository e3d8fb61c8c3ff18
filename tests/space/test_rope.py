"""Rope frequencies are those of the published configs."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.space.hf_config import model_from_hf
from autotune.space.rope import RopeScaling, rope_frequencies

# Llama-3.1-8B's config.json (facts of the published model)
LLAMA_31: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
}


def test_llama_31_loads_with_its_scaling_and_published_parameter_count() -> None:
    spec = model_from_hf(LLAMA_31, 8192, "llama-3.1-8b").spec
    assert spec.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert spec.parameter_count() == 8_030_261_248


def test_llama3_scaling_keeps_fast_pairs_divides_slow_ones_and_blends_between() -> None:
    plain = rope_frequencies(128, 500000.0)
    scaled = rope_frequencies(128, 500000.0, RopeScaling("llama3", 8.0))
    assert scaled[0] == plain[0] == 1.0
    assert scaled[63] == pytest.approx(500000.0 ** (-126 / 128) / 8, rel=1e-12)
    # pair 32: 500000^-0.5, wavelength 4442.9 tokens, 8192 / 4442.88 = 1.84385 turns, share (1.84385 - 1) / 3 = 0.281283
    assert scaled[32] == pytest.approx(500000.0**-0.5 * (0.281283 + 0.718717 / 8), rel=1e-5)
    assert all(p / 8 <= s <= p for p, s in zip(plain, scaled, strict=True))


def test_linear_scaling_divides_every_frequency() -> None:
    assert rope_frequencies(8, 1e4, RopeScaling("linear", 2.0)) == [f / 2 for f in rope_frequencies(8, 1e4)]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_scaling_are_read(key: str) -> None:
    config = {k: v for k, v in LLAMA_31.items() if k != "rope_scaling"} | {key: {"rope_type": "linear", "factor": 4.0}}
    assert model_from_hf(config, 128, "x").spec.rope_scaling == RopeScaling("linear", 4.0)
