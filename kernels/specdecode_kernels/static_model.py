"""A transformer whose cache lives on the device whole: lengths too, so that a round needs no word from the host.

The layers are those of `models.transformer`; only the attention is ours. Every row has room for its longest text and
one tree behind it, so nothing grows, and every shape is known before the first round: what a CUDA graph asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdecode_kernels import cache
from specdecode_kernels.tree_attention import DIMS, tree_attention
from specdecode_ref.batched.tree import Topology
from specdecode_ref.cache import Cache
from specdecode_ref.models.base import Model
from specdecode_ref.models.transformer import Transformer

SLOTS = 4
"""The dimension of a plane's slots."""


def objection(model: Model) -> str | None:
    """Why the kernels cannot run this model, or None."""
    if not isinstance(model, Transformer):
        return f"'{model.name}' is not an in-house transformer"
    if any(model.config.windows):
        return f"'{model.name}' has sliding windows"
    if model.config.head_dim not in DIMS:
        return f"'{model.name}' has heads of {model.config.head_dim}, not of {' or '.join(map(str, DIMS))}"
    if model.dtype == torch.float64:
        return f"'{model.name}' is in float64"
    return None


class StaticModel:
    """`model` with a cache of its own. lengths: int64 [B], how many slots of each row are committed."""

    def __init__(self, model: Transformer, batch: int, capacity: int) -> None:
        self.model = model
        # Keys and values of all layers, [B, layers, 2, H_kv, S, D].
        (self._plane,) = model.new_cache(batch, capacity).planes
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=model.device)

    def prefill(self, prompts: Sequence[Sequence[int]], features: Sequence[int] = ()) -> list[tuple[Tensor, ...]]:
        """Commit whole prompts; for each row, features [P, hidden]. Done once, by the model itself."""
        seen: list[tuple[Tensor, ...]] = [() for _ in prompts]
        if any(map(len, prompts)):
            seen = self.model.prefill(prompts, Cache([self._plane], [SLOTS]), features)
        self.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        return seen

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, topology: Topology, features: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits [B, N, V] after the nodes of a tree, and features [B, N, hidden] for each layer asked for.

        tokens: int64 [B, N], -1 where there is no node. The nodes come to stand behind the committed slots.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        slots = self.lengths[:, None] + places
        positions = self.lengths[:, None] + topology.depths.clamp(min=0)
        row = torch.arange(len(tokens), device=tokens.device)[:, None]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._plane[:, i, 0], self._plane[:, i, 1]
            keys[row, :, slots], values[row, :, slots] = k, v
            return tree_attention(q, keys, values, self.lengths, topology.ancestors)

        x, kept = self.model.through(tokens.clamp(min=0), positions, attend, features)
        return self.model.logits(x), kept

    def commit(self, path: Tensor, count: Tensor) -> None:
        """Keep the first `count` nodes of each row's path."""
        cache.commit([self._plane.flatten(1, 3)], self.lengths, path, count)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, ascending. They move up in place: there may be no room for the cache a second time."""
        for place, row in enumerate(rows):
            if place != row:
                self._plane[place].copy_(self._plane[row])
        self._plane = self._plane[: len(rows)]
        self.lengths = self.lengths[rows]
