"""Prompt lookup for a batch: the longest n-gram that ends the text and stood in it before, in one pass for all n.

For every place e before the end of a text of L tokens, let m(e) be how many tokens before e are, going backwards, those
before L, up to `longest`. An n-gram that ends at e matches for every n <= m(e), so one count serves all n, and

    the longest match, and of equals the latest    =    the maximum of (m(e), e),    packed in one int64: m 2^32 + e

over 1 <= e < L with m(e) >= shortest. (Saxena, "Prompt lookup decoding", 2023.)

                 BLOCK places
              +---------------+---------------+
    ROWS of   |  one program  |  one program  |  ...     first launch, grid (blocks of rows, blocks): each program
    requests  +---------------+---------------+          leaves one word a row, its best, in scratch [B, blocks]

The second launch takes the maximum of those words and gathers the gamma tokens that follow. A word a block needs
neither an atomic nor a scratch that somebody has to clear, so the lookup is two launches and no fill.

Bytes: 8 L a row for the first comparison, in pairs; a second token is read only behind a place that has matched so
far, which is rare in text: 8 each. Then 8 for the row's length and 8 longest for its last tokens, a block, 16 a block
of scratch, and 16 gamma + 16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.launch import blocks, require_device, require_dtype, require_shape
from specdecode_kernels.variant import Variant
from specdecode_ref.batched.ngram import Found
from specdecode_ref.drafters.ngram import NGram

TILE = 1024
"""Places a program looks at, in one row or in several short ones."""

BLOCKS = 128
"""Words of scratch that the second launch reads at a time: one round up to 131,072 tokens."""


def find(tokens: Tensor, lengths: Tensor, gamma: int, longest: int, shortest: int) -> Found:
    """Look up the last `longest` to `shortest` tokens of each text; the longest match wins, and of equals the latest.

    tokens: int64 [B, T], padded. lengths: int64 [B], how many of them are text. Raises InputError for other shapes and
    for n-gram lengths out of order, NotApplicableError for other dtypes.
    """
    NGram(gamma, longest, shortest)
    require_shape("tokens", tokens, -1, -1)
    batch, width = tokens.shape
    require_shape("lengths", lengths, batch)
    require_dtype("tokens", tokens, torch.int64)
    require_dtype("lengths", lengths, torch.int64)
    require_device(_match, tokens, lengths)
    if tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    out = Found(
        torch.empty(batch, dtype=torch.int64, device=tokens.device),
        torch.empty(batch, gamma, dtype=torch.int64, device=tokens.device),
    )
    if not batch:
        return out
    block, rows = _tile(width)
    count = blocks(width, block)
    best = torch.empty(batch, count, dtype=torch.int64, device=tokens.device)
    stride = tokens.stride(0)
    unit = 1 if stride % 2 else 2
    if count:
        _match[(blocks(batch, rows), count)](
            tokens,
            lengths,
            best,
            batch,
            width,
            min(longest, width),  # no match is as long as the text, so that no number of rounds is wasted
            shortest,
            stride // unit,
            lengths.stride(0),
            ROWS=rows,
            BLOCK=block,
            UNIT=unit,
            num_warps=4,
        )
    _follow[(blocks(batch, rows),)](
        tokens,
        lengths,
        best,
        out.length,
        out.tokens,
        batch,
        width,
        gamma,
        count,
        stride,
        lengths.stride(0),
        ROWS=rows,
        BLOCKS=min(BLOCKS, triton.next_power_of_2(max(count, 1))),
        GAMMA=triton.next_power_of_2(gamma),
        num_warps=4,
    )
    return out


def bytes_moved(batch: int, text: int, width: int, gamma: int, longest: int, again: int = 0) -> int:
    """Bytes that `find` reads and writes in texts of `text` tokens, padded to `width`, whose n-grams are all found.

    again: how often a token was looked at for a second or later token of an n-gram, over all rows and places.
    """
    count = blocks(width, _tile(width)[0])
    row = 8 * (text // 2 * 2) + count * (8 + 8 * min(longest, text) + 16) + 16 + 16 * gamma
    return batch * row + 8 * again


def _tile(width: int) -> tuple[int, int]:
    """Places of one row, and rows, that a program looks at."""
    block = min(triton.next_power_of_2(max(width, 1)), TILE)
    return block, TILE // block


@triton.jit
def _text_of(lengths, row, batch, width, stride):
    """How many tokens of a row are text: none that there is not, whatever `lengths` says."""
    length = tl.load(lengths + row * stride, mask=row < batch, other=0)
    return tl.minimum(tl.maximum(length, 0), width)


@triton.jit
def _match(
    tokens,
    lengths,
    best,
    batch,
    width,
    longest,
    shortest,
    row_step,
    length_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Grid (blocks of rows, blocks of places): the best match of each row that ends in this block, 0 for none."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    length = _text_of(lengths, row, batch, width, length_stride)
    text = tokens + row * row_step * UNIT
    before = block * BLOCK + tl.arange(0, BLOCK)[None, :]  # the token before the place: aligned, as BLOCK is
    # The first comparison is the one that reads all of the text, so it reads in pairs, one token too many if need be.
    wanted = tl.load(text + length - 1, mask=length > 0, other=0)
    token = tl.load(text[:, None] + before, mask=before < (length // 2 * 2)[:, None], other=0)
    alive = (before < length[:, None] - 1) & (token == wanted[:, None])
    matched = alive.to(tl.int32)
    for back in range(1, longest):
        wanted = tl.load(text + length - 1 - back, mask=back < length, other=0)
        alive = alive & (before >= back)
        token = tl.load(text[:, None] + before - back, mask=alive, other=0)
        alive = alive & (token == wanted[:, None])
        matched += alive.to(tl.int32)
    word = (matched.to(tl.int64) << 32) + before + 1
    word = tl.max(tl.where(matched >= shortest, word, 0), 1)
    tl.store(best + row * tl.num_programs(1) + block, word, mask=row < batch)


@triton.jit
def _follow(
    tokens,
    lengths,
    best,
    found,
    followed,
    batch,
    width,
    gamma,
    blocks,
    row_stride,
    length_stride,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GAMMA: tl.constexpr,
):
    """Grid (blocks of rows): the best of all blocks, and what followed it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.zeros((ROWS,), tl.int64)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[None, :]
        here = (row < batch)[:, None] & (block < blocks)
        word = tl.maximum(word, tl.max(tl.load(best + row[:, None] * blocks + block, mask=here, other=0), 1))
    tl.store(found + row, word >> 32, mask=row < batch)

    length = _text_of(lengths, row, batch, width, length_stride)
    index = tl.arange(0, GAMMA)[None, :]
    place = (word & 0xFFFFFFFF)[:, None] + index
    inside = (row < batch)[:, None] & (index < gamma)
    after = inside & (word > 0)[:, None] & (place < length[:, None])
    token = tl.load(tokens + row[:, None] * row_stride + place, mask=after, other=-1)
    tl.store(followed + row[:, None] * gamma + index, token, mask=inside)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: one long text a program; where full, many short ones."""
    pointers = dict.fromkeys(("tokens", "lengths", "best", "found", "followed"), "*i64")
    numbers = ("batch", "longest", "shortest", "gamma", "blocks", "length_stride")
    types = pointers | dict.fromkeys(numbers, "i32") | dict.fromkeys(("width", "row_step", "row_stride"), "i32:16")
    for width in (32768, 256) if full else (32768,):
        block, rows = _tile(width)
        yield Variant(f"ngram match T={width}", _match, types, {"ROWS": rows, "BLOCK": block, "UNIT": 2}, registers=64)
        follow = {"ROWS": rows, "BLOCKS": blocks(width, block), "GAMMA": 8}
        yield Variant(f"ngram follow T={width}", _follow, types, follow, registers=64, wide=False)
