"""The whole model written once more, plainly: one process, float64, autograd alone, none of the product's modules.

It shares with the product only the names and initial values of the parameters and the tokens.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from autotune.profiling.data import sample_tokens
from autotune.profiling.init import initial_value
from autotune.space.model import ModelSpec
from autotune.space.rope import RopeScaling


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, vocabulary unpadded; a tied head is no parameter."""
    h, f, q, kv = spec.hidden, spec.ffn_hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
        return found | ({f"{name}.bias": (width,)} if spec.norm == "layernorm" else {})

    def linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
        return found | ({f"{name}.bias": (rows,)} if bias else {})

    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (spec.vocab, h)}
    if spec.positions == "learned":
        shapes["positions.weight"] = (spec.max_positions, h)
    for i in range(spec.layers):
        at = f"layers.{i}"
        shapes |= norm(f"{at}.attention_norm", h) | norm(f"{at}.mlp_norm", h)
        shapes |= linear(f"{at}.attention.query", q, h, spec.qkv_bias)
        shapes |= linear(f"{at}.attention.key", kv, h, spec.qkv_bias)
        shapes |= linear(f"{at}.attention.value", kv, h, spec.qkv_bias)
        shapes |= linear(f"{at}.attention.output", h, q, spec.attention_output_bias)
        if spec.qk_norm:
            shapes[f"{at}.attention.query_norm.weight"] = shapes[f"{at}.attention.key_norm.weight"] = (spec.head_dim,)
        if spec.activation == "swiglu":
            shapes |= linear(f"{at}.mlp.gate", f, h, spec.mlp_bias)
        shapes |= linear(f"{at}.mlp.up", f, h, spec.mlp_bias) | linear(f"{at}.mlp.down", h, f, spec.mlp_bias)
    shapes |= norm("norm", h)
    return shapes if spec.tied_embeddings else shapes | {"head.weight": (spec.vocab, h)}


class Reference:
    """Loss and gradients of the mean loss over one global batch."""

    def __init__(self, spec: ModelSpec, seed: int, samples: int, step: int = 0) -> None:
        self.spec = spec
        self.parameters = {
            name: initial_value(spec, seed, name, shape).double().requires_grad_()
            for name, shape in parameter_shapes(spec).items()
        }
        tokens = torch.stack([sample_tokens(seed, step, i, spec.sequence_length, spec.vocab) for i in range(samples)])
        logits = self._logits(tokens[:, :-1])
        log_probabilities = logits - logits.exp().sum(-1, keepdim=True).log()
        loss = -log_probabilities.gather(-1, tokens[:, 1:, None]).mean()
        loss.backward()
        self.loss = float(loss.detach())
        self.gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def _logits(self, tokens: Tensor) -> Tensor:
        p, spec = self.parameters, self.spec
        x = p["embedding.weight"][tokens]
        if spec.positions == "learned":
            x = x + p["positions.weight"][torch.arange(spec.sequence_length)]
        for i in range(spec.layers):
            at = f"layers.{i}"
            attended = self._attention(f"{at}.attention", self._norm(f"{at}.attention_norm", x))
            middle = x if spec.parallel_residual else x + attended
            out = self._mlp(f"{at}.mlp", self._norm(f"{at}.mlp_norm", middle))
            x = x + attended + out
        head = p["embedding.weight"] if spec.tied_embeddings else p["head.weight"]
        return self._norm("norm", x) @ head.T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if self.spec.norm == "rmsnorm":
            return self._rms(f"{name}.weight", x)
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + self.spec.norm_epsilon).sqrt()
        return scaled * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def _rms(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.spec.norm_epsilon).sqrt() * self.parameters[name]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.parameters[f"{name}.weight"].T
        return y + self.parameters[f"{name}.bias"] if f"{name}.bias" in self.parameters else y

    def _attention(self, name: str, x: Tensor) -> Tensor:
        spec = self.spec
        batch, length, _ = x.shape
        q = self._linear(f"{name}.query", x).view(batch, length, spec.heads, spec.head_dim)
        k = self._linear(f"{name}.key", x).view(batch, length, spec.kv_heads, spec.head_dim)
        v = self._linear(f"{name}.value", x).view(batch, length, spec.kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._rms(f"{name}.query_norm.weight", q), self._rms(f"{name}.key_norm.weight", k)
        if spec.positions == "rope":
            q, k = self._rotate(q), self._rotate(k)
        group = spec.heads // spec.kv_heads
        heads = []
        for head in range(spec.heads):
            scores = q[:, :, head] @ k[:, :, head // group].transpose(1, 2) / math.sqrt(spec.head_dim)
            scores = scores + torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            heads.append(weights @ v[:, :, head // group])
        return self._linear(f"{name}.output", torch.cat(heads, dim=-1))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate each pair (i, i + width / 2) by position * theta^(-2 i / width)."""
        width = int(self.spec.head_dim * self.spec.rotary_fraction) // 2 * 2
        half = width // 2
        rates = torch.tensor([self.spec.rope_theta ** (-2 * i / width) for i in range(half)], dtype=torch.float64)
        if self.spec.rope_scaling is not None:
            rates = self._llama3_rates(rates, self.spec.rope_scaling)
        angle = (torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rates)[:, None, :]
        a, b = x[..., :half], x[..., half:width]
        turned = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[..., width:]]
        return torch.cat(turned, dim=-1)

    @staticmethod
    def _llama3_rates(rates: Tensor, scaling: RopeScaling) -> Tensor:
        """By wavelength: long ones divided, short ones kept, a straight line in context/wavelength between."""
        wavelength = 2 * math.pi / rates
        long, short = (scaling.original_positions / f for f in (scaling.low_freq_factor, scaling.high_freq_factor))
        share = scaling.original_positions / wavelength - scaling.low_freq_factor
        share = share / (scaling.high_freq_factor - scaling.low_freq_factor)
        between = (1 - share) * rates / scaling.factor + share * rates
        return torch.where(wavelength > long, rates / scaling.factor, torch.where(wavelength < short, rates, between))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        up = self._linear(f"{name}.up", x)
        if self.spec.activation == "swiglu":
            gate = self._linear(f"{name}.gate", x)
            return self._linear(f"{name}.down", gate / (1 + (-gate).exp()) * up)
        if self.spec.gelu_tanh:
            inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
            return self._linear(f"{name}.down", 0.5 * up * (1 + inner.tanh()))
        return self._linear(f"{name}.down", 0.5 * up * (1 + torch.erf(up / math.sqrt(2))))


@functools.cache
def reference(spec: ModelSpec, seed: int, samples: int, step: int = 0) -> Reference:
    """The reference of a model and batch, computed once a process."""
    return Reference(spec, seed, samples, step)
