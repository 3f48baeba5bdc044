"""The splits of the committed slots: how many, where they begin, and what their results come to together.

A softmax over a part of the slots, its result o_s and the log2 of its sum lse_s are enough to put the whole together
(flash-decoding; Milakov and Gimelshein, arXiv 1805.02867):

    o = sum_s w_s o_s / sum_s w_s,     w_s = 2^lse_s

                  `length` of them, in as many splits as are filled      the nodes of the tree
    committed    |   chunk   |   chunk   |   chunk   |  .. |  none  |   | one more split |
    slots          o_0, lse_0  o_1, lse_1  ...                            o, lse              ->  `combine`

A chunk is a number of whole blocks, so only the last that is filled has a ragged end. It follows from the length, which
the device knows and the host does not; the number of splits is fixed. An empty one is neither written nor read.

Bytes: `tree_attention.bytes_moved` counts the partial results, 4 rows (D + 1) a split and key head, read once.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.launch import blocks
from specdecode_kernels.variant import Variant

PROGRAMS = 264
"""As many as are wanted at least: two for each of the 132 SMs of an H100 or H200."""

SHORTEST = 256
"""Slots below which a split is not worth its partial result."""


def splits_for(batch: int, kv_heads: int, tiles: int, slots: int) -> int:
    """Into how many splits up to `slots` committed slots are cut, so that the whole GPU has work."""
    return max(1, min(PROGRAMS // max(1, batch * kv_heads * tiles), blocks(slots, SHORTEST)))


def filled_splits(length: int, splits: int, block: int) -> int:
    """How many of the splits hold some of `length` slots."""
    return blocks(length, max(1, blocks(length, splits * block)) * block)


def rows_to_combine(rows: int) -> int:
    """Rows a program of `combine`: few, where there are few in all, for the sake of parallelism."""
    return 4 if rows <= 64 else 16


def combine(
    parts: Tensor, lse: Tensor, lengths: Tensor, ancestors: Tensor, out: Tensor, slots: int, block: int
) -> None:
    """Writes to `out` the mean of the splits' results, each weighted with 2^lse; 0 for what is no node.

    parts: float32 [B, H_kv, splits + 1, rows, D], the last split that of the tree; lse: float32 without D. lengths,
    ancestors, out: as in `tree_attention`, contiguous. slots: the cache's capacity; block: that of the splits.
    """
    batch, kv_heads, splits, rows, dim = parts.shape
    few = rows_to_combine(rows)
    _combine[(blocks(rows, few), kv_heads, batch)](
        *(parts, lse, lengths, ancestors, out),
        *(out.shape[1], slots, rows, out.shape[2] // kv_heads, splits - 1, ancestors.shape[2]),
        ROWS=few,
        BLOCK=block,
        DIM=dim,
        num_warps=_warps(few, dim),
        num_stages=4,
    )


def _warps(rows: int, dim: int) -> int:
    """No more than read 16 bytes a thread."""
    return min(4, rows * dim // 128)


@triton.jit
def length_of(lengths, batch, slots):
    """The committed slots of a row: never outside the cache, whatever `lengths` says."""
    return tl.minimum(tl.maximum(tl.load(lengths + batch), 0), slots).to(tl.int32)


@triton.jit
def chunk_of(length, splits, BLOCK: tl.constexpr):
    """Slots a split: whole blocks, so that at most one split has a ragged end."""
    step = splits * BLOCK
    return tl.maximum((length + step - 1) // step, 1) * BLOCK


@triton.jit
def _combine(
    parts,
    lse,
    lengths,
    ancestors,
    out,
    nodes,
    slots,
    rows,
    group,
    splits,
    words,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid (blocks of rows, key heads, requests)."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    inside = row < rows
    node = row // group
    length = length_of(lengths, batch, slots)
    chunk = chunk_of(length, splits, BLOCK)
    filled = (length + chunk - 1) // chunk
    first = (batch * tl.num_programs(1) + head) * (splits + 1)

    acc = tl.full([ROWS, DIM], 0.0, dtype=tl.float32)
    total = tl.full([ROWS], 0.0, dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for step in tl.range(0, filled + 1, num_stages=4):
        # The splits that hold something, then that of the tree.
        place = (first + tl.where(step == filled, splits, step)) * rows + row
        one = tl.load(lse + place, mask=inside, other=float("-inf"))
        part = tl.load(parts + place[:, None] * DIM + dim, mask=inside[:, None], other=0.0)
        higher = tl.maximum(peak, one)
        against = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(peak - against), tl.exp2(one - against)
        acc = acc * fade[:, None] + part * weight[:, None]
        total = total * fade + weight
        peak = higher

    bits = tl.full([ROWS], 0, dtype=tl.int64)
    for word in range(words):
        bits |= tl.load(ancestors + (batch * nodes + node) * words + word, mask=inside, other=0)
    real = (bits != 0) & (total != 0)
    acc = tl.where(real[:, None], acc / tl.where(real, total, 1.0)[:, None], 0.0)
    place = (batch * nodes + node) * (tl.num_programs(1) * group) + head * group + row % group
    tl.store(out + place[:, None] * DIM + dim, acc.to(out.dtype.element_ty), mask=inside[:, None])


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: few rows; where full, many, all dtypes and dimensions."""
    block_of = {"bf16": 64, "fp16": 64, "fp32": 16} if full else {"bf16": 64}
    for name, block in block_of.items():
        types = dict.fromkeys(("parts", "lse"), "*fp32") | dict.fromkeys(("lengths", "ancestors"), "*i64")
        types |= {"out": f"*{name}"} | dict.fromkeys(("nodes", "slots", "rows", "group", "splits", "words"), "i32")
        for dim in (64, 128) if full else (128,):
            for rows in (4, 16) if full else (4,):
                constants = {"ROWS": rows, "BLOCK": block, "DIM": dim}
                form = f"tree_attention combine rows={rows} D={dim} {name}"
                yield Variant(form, _combine, types, constants, _warps(rows, dim), 4, registers=64)
