"""A decoder-only transformer in one page: Llama, Mistral, Qwen2, Qwen3 and SmolLM, verified in a tree.

Read `Transformer.through` from top to bottom. What differs from a textbook is its two arguments: the positions of the
nodes and the attention between them come from outside, from the cache's `Placement`, so that a tree of drafts is one
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention, silu

from specdecode_ref.cache import Cache, Placement
from specdecode_ref.models.base import Output
from specdecode_ref.models.config import TransformerConfig
from specdecode_ref.models.layers import Layer, Weights, read_weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, N, H, D], keys and values [B, N, H_kv, D] of the nodes) -> [B, N, H, D]: remembers the keys and
values, and attends to all that each node may see."""

PREFILL_CHUNK = 256
"""Prompt tokens a forward pass: enough to keep the cores busy, few enough to keep masks and activations small."""


class Transformer:
    """A causal language model that fulfils `models.base.Model`.

    Build it with `Transformer.load(config, weights)`; `truncated(k)` shares its weights.
    """

    def __init__(self, config: TransformerConfig, weights: Weights, name: str = "transformer") -> None:
        self.config, self.name = config, name
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.table, self.layers, self.norm, self.head = weights
        self.dtype, self.device = self.norm.dtype, self.norm.device
        self.turn = config.rope.inverse_frequencies(config.head_dim).to(self.device)

    @classmethod
    def load(
        cls,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        name: str = "transformer",
    ) -> Transformer:
        """From a `config.json` and weights in Hugging Face's names (any mapping; each is read once).

        Raises ModelError when the configuration is not one that this model computes, or the weights do not fit it.
        """
        shape = TransformerConfig.read(config)
        return cls(shape, read_weights(shape, weights, dtype, torch.device(device)), name)

    def truncated(self, layers: int) -> Transformer:
        """The same weights, with the first `layers` layers only, then the final norm and the head."""
        config = replace(
            self.config,
            layers=layers,
            windows=self.config.windows[:layers],
            rotates=self.config.rotates[:layers],
        )
        weights = Weights(self.table, self.layers[:layers], self.norm, self.head)
        return Transformer(config, weights, f"{self.name}[:{layers}]")

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Keys and values of all layers, [B, layers, 2, H_kv, S, D] (one tensor, so a commit is one copy).

        Where layers slide there is a second plane [B, S], the position of each slot.
        """
        c = self.config
        shape = (batch, c.layers, 2, c.kv_heads, capacity + 1, c.head_dim)
        planes, dims = [torch.zeros(shape, dtype=self.dtype, device=self.device)], [4]
        if any(c.windows):
            planes.append(torch.zeros(batch, capacity + 1, dtype=torch.int64, device=self.device))
            dims.append(1)
        return Cache(planes, dims)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> Output:
        """See `Model.forward`."""
        x, kept = self._hidden(tokens, parents, cache, features)
        return Output(self.logits(x), kept)

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> list[tuple[Tensor, ...]]:
        """See `Model.prefill`."""
        return in_chunks(lambda tokens, parents: self._hidden(tokens, parents, cache, features)[1], prompts, cache)

    def _hidden(
        self, tokens: Tensor, parents: Sequence[Sequence[int]], cache: Cache, features: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        where = cache.append(parents)
        return self.through(tokens, where.positions, self._cached(where, cache), features)

    def through(
        self, tokens: Tensor, positions: Tensor, attend: Attend, features: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The residual stream [B, N, hidden] after the last layer, and after each layer that `features` names.

        tokens, positions: int64 [B, N].
        """
        x = embedding(tokens, self.table).to(self.dtype)
        wanted = {0: x} if 0 in features else {}
        rotation = self._rotation(positions)
        for i, layer in enumerate(self.layers):
            x = x + self._attention(i, layer, self._rms(x, layer.attention_norm), rotation, attend)
            x = x + self._mlp(layer, self._rms(x, layer.mlp_norm))
            if i + 1 in features:
                wanted[i + 1] = x
        return x, tuple(wanted[k] for k in features)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [..., V] of a residual stream [..., hidden] after the last layer."""
        return self.head(self._rms(x, self.norm))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """The gated feed-forward block (Shazeer, 2020), [B, N, hidden]."""
        gate, up = layer.gate_up(x).chunk(2, -1)
        return layer.down(silu(gate).mul_(up))

    def _attention(self, i: int, layer: Layer, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Grouped-query attention (Ainslie et al., 2023) of the nodes, [B, N, hidden]."""
        c = self.config
        batch, nodes, _ = x.shape
        qkv = layer.qkv(x).view(batch, nodes, -1, c.head_dim)
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), 2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
        if c.rotates[i]:
            q, k = _rotate(q, rotation), _rotate(k, rotation)
        return layer.output(attend(i, q, k, v).reshape(batch, nodes, -1))

    def _cached(self, where: Placement, cache: Cache) -> Attend:
        """Attention over the cache, where the mask lets a node look.

        The queries that share a key head are stacked as rows of that head, so keys are never repeated.
        """
        c, held, masks = self.config, cache.planes[0], self._masks(where, cache)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batch, nodes = q.shape[:2]
            keys, values = remember(held[:, i, 0], k, where), remember(held[:, i, 1], v, where)
            q = q.view(batch, nodes, c.kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(batch, c.kv_heads, -1, c.head_dim)
            seen = scaled_dot_product_attention(q, keys, values, attn_mask=masks[c.windows[i]])
            return seen.view(batch, c.kv_heads, -1, nodes, c.head_dim).permute(0, 3, 1, 2, 4).flatten(2, 3)

        return attend

    def _masks(self, where: Placement, cache: Cache) -> dict[int | None, Tensor | None]:
        """For each window in use, what is added to the scores: 0 where a node sees a slot, -inf elsewhere."""
        windows = set(self.config.windows)
        mask = where.mask.to(self.device)
        positions = where.positions.to(self.device)
        if any(windows):
            cache.planes[1].scatter_(1, where.slots.to(self.device), positions)
        masks: dict[int | None, Tensor | None] = {}
        for window in windows:
            seen = mask if window is None else within(window, mask, positions, cache.planes[1])
            everything = seen.shape[:2] == (1, 1) and bool((where.mask if window is None else seen).all())
            masks[window] = None if everything else self._additive(seen)
        return masks

    def _additive(self, seen: Tensor) -> Tensor:
        """[B, N, S] -> [B, 1, group * N, S]: one row for every query that is stacked on a key head."""
        added = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        return added.repeat(1, self.config.heads // self.config.kv_heads, 1)[:, None]

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, N, 1, D] of every node; sin carries the sign of the half it multiplies."""
        angle = positions.to(self.device)[:, :, None, None].float() * self.turn
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm (Zhang and Sennrich, 2019), in float32 whatever the dtype, as these models are run."""
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.config.eps)
        return h.to(self.dtype) * weight


def remember(plane: Tensor, new: Tensor, where: Placement) -> Tensor:
    """Write keys or values [B, N, H, D] to their slots of a plane [B, H, S, D]; return all that is in use of it."""
    used = where.mask.shape[-1]
    if len(plane) == 1:
        plane[:, :, used - new.shape[1] : used] = new.transpose(1, 2)
    else:
        rows = torch.arange(len(plane), device=plane.device)[:, None]
        plane[rows, :, where.slots.to(plane.device)] = new
    return plane[:, :, :used]


def within(window: int, mask: Tensor, positions: Tensor, held: Tensor) -> Tensor:
    """The mask [B, N, S] without what lies `window` or more positions back; held [B, S]: the position of each slot."""
    return mask & (held[:, None, : mask.shape[-1]] > positions[:, :, None] - window)


def in_chunks(
    step: Callable[[Tensor, list[range]], tuple[Tensor, ...]], prompts: Sequence[Sequence[int]], cache: Cache
) -> list[tuple[Tensor, ...]]:
    """Append and commit whole prompts, some tokens at a time; for each row, what `step` kept of its tokens, [P, *]."""
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in prompts]
    device = cache.planes[0].device
    for start in range(0, max(map(len, prompts)), PREFILL_CHUNK):
        chunk = [list(p[start : start + PREFILL_CHUNK]) for p in prompts]
        width = max(map(len, chunk))
        tokens = torch.tensor([c + [0] * (width - len(c)) for c in chunk], device=device)
        kept = step(tokens, [range(-1, len(c) - 1) for c in chunk])
        cache.commit([range(len(c)) for c in chunk])
        for b, row in enumerate(chunk):
            parts[b].append(tuple(f[b, : len(row)] for f in kept))
    return [tuple(map(torch.cat, zip(*row, strict=True))) for row in parts]


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels (d, d + D/2) of x [B, N, H, D] by its node's angle."""
    cos, sin = rotation
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
