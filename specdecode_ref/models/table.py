"""A language model small enough to enumerate: its logits are a table indexed by the last few tokens.

The exact law of every sequence can be written down, so every claim about the output law can be checked to rounding.
It fulfils the whole model contract: its cache holds the tokens themselves, so a tree mask, a position or a commit that
is wrong changes its answers as it would change a transformer's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdecode_ref.cache import Cache
from specdecode_ref.models.base import Output


class TableModel:
    """logits(next | last `order` tokens, position) = `table[t_order, ..., t_1] + tilt[position % period]`.

    table: [V + 1, ..., V + 1, V] with `order` context axes, the oldest token first; index V stands for "before the
           beginning".
    tilt:  [period, V] or None; makes the law depend on the position too, so that position bugs show.
    """

    def __init__(self, table: Tensor, tilt: Tensor | None = None, name: str = "table") -> None:
        self.name = name
        self.table = table
        self.vocab_size = table.shape[-1]
        self.order = table.dim() - 1
        self.tilt = table.new_zeros(1, self.vocab_size) if tilt is None else tilt
        self.context_length = 1 << 20
        self.dtype, self.device = table.dtype, table.device

    @classmethod
    def random(
        cls,
        vocab_size: int,
        order: int = 3,
        period: int = 7,
        scale: float = 1.5,
        seed: int = 0,
        name: str = "table",
    ) -> TableModel:
        """Normal logits of the given scale, in float64, from a seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = [vocab_size + 1] * order + [vocab_size]
        table = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        tilt = torch.randn(period, vocab_size, generator=generator, dtype=torch.float64) * scale / 2
        return cls(table, tilt, name)

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Logits [V] of the token after `tokens`: the definition that `forward` must agree with."""
        context = [*[self.vocab_size] * self.order, *tokens][-self.order :]
        return self.table[tuple(context)] + self.tilt[(len(tokens) - 1) % len(self.tilt)]

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Two planes [B, S]: the tokens and their positions."""
        planes = [torch.zeros(batch, capacity + 1, dtype=torch.int64, device=self.device) for _ in range(2)]
        return Cache(planes, slot_dims=(1, 1))

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> Output:
        """See `Model.forward`. A node reads its context through the mask, ordered by position, as attention would."""
        where = cache.append(parents)
        held, positions = cache.planes
        held.scatter_(1, where.slots, tokens)
        positions.scatter_(1, where.slots, where.positions)
        logits = torch.zeros(*tokens.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        used, period = where.mask.shape[-1], len(self.tilt)
        for b, row in enumerate(parents):
            slots = sorted(zip(positions[b, :used].tolist(), range(used), held[b, :used].tolist(), strict=True))
            masks = where.mask[b, : len(row)].tolist()
            for i, (mask, position) in enumerate(zip(masks, where.positions[b].tolist(), strict=False)):
                seen = [token for _, slot, token in slots if mask[slot]]
                context = [*[self.vocab_size] * self.order, *seen][-self.order :]
                logits[b, i] = self.table[tuple(context)] + self.tilt[position % period]
        return Output(logits)

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> list[tuple[Tensor, ...]]:
        """See `Model.prefill`."""
        width = max(map(len, prompts))
        tokens = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts], dtype=torch.int64)
        self.forward(tokens, [range(-1, len(p) - 1) for p in prompts], cache)
        cache.commit([range(len(p)) for p in prompts])
        return [() for _ in prompts]
