"""One coin, one token, out of a large vocabulary: the inverse CDF in three levels.

The reference picks the first token whose cumulative mass exceeds u times the total, in float64. A flat float32 sum over
128,000 tokens cannot say where most of them begin: its error moves the law by up to 1.7e-3. So the coin goes down three
levels, and what is left of it after one is the coin of the next:

    block of BLOCK tokens   ->   row of ROW tokens   ->   token
    masses added in float64      in float64               in float64

Masses are float32, sums over up to 64 of them are float64, and there are no more than some hundred additions: the law
is moved by about 2e-6. These are the device functions; whoever has masses calls them, for one request, with a scalar u,
or for a tile of requests, which stand in the first dimension of everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW = tl.constexpr(64)
"""Tokens of a row, the second level."""

NEARLY_ONE = tl.constexpr(1 - 2.0**-53)
"""The largest coin."""


@triton.jit
def first_above(mass, u, SIZE: tl.constexpr):
    """The first index whose cumulative mass exceeds u times the total, and what is left of the coin inside it.

    mass: float64 [SIZE], u: float64 in [0, 1); or [REQUESTS, SIZE] and [REQUESTS]. An index of mass 0 is never
    returned, whatever rounding does; where all mass is 0 the index is SIZE.
    """
    LAST: tl.constexpr = len(mass.shape) - 1
    index = tl.arange(0, SIZE)
    above = tl.cumsum(mass, LAST)
    target = u * tl.sum(mass, LAST)
    candidate = (above > _beside(target)) & (mass > 0)
    last = tl.max(tl.where(mass > 0, index, -1), LAST)
    found = tl.min(tl.where(candidate, index, SIZE), LAST)
    found = tl.where((found == SIZE) & (last >= 0), last, found)
    here = tl.sum(tl.where(index == _beside(found), mass, 0.0), LAST)
    before = tl.sum(tl.where(index < _beside(found), mass, 0.0), LAST)
    rest = (target - before) / tl.where(here > 0, here, 1.0)
    return found, tl.minimum(tl.maximum(rest, 0.0), NEARLY_ONE)


@triton.jit
def pick_in_block(mass, u, BLOCK: tl.constexpr):
    """The index in a block whose mass the coin falls on.

    mass: float32 [BLOCK], a multiple of ROW, in token order, u as above; or [REQUESTS, BLOCK] and [REQUESTS].
    """
    ROWS: tl.constexpr = BLOCK // ROW
    LAST: tl.constexpr = len(mass.shape) - 1
    rows = tl.reshape(mass, (ROWS, ROW) if LAST == 0 else (mass.shape[0], ROWS, ROW))
    row, rest = first_above(tl.sum(rows.to(tl.float64), LAST + 1), u, ROWS)
    here = tl.arange(0, ROWS)[:, None] == _beside(_beside(row))
    chosen = tl.sum(tl.where(here, rows, 0.0), LAST)
    column, _ = first_above(chosen.to(tl.float64), rest, ROW)
    return row * ROW + column


@triton.jit
def _beside(value):
    """A value of each request with one more dimension behind it, to stand beside masses; a scalar is fit as it is."""
    if len(value.shape) > 0:
        value = tl.expand_dims(value, len(value.shape))
    return value
