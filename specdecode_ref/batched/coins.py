"""The coins of a batch: `specdecode_ref.coins`, for many sequences at once. seed: 0 to 2^64 - 1, of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_ref.coins import Coins


def draft(seed: int, sequences: Tensor, base: Tensor, count: int) -> Tensor:
    """The coins float64 [B, count] that draw the nodes of each sequence's tree. sequences, base: int64 [B]."""
    rows = [[Coins(seed, s).draft(b, node) for node in range(count)] for s, b in _keys(sequences, base)]
    return torch.tensor(rows, dtype=torch.float64, device=base.device).view(len(base), count)


def accept(seed: int, sequences: Tensor, base: Tensor, count: int) -> Tensor:
    """The coins float64 [B, count] that the nodes are tested with. sequences, base: int64 [B]."""
    rows = [Coins(seed, s).accept(b, count) for s, b in _keys(sequences, base)]
    return torch.tensor(rows, dtype=torch.float64, device=base.device).view(len(base), count)


def emits(seed: int, sequences: Tensor, base: Tensor, count: int) -> Tensor:
    """The coins float64 [B, count] of the tokens at positions base, base + 1, ... sequences, base: int64 [B]."""
    rows = [Coins(seed, s).emits(b, count) for s, b in _keys(sequences, base)]
    return torch.tensor(rows, dtype=torch.float64, device=base.device).view(len(base), count)


def _keys(sequences: Tensor, base: Tensor) -> zip[tuple[int, int]]:
    return zip(sequences.tolist(), base.tolist(), strict=True)
