"""The decoder-only transformer that a space tunes, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autotune.space.rope import RopeScaling

__all__ = ["Activation", "ModelSpec", "Norm", "Positions", "padded_vocab"]

Activation = Literal["swiglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned"]


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder-only transformer.

    Each block is norm -> attention -> residual -> norm -> MLP -> residual (both branches read the same input when
    `parallel_residual`). `swiglu` MLPs have three matrices (gate, up, down), `gelu` MLPs two (up, down). A final norm
    and an untied or tied output head follow the last block.

    Attributes:
        head_dim: width of one attention head; q is hidden -> heads * head_dim, k and v hidden -> kv_heads * head_dim.
        sequence_length: tokens of one sample.
        max_positions: rows of the learned position table (0 with rope).
        rotary_fraction: leading share of each head that rope turns (GPT-NeoX `rotary_pct`).
        rope_scaling: stretches the rope frequencies; None for none.
        qk_norm: RMS norm over head_dim of q and k before rope (Qwen3).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    sequence_length: int
    activation: Activation = "swiglu"
    norm: Norm = "rmsnorm"
    positions: Positions = "rope"
    tied_embeddings: bool = False
    max_positions: int = 0
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    gelu_tanh: bool = False
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    name: str = "model"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelSpec:
        """The model that `dataclasses.asdict` wrote."""
        scaling = values.get("rope_scaling")
        return cls(**{**values, "rope_scaling": RopeScaling(**scaling) if scaling else None})

    def layer_parameters(self) -> int:
        """Parameters of one block."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q * self.hidden
        attention += (q + 2 * kv) * self.qkv_bias + self.hidden * self.attention_output_bias
        attention += 2 * self.head_dim * self.qk_norm
        matrices = 3 if self.activation == "swiglu" else 2
        mlp = matrices * self.hidden * self.ffn_hidden
        mlp += ((matrices - 1) * self.ffn_hidden + self.hidden) * self.mlp_bias
        return attention + mlp + 2 * self.norm_parameters()

    def norm_parameters(self) -> int:
        """Parameters of one norm over `hidden`: a weight, and a bias for layernorm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def embedding_parameters(self, vocab: int | None = None) -> int:
        """Parameters of the token table (of `vocab` rows, default unpadded) and the learned positions."""
        return ((self.vocab if vocab is None else vocab) + self.max_positions) * self.hidden

    def parameter_count(self, vocab: int | None = None) -> int:
        """Parameters of the whole model; pass a padded `vocab` to count the table that a tp degree builds."""
        rows = self.vocab if vocab is None else vocab
        head = 0 if self.tied_embeddings else rows * self.hidden
        return self.embedding_parameters(rows) + self.layers * self.layer_parameters() + self.norm_parameters() + head


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of `tp`, so that every tp rank holds the same number of rows."""
    return -(-vocab // tp) * tp
