"""The contract of a model: everything the decode loop asks of a target or of a draft model.

A model appends the nodes of a draft tree to a cache and returns the logits after every node. It samples nothing,
and knows nothing about drafts, rules or coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdecode_ref.cache import Cache


class Output(NamedTuple):
    """logits: [B, N, V], after every node, in the model's dtype; features: for each layer asked for, [B, N, hidden]."""

    logits: Tensor
    features: tuple[Tensor, ...] = ()


class Model(Protocol):
    """A causal language model that can be verified in a tree."""

    name: str
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    device: torch.device

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of `batch` rows with room for `capacity` tokens each (it grows when that is not enough)."""
        ...

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> Output:
        """Append nodes to the cache and return what follows each of them.

        tokens:   int64 [B, N], padded at the end of shorter rows.
        parents:  for each row, its real nodes: an index among the row's pending nodes, or -1 (see `Cache.append`).
        features: k asks for the residual stream after k layers, before the final norm (0 is the embedding).

        The caller commits or rolls back. Rows beyond `len(parents[b])` are padding and hold no meaning.
        """
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> list[tuple[Tensor, ...]]:
        """Append and commit whole prompts (chains), without the LM head; for each row, features [P, hidden]."""
        ...
