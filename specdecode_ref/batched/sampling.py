"""Laws and picks for a batch of rows: `specdecode_ref.sampling`, row by row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode_ref import sampling
from specdecode_ref.batched.records import Rules
from specdecode_ref.errors import NumericalError


class Best(NamedTuple):
    """logs: log probabilities [R, k], descending. tokens: int64 [R, k]; the first of equals comes first."""

    logs: Tensor
    tokens: Tensor


def law(logits: Tensor, rules: Rules) -> Tensor:
    """The laws [R, V] of rows of logits [R, V], each under its own rule; a row without a law is NaN."""
    out = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    for i, row in enumerate(logits):
        out[i] = _law(row, rules, i)
    return out


def pick(logits: Tensor, rules: Rules, coins: Tensor) -> Tensor:
    """The token int64 [R] that each row's coin draws from its law; -1 where the row has none. coins: float64 [R]."""
    tokens = []
    for row, u in zip(law(logits, rules), coins.tolist(), strict=True):
        tokens.append(-1 if row.isnan().any() else sampling.pick(row, u))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def top_k(logits: Tensor, k: int) -> Best:
    """The k likeliest tokens of each row [R, V] at temperature 1, and their log probabilities.

    A row that holds NaN or +inf, or nothing finite, has NaN and -1 throughout.
    """
    logs = logits.double().log_softmax(-1)
    order = logs.sort(dim=-1, descending=True, stable=True)
    values, tokens = order.values[:, :k], order.indices[:, :k]
    bad = logs.isnan().any(-1, keepdim=True)
    return Best(values.masked_fill(bad, math.nan), tokens.masked_fill(bad, -1))


def _law(row: Tensor, rules: Rules, i: int) -> Tensor:
    try:
        return sampling.law(row, rules.row(i), (), 0)
    except NumericalError:
        return torch.full(row.shape, math.nan, dtype=torch.float64, device=row.device)
