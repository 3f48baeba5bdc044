"""One coin, one token, out of a large vocabulary: the inverse CDF in three levels.

The reference picks the first token whose cumulative mass exceeds u times the total, in float64. A flat float32 sum over
128,000 tokens cannot say where most of them begin: its error moves the law by up to 1.7e-3. So the coin goes down three
levels, and what is left of it after one is the coin of the next:

    block of BLOCK tokens   ->   row of ROW tokens   ->   token
    masses added in float64      in float64               in float64

Masses are float32, sums over up to 64 of them are float64, and there are no more than some hundred additions: the law
is moved by about 2e-6. These are the device functions; whoever has masses calls them.
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

    mass: float64 [SIZE], u: float64 in [0, 1). An index of mass 0 is never returned, whatever rounding does; where all
    mass is 0 the index is SIZE.
    """
    index = tl.arange(0, SIZE)
    above = tl.cumsum(mass, 0)
    target = u * tl.sum(mass, 0)
    candidate = (above > target) & (mass > 0)
    last = tl.max(tl.where(mass > 0, index, -1), 0)
    found = tl.min(tl.where(candidate, index, SIZE), 0)
    found = tl.where((found == SIZE) & (last >= 0), last, found)
    here = tl.sum(tl.where(index == found, mass, 0.0), 0)
    before = tl.sum(tl.where(index < found, mass, 0.0), 0)
    rest = (target - before) / tl.where(here > 0, here, 1.0)
    return found, tl.minimum(tl.maximum(rest, 0.0), NEARLY_ONE)


@triton.jit
def pick_in_block(mass, u, BLOCK: tl.constexpr):
    """The index in a block whose mass the coin falls on. mass: float32 [BLOCK], a multiple of ROW, in token order."""
    ROWS: tl.constexpr = BLOCK // ROW
    rows = tl.reshape(mass, (ROWS, ROW))
    row, rest = first_above(tl.sum(rows.to(tl.float64), 1), u, ROWS)
    chosen = tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == row, rows, 0.0), 0)
    column, _ = first_above(chosen.to(tl.float64), rest, ROW)
    return row * ROW + column
