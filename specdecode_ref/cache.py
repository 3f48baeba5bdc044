"""The key-value cache: append nodes, commit a path, roll back.

One static buffer per plane (keys and values of every layer, or whatever else a model remembers per token). Each row of
the batch has its own length. Behind its committed slots a row holds *pending* nodes: a draft tree, in node order.
`commit(path)` moves the accepted path to the front of the pending slots and forgets the rest, so that afterwards the
row equals a fresh prefill of its committed tokens: nothing else in the loop has to know that there was a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_ref.tree import ancestor_mask, depths


@dataclass(frozen=True)
class Placement:
    """Where appended nodes go, and what they may see.

    slots:     int64 [B, N], the slot of each node; padding points at the row's spare last slot.
    positions: int64 [B, N], committed length + depth in the tree.
    mask:      bool [B, N, S], True where a node attends: its row's committed slots, its ancestors and itself.
    """

    slots: Tensor
    positions: Tensor
    mask: Tensor


class Cache:
    """Ragged static cache of `batch` rows.

    planes: tensors [B, *, S, D] or [B, S], all with the slots on the dimension given for each in `slot_dims`.
    """

    def __init__(self, planes: Sequence[Tensor], slot_dims: Sequence[int]) -> None:
        self.planes = list(planes)
        self.slot_dims = list(slot_dims)
        batch = planes[0].shape[0]
        self.lengths: list[int] = [0] * batch
        self.pending: list[tuple[int, ...]] = [()] * batch

    @property
    def capacity(self) -> int:
        """Slots a row can hold, one of them spare for padding."""
        return self.planes[0].shape[self.slot_dims[0]]

    def append(self, parents: Sequence[Sequence[int]]) -> Placement:
        """Reserve slots for new nodes of each row.

        A parent is the index of an earlier pending node of the same row (appended now or before), or -1 for the last
        committed token. Rows may differ in length; the shorter ones are padded at the end.
        """
        start = [len(p) for p in self.pending]
        self.pending = [(*old, *new) for old, new in zip(self.pending, parents, strict=True)]
        used = max(length + len(nodes) for length, nodes in zip(self.lengths, self.pending, strict=True))
        self._reserve(used + 1)
        width = max(map(len, parents))
        slots = torch.full((len(parents), width), self.capacity - 1)
        positions = torch.zeros(len(parents), width, dtype=torch.int64)
        mask = torch.zeros(len(parents), width, used, dtype=torch.bool)
        for b, (length, nodes, first) in enumerate(zip(self.lengths, self.pending, start, strict=True)):
            new = len(nodes) - first
            slots[b, :new] = torch.arange(length + first, length + len(nodes))
            positions[b, :new] = length + torch.tensor(depths(nodes)[first:], dtype=torch.int64)
            mask[b, :new, :length] = True
            mask[b, :new, length : length + len(nodes)] = ancestor_mask(nodes)[first:]
            mask[b, new:, 0] = True  # a padded query looks at one slot, so that its softmax is defined
        return Placement(slots, positions, mask)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending nodes of each row's path, in path order, and drop the others."""
        assert len(paths) == len(self.lengths)
        for b, path in enumerate(paths):
            if list(path) != list(range(len(path))):
                source = self.lengths[b] + torch.tensor(path, device=self.planes[0].device)
                for plane, dim in zip(self.planes, self.slot_dims, strict=True):
                    row = plane[b]
                    row.narrow(dim - 1, self.lengths[b], len(path)).copy_(row.index_select(dim - 1, source))
            self.lengths[b] += len(path)
        self.pending = [()] * len(self.lengths)

    def rollback(self) -> None:
        """Drop all pending nodes."""
        self.pending = [()] * len(self.lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows: the others have finished."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.planes[0].device)
        self.planes = [plane.index_select(0, index) for plane in self.planes]
        self.lengths = [self.lengths[b] for b in rows]
        self.pending = [self.pending[b] for b in rows]

    def _reserve(self, needed: int) -> None:
        """Grow to at least `needed` slots, at least doubling, so that a long generation copies only rarely."""
        if needed <= self.capacity:
            return
        extra = max(needed, 2 * self.capacity) - self.capacity
        for i, (plane, dim) in enumerate(zip(self.planes, self.slot_dims, strict=True)):
            shape = list(plane.shape)
            shape[dim] = extra
            self.planes[i] = torch.cat([plane, plane.new_zeros(shape)], dim)
