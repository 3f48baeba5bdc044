"""The last token of a round, from what the first launch left: which block the coin falls on, then that block alone.

A law to emit from is given as the masses of its blocks and a function that reads the masses of one block's tokens:

    row_mass      p, but for one token         after a whole path, or the rejection of a certain draft
    pair_mass     max(w p - q, 0)              after the rejection of a drawn one; w = 1 but in block verification

    masses of blocks   |  0.2  | 0.5 |  0.3  |       u picks a block; what is left of u picks a row in it, then a token
                               /     \
    masses of tokens          | . . . . |            the only logits that are read: BLOCK b bytes, or two times that

None of them has to be normalised. A block that rounding gave a mass and none of its tokens is passed over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdecode_kernels.cuts import weights
from specdecode_kernels.picking import first_above, pick_in_block
from specdecode_kernels.row_stats import read_kept


@triton.jit
def pick_token(masses, u, data, MASS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    """The token the coin falls on, int32; -1 where there is no mass. masses: float64 [WIDTH]; MASS: see above."""
    found = tl.full([], -1, tl.int32)
    block, rest = first_above(masses, u, WIDTH)
    while block < WIDTH:
        start = block * BLOCK
        column = pick_in_block(MASS(start + tl.arange(0, BLOCK), data, PLAIN), rest, BLOCK)
        if column < BLOCK:
            found = (start + column).to(tl.int32)
            block = tl.full([], WIDTH, tl.int32)
        else:
            masses = tl.where(tl.arange(0, WIDTH) == block, 0.0, masses)
            block, rest = first_above(masses, u, WIDTH)
    return found


@triton.jit
def row_mass(index, data, PLAIN: tl.constexpr):
    """p of the tokens `index`, not normalised, but 0 for the token `gone`."""
    logits, size, cut, top, scale, gone = data
    p = weights(read_kept(logits, index, size, cut, PLAIN), top, scale)
    return tl.where(index == gone, 0.0, p)


@triton.jit
def pair_mass(index, data, PLAIN: tl.constexpr):
    """max(w p - q, 0) of the tokens `index`. share: what turns weights into w p, and into q."""
    scaled_p, scaled_q, scale = data
    side, top, share = scaled_p
    logits, size, cut = side
    p = weights(read_kept(logits, index, size, cut, PLAIN), top, scale) * share
    side, top, share = scaled_q
    logits, size, cut = side
    q = weights(read_kept(logits, index, size, cut, PLAIN), top, scale) * share
    return tl.maximum(p - q, 0.0)


@triton.jit
def block_masses(stats, row, top, scale, blocks, WIDTH: tl.constexpr):
    """The masses of a row's blocks, float64 [WIDTH], in units of exp(top / T)."""
    peaks, masses, _ = stats
    block = tl.arange(0, WIDTH)
    peak = tl.load(peaks + row * blocks + block, mask=block < blocks, other=float("-inf"))
    mass = tl.load(masses + row * blocks + block, mask=block < blocks, other=0.0)
    return mass.to(tl.float64) * weights(peak, top, scale)


@triton.jit
def pick_from_row(
    stats,
    row,
    side,
    top,
    scale,
    gone,
    u,
    blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """The token of a coin under p without the token `gone` (-1: nothing is gone); `gone` where all p's mass is there.

    side: (logits, size, cut) of the row.
    """
    logits, size, cut = side
    masses = block_masses(stats, row, top, scale, blocks, WIDTH)
    block = gone // BLOCK
    peak = tl.load(stats[0] + row * blocks + block, mask=(gone >= 0) & (block < blocks), other=float("-inf"))
    # In the units of the block's own sum, so that a token that is alone in its block leaves exactly 0.
    anchor = tl.where(peak > float("-inf"), peak, 0.0)
    lost = weights(read_kept(logits, gone, size, cut, PLAIN), anchor, scale).to(tl.float64) * weights(peak, top, scale)
    masses = tl.where(tl.arange(0, WIDTH) == block, tl.maximum(masses - lost, 0.0), masses)
    token = pick_token(masses, u, (logits, size, cut, top, scale, gone), row_mass, WIDTH, BLOCK, PLAIN)
    return tl.where(token < 0, gone, token).to(tl.int32)
