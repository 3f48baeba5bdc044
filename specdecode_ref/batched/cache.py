"""The commit of a batch: `Cache.commit`, with paths and lengths as tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def commit(planes: Sequence[Tensor], lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """Move accepted paths to the front of the pending slots, in place; then add `count` to `lengths`.

    planes:  of one shape [B, H, S, D], keys and values of every layer; row b holds lengths[b] committed slots, and
             behind them its pending nodes in order.
    lengths: int64 [B]. path: int64 [B, N], ascending nodes, as in `Verdicts`. count: int64 [B], how many of them count.
    """
    for b, (length, kept) in enumerate(zip(lengths.tolist(), count.tolist(), strict=True)):
        source = length + path[b, :kept]
        for plane in planes:
            plane[b, :, length : length + kept] = plane[b, :, source]
    lengths += count
