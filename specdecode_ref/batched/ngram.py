"""Prompt lookup for a batch: `drafters.ngram`, on padded tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdecode_ref.drafters.ngram import Lookup, NGram


class Found(NamedTuple):
    """length: int64 [B], of the n-gram that was found again, 0 for none. tokens: int64 [B, gamma], what followed it;
    -1 behind the end of the text."""

    length: Tensor
    tokens: Tensor


def find(tokens: Tensor, lengths: Tensor, gamma: int, longest: int, shortest: int) -> Found:
    """Look up the last `longest` to `shortest` tokens of each text; the longest match wins, and of equals the latest.

    tokens: int64 [B, T], padded. lengths: int64 [B], how many of them are text.
    """
    found, followed = [], torch.full((len(tokens), gamma), -1)
    settings = NGram(gamma, longest, shortest)
    for b, (row, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
        n, after = Lookup(settings).find(row[:length])
        found.append(n)
        followed[b, : len(after)] = torch.tensor(after, dtype=torch.int64)
    return Found(torch.tensor(found, device=tokens.device), followed.to(tokens.device))
