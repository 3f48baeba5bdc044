"""A table model without tensors in its cache: the same laws as `TableModel`, several times faster for one row.

The sampled law needs hundreds of thousands of generations, and most of the time of a small one goes into the draft
model's cache. A wrong draft cache cannot change the output law, so drafts may come from here. The target stays a
`TableModel` with the cache that is under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.models.base import Output
from specdecode_ref.models.table import TableModel


class LightCache:
    """Each row's committed tokens, and its pending nodes as (parent, the tokens on the path to it)."""

    planes: tuple[Tensor, ...] = ()

    def __init__(self, batch: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.pending: list[list[tuple[int, ...]]] = [[] for _ in range(batch)]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [len(row) for row in self.tokens]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending nodes of each row's path, and drop the others."""
        for row, pending, path in zip(self.tokens, self.pending, paths, strict=True):
            row.extend(pending[node][-1] for node in path)
        self.rollback()

    def rollback(self) -> None:
        """Drop all pending nodes."""
        self.pending = [[] for _ in self.tokens]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.tokens = [self.tokens[b] for b in rows]
        self.pending = [self.pending[b] for b in rows]


class LightTable:
    """`Model` with the logits of a table model whose `tilt` does not count: they depend on the last tokens alone."""

    def __init__(self, table: TableModel) -> None:
        self.name, self.vocab_size, self.context_length = table.name, table.vocab_size, table.context_length
        self.dtype, self.device = table.dtype, table.device
        self._table = table
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def new_cache(self, batch: int, capacity: int) -> Any:
        """See `LightCache`."""
        return LightCache(batch)

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]], cache: Any, features: Sequence[int] = ()
    ) -> Output:
        """See `Model.forward`: logits [B, N, V], zeros for padding."""
        logits = torch.zeros(*tokens.shape, self.vocab_size, dtype=self.dtype)
        for b, (drafted, row) in enumerate(zip(tokens.tolist(), parents, strict=True)):
            committed, pending = cache.tokens[b], cache.pending[b]
            for i, parent in enumerate(row):
                pending.append((*(pending[parent] if parent >= 0 else ()), drafted[i]))
                logits[b, i] = self._after((*committed, *pending[-1]))
        return Output(logits)

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: Any, features: Sequence[int] = ()
    ) -> list[tuple[Tensor, ...]]:
        """See `Model.prefill`."""
        for row, prompt in zip(cache.tokens, prompts, strict=True):
            row.extend(prompt)
        return [() for _ in prompts]

    def _after(self, tokens: tuple[int, ...]) -> Tensor:
        """The law's logits by the tokens that count, looked up once."""
        seen = tokens[-self._table.order :]
        if seen not in self._rows:
            self._rows[seen] = self._table.logits_after(seen)
        return self._rows[seen]
