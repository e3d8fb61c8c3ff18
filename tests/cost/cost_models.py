"""Small models of every family, and one large one, for tests of the cost layer."""

from autotune.space.model import ModelSpec

GPT = ModelSpec(
    layers=6,
    hidden=512,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn_hidden=2048,
    vocab=1000,
    sequence_length=256,
    activation="gelu",
    norm="layernorm",
    positions="learned",
    max_positions=256,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    name="gpt",
)
LLAMA = ModelSpec(6, 512, 8, 4, 64, 1376, 1000, 256, name="llama")
NEOX = ModelSpec(
    layers=6,
    hidden=512,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn_hidden=2048,
    vocab=1000,
    sequence_length=256,
    activation="gelu",
    norm="layernorm",
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    parallel_residual=True,
    rotary_fraction=0.25,
    name="neox",
)
QWEN = ModelSpec(6, 512, 8, 4, 128, 1536, 1000, 256, qk_norm=True, tied_embeddings=True, name="qwen")
FAMILIES = {model.name: model for model in (GPT, LLAMA, NEOX, QWEN)}

LLAMA_70B = ModelSpec(80, 8192, 64, 8, 128, 28672, 128256, 4096, name="llama-70b")
