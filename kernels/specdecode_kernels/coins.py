"""The coins of a batch, drawn where they are used: Philox-4x32-10, bit for bit as `specdecode_ref.coins` draws it.

A coin is a function of its key and of nothing else (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011). Ten rounds turn a counter of four 32-bit words and a key of two into four random words:

    (c0, c1, c2, c3) <- (high(c2 B) ^ c1 ^ k0,  low(c2 B),  high(c0 A) ^ c3 ^ k1,  low(c0 A)),    k0 += Ka,  k1 += Kb

The counter is (node, base, sequence, stream), the key the seed's low and high word; the coin is the top 53 bits of the
first two words over 2^53, exact in float64. Streams are numbered as in the reference: DRAFT, ACCEPT, EMIT.

               COLUMNS coins
             +---------------+
    ROWS of  |  one program  |  next  |     out [B, count], each program draws one tile and
    requests +---------------+ - - - -+     reads base and sequence of its rows once
             |      next     |

Bytes: 8 B count written, 16 B ceil(count / COLUMNS) read. About 100 integer operations a coin, which is why it is
cheaper to draw a coin again than to fetch it from far away: other kernels may call `uniform`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.launch import blocks, require_device, require_dtype, require_shape
from specdecode_kernels.variant import Variant
from specdecode_ref.coins import ACCEPT, DRAFT, EMIT
from specdecode_ref.errors import InputError

TILE = 256
"""Coins a program draws."""

WORD = tl.constexpr(0xFFFFFFFF)
_EMIT = tl.constexpr(EMIT)


def draft(seed: int, sequences: Tensor, base: Tensor, count: int) -> Tensor:
    """The coins float64 [B, count] that draw the nodes of each sequence's tree. sequences, base: int64 [B].

    seed: 0 to 2^64 - 1. Sequences and base are read as 32-bit numbers. Raises InputError for a seed outside its range,
    a negative count or other shapes, NotApplicableError for other dtypes.
    """
    return _coins(DRAFT, seed, sequences, base, count)


def accept(seed: int, sequences: Tensor, base: Tensor, count: int) -> Tensor:
    """The coins float64 [B, count] that the nodes are tested with; see `draft`."""
    return _coins(ACCEPT, seed, sequences, base, count)


def emits(seed: int, sequences: Tensor, base: Tensor, count: int) -> Tensor:
    """The coins float64 [B, count] of the tokens at positions base, base + 1, ...; see `draft`."""
    return _coins(EMIT, seed, sequences, base, count)


def bytes_moved(batch: int, count: int) -> int:
    """Bytes that drawing the coins [batch, count] reads and writes."""
    return 8 * batch * count + 16 * batch * blocks(count, _columns(count))


def _coins(stream: int, seed: int, sequences: Tensor, base: Tensor, count: int) -> Tensor:
    if not 0 <= seed < 2**64:
        raise InputError("a seed from 0 to 2^64 - 1", seed, "choose one in that range")
    if count < 0:
        raise InputError("a count of 0 or more", count, "ask for as many coins as there are nodes")
    require_shape("base", base, -1)
    require_shape("sequences", sequences, len(base))
    require_dtype("base", base, torch.int64)
    require_dtype("sequences", sequences, torch.int64)
    require_device(_draw, base, sequences)
    out = torch.empty(len(base), count, dtype=torch.float64, device=base.device)
    if not out.numel():
        return out
    columns = _columns(count)
    rows = TILE // columns
    _draw[(blocks(len(base), rows), blocks(count, columns))](
        sequences,
        base,
        out,
        _signed(seed & 0xFFFFFFFF),
        _signed(seed >> 32),
        len(base),
        count,
        sequences.stride(0),
        base.stride(0),
        STREAM=stream,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


def _columns(count: int) -> int:
    return min(triton.next_power_of_2(max(count, 1)), TILE)


def _signed(word: int) -> int:
    """A 32-bit word as the int32 with its bits: Triton types an argument by its value, so it must always fit in one."""
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds on words that are kept in uint64, so that one product holds its high and its low word."""
    for _ in tl.static_range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & WORD, (low >> 32) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@triton.jit
def uniform(node, base, sequence, stream, seed_low, seed_high):
    """The coin in [0, 1), float64, of a key of integers of any type: tensors that broadcast, or scalars."""
    c0, c1, c2, c3 = _word(node), _word(base), _word(sequence), _word(stream)
    w0, w1, _, _ = philox(c0, c1, c2, c3, _word(seed_low), _word(seed_high))
    return ((w0 >> 5 << 26) | (w1 >> 6)).to(tl.float64) * (2.0**-53)


@triton.jit
def _word(value):
    return tl.to_tensor(value).to(tl.uint64) & WORD


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _draw(
    sequences,
    base,
    out,
    seed_low,
    seed_high,
    batch,
    count,
    sequence_stride,
    base_stride,
    STREAM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (blocks of rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = row < batch
    start = tl.load(base + row * base_stride, mask=real, other=0)[:, None]
    sequence = tl.load(sequences + row * sequence_stride, mask=real, other=0)[:, None]
    if STREAM == _EMIT:  # the key of an emission is its position: the node plays no part
        coins = uniform(column[None, :] * 0, start + column[None, :], sequence, STREAM, seed_low, seed_high)
    else:
        coins = uniform(column[None, :], start, sequence, STREAM, seed_low, seed_high)
    tl.store(out + row[:, None] * count + column[None, :], coins, mask=real[:, None] & (column < count)[None, :])


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: nodes of a wide batch, and where full, emissions and one request."""
    types = dict.fromkeys(("sequences", "base"), "*i64") | {"out": "*fp64"}
    types |= dict.fromkeys(("seed_low", "seed_high", "batch", "count", "sequence_stride", "base_stride"), "i32")
    shapes = [(ACCEPT, 8)] if not full else [(ACCEPT, 8), (EMIT, 8), (DRAFT, 64), (ACCEPT, 256)]
    for stream, columns in shapes:
        name = f"coins {('draft', 'accept', 'emits')[stream]} columns={columns}"
        constants = {"STREAM": stream, "ROWS": TILE // columns, "COLUMNS": columns}
        yield Variant(name, _draw, types, constants, registers=64, wide=False)
