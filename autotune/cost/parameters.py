"""Parameters of one stage on one device, after tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.space.model import ModelSpec

__all__ = ["StageShape", "layer_matrix_parameters", "layer_parameters", "padded_rows", "stage_parameters"]


@dataclass(frozen=True)
class StageShape:
    """What tells two stages apart: stages of equal shape cost the same.

    Attributes:
        layers: transformer layers of the stage; 0 is legal for an end stage that holds only embedding or head.
        embeds: the stage looks the tokens up.
        heads: the stage holds the final norm, the output matrix and the loss.
    """

    layers: int
    embeds: bool
    heads: bool


def padded_rows(vocab: int, tp: int, multiple: int) -> int:
    """Vocabulary rounded up to a multiple of `multiple * tp` (Megatron-LM's --make-vocab-size-divisible-by)."""
    unit = multiple * tp
    return -(-vocab // unit) * unit


def layer_matrix_parameters(model: ModelSpec) -> int:
    """Elements of the weight matrices of one whole layer: 12 h^2 for a GPT layer with f = 4h."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = 3 if model.activation == "swiglu" else 2
    return model.hidden * (q + 2 * kv) + q * model.hidden + matrices * model.hidden * model.ffn_hidden


def layer_parameters(model: ModelSpec, tp: int) -> float:
    """Parameters of one layer on one tp rank.

    Matrices and the biases of column-parallel matmuls are split over tp; norms and the biases added after a
    row-parallel matmul are on every rank (Shoeybi et al., arXiv 1909.08053, section 3).
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    columns = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden
    split = layer_matrix_parameters(model) + (q + 2 * kv) * model.qkv_bias + columns * model.mlp_bias
    whole = model.layer_parameters() - split
    return split / tp + whole


def stage_parameters(model: ModelSpec, stage: StageShape, tp: int, vocab_multiple: int = 1) -> float:
    """Parameters of one stage on one tp rank.

    Token table and output matrix are split over tp by rows. A tied output matrix is a copy of its own when the stage
    that holds it doesn't embed, and no parameter beside the table when it does.
    """
    table = padded_rows(model.vocab, tp, vocab_multiple) * model.hidden / tp
    count = stage.layers * layer_parameters(model, tp)
    if stage.embeds:
        count += table + model.max_positions * model.hidden
    if stage.heads:
        count += model.norm_parameters()
        if not (model.tied_embeddings and stage.embeds):
            count += table
    return count
