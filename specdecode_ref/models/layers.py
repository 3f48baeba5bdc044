"""The weights of a transformer: each read once, its shape checked, and what reads the same input fused.

Nothing is held twice: a tensor is dropped as soon as it is packed, so loading needs little more room than the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode_ref.errors import ModelError
from specdecode_ref.models.config import TransformerConfig
from specdecode_ref.models.linear import Linear, pack


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, in the order they are used. `q_norm` and `k_norm` are Qwen3's."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Weights(NamedTuple):
    """All of a model: the embedding table [V, hidden], the layers, the final norm [hidden], and the head."""

    table: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear


def read_weights(
    config: TransformerConfig, source: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Weights:
    """The model's weights out of a mapping in Hugging Face's names. Raises ModelError where they do not fit."""
    return _Reader(config, source, dtype, device).weights()


@dataclass
class _Reader:
    config: TransformerConfig
    source: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device

    def weights(self) -> Weights:
        c = self.config
        embed = "model.embed_tokens.weight"
        size = (c.vocab_size, c.hidden)
        # The largest product first, while there is most room. The table stays as stored: few of its rows are read.
        head = pack(self.read(embed if c.tied else "lm_head.weight", *size), None, self.dtype, self.device)
        table = self.read(embed, *size).clone().to(self.device)
        layers = [self.layer(f"model.layers.{i}.") for i in range(c.layers)]
        return Weights(table, layers, self.vector("model.norm.weight", c.hidden), head)

    def layer(self, at: str) -> Layer:
        c = self.config
        q, kv, head_norms = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.family == "qwen3"
        attention = at + "self_attn."
        return Layer(
            attention_norm=self.vector(at + "input_layernorm.weight", c.hidden),
            qkv=self.fused(attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, c.hidden),
            q_norm=self.vector(attention + "q_norm.weight", c.head_dim) if head_norms else None,
            k_norm=self.vector(attention + "k_norm.weight", c.head_dim) if head_norms else None,
            output=self.fused(attention, {"o_proj": c.hidden}, q),
            mlp_norm=self.vector(at + "post_attention_layernorm.weight", c.hidden),
            gate_up=self.fused(at + "mlp.", {"gate_proj": c.intermediate, "up_proj": c.intermediate}, c.hidden),
            down=self.fused(at + "mlp.", {"down_proj": c.hidden}, c.intermediate),
        )

    def fused(self, at: str, outputs: Mapping[str, int], inputs: int) -> Linear:
        """One product in place of several that read the same input; zeros stand in where only some have a bias."""
        weight = torch.cat([self.read(f"{at}{name}.weight", size, inputs) for name, size in outputs.items()])
        names = {f"{at}{name}.bias": size for name, size in outputs.items()}
        bias = None
        if any(name in self.source for name in names):
            parts = [self.read(n, size) if n in self.source else torch.zeros(size) for n, size in names.items()]
            bias = torch.cat(parts)
        return pack(weight, bias, self.dtype, self.device)

    def vector(self, name: str, size: int) -> Tensor:
        return self.read(name, size).to(self.device, self.dtype, copy=True)

    def read(self, name: str, *shape: int) -> Tensor:
        if name not in self.source:
            raise ModelError(f"a weight named {name}", "none", "check that config.json belongs to these weights")
        weight = self.source[name]
        if tuple(weight.shape) != shape:
            found = list(weight.shape)
            raise ModelError(f"{name} of shape {list(shape)}", found, "check that config.json belongs to these weights")
        return weight
