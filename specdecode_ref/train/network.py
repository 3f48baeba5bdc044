"""The transformer layer once more, as training needs it: whole sequences, gradients, weights in a flat dictionary.

The decoder's own layer (`models/transformer.py`) packs its weights and keeps a cache. This one is a page of plain
products on the same weights, under the names of the checkpoint that they become; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The shape of a layer. turn: [head_dim / 2], radians a position."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    turn: Tensor


@dataclass
class Past:
    """Keys and values of one layer, [B, H_kv, *, D]: those of the sequence, then one pair for each deeper guess."""

    keys: list[Tensor]
    values: list[Tensor]


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x at root mean square 1 over its last dimension, times `weight` where there is one."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def attend(weights: Weights, at: str, sizes: Sizes, x: Tensor, depth: int, past: Past, start: int = 0) -> Tensor:
    """Self-attention over x [B, M, in], causal; at `depth` 0 every position sees those before it and itself.

    Deeper down, x begins at position `start`, and position i stands for a guess `depth` tokens after it: it sees the
    sequence up to i, and of the deeper keys only its own, one a level (the training-time test of EAGLE-3, section 3.2).
    Appends to `past`.
    """
    batch, length, _ = x.shape
    q, k, v = (
        linear(x, weights[f"{at}{name}_proj.weight"]).view(batch, length, -1, sizes.head_dim).transpose(1, 2)
        for name in "qkv"
    )
    places = torch.arange(start, start + length, device=x.device)
    angle = (places + depth)[:, None].float() * sizes.turn
    q, k = _rotate(q, angle), _rotate(k, angle)
    past.keys.append(k)
    past.values.append(v)
    group = sizes.heads // sizes.kv_heads
    keys, values = ([t.repeat_interleave(group, 1) for t in side] for side in (past.keys, past.values))
    scale = sizes.head_dim**-0.5
    seen = torch.arange(keys[0].shape[2], device=x.device) <= places[:, None]
    scores = [(q @ keys[0].transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))]
    scores += [(q * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    ours, *own = torch.cat(scores, -1).softmax(-1).split([len(seen[0]), *[1] * len(keys[1:])], -1)
    out = ours @ values[0] + sum(share * value for share, value in zip(own, values[1:], strict=True))
    return linear(out.transpose(1, 2).reshape(batch, length, -1), weights[f"{at}o_proj.weight"])


def mlp(weights: Weights, at: str, x: Tensor) -> Tensor:
    """The gated feed-forward block on x [..., hidden]."""
    gate, up = (linear(x, weights[f"{at}{name}_proj.weight"]) for name in ("gate", "up"))
    return linear(silu(gate) * up, weights[f"{at}down_proj.weight"])


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn the pairs of channels (d, d + D/2) of x [B, H, L, D]."""
    half = x.shape[-1] // 2
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
