"""The weights of a transformer: each read once, its shape checked, and what reads the same input fused.

Nothing is held twice: a tensor is dropped as soon as it is packed, so loading needs little more room than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def assemble(
    at: str,
    c: TransformerConfig,
    vector: Callable[[str, int], Tensor],
    fused: Callable[[str, Mapping[str, int], int], Linear],
    inputs: int | None = None,
    norm: str = "input_layernorm",
) -> Layer:
    """The layer whose weights' names begin with `at`.

    vector: name, size -> a norm's weights. fused: prefix, {name: outputs}, inputs -> their products as one.
    inputs: channels that its attention reads, `c.hidden` unless told. norm: the attention's; empty for none.
    """
    q, kv, attention, heads = c.heads * c.head_dim, c.kv_heads * c.head_dim, at + "self_attn.", c.family == "qwen3"
    return Layer(
        attention_norm=vector(f"{at}{norm}.weight", c.hidden) if norm else torch.ones(c.hidden),
        qkv=fused(attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, inputs or c.hidden),
        q_norm=vector(attention + "q_norm.weight", c.head_dim) if heads else None,
        k_norm=vector(attention + "k_norm.weight", c.head_dim) if heads else None,
        output=fused(attention, {"o_proj": c.hidden}, q),
        mlp_norm=vector(at + "post_attention_layernorm.weight", c.hidden),
        gate_up=fused(at + "mlp.", {"gate_proj": c.intermediate, "up_proj": c.intermediate}, c.hidden),
        down=fused(at + "mlp.", {"down_proj": c.hidden}, c.intermediate),
    )


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
        return assemble(at, self.config, self.vector, self.fused)

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
