"""From logits to laws and picks, without a law in memory: two launches over blocks of the vocabulary.

The law of a row is p(x) = 2^((l(x) - m) s) / Z, with s = log2(e) / T, m the largest logit and Z the sum. Softmax splits
over blocks (Milakov and Gimelshein, arXiv 1805.02867): block j has its own m_j and Z_j, and weighs Z_j 2^((m_j - m) s).

    `_stats`   grid (R, blocks)   | BLOCK | BLOCK | BLOCK | .. |   the row, read once
                                      |       |       |
    scratch                        m_j, Z_j, where m_j is first    12 bytes a block
                                      \\       |       /
    `_pick`    grid (R)            the block that the coin falls on, in float64
                                              |
                                           | BLOCK |               read again: row of 64, then token
    `_law`     grid (R, blocks)    every block again, times 1 / Z

A pick goes down three levels, as `picking` explains: block, row of 64, token, with what is left of the coin handed on.
Greedy rows take the first of the maxima. Top-k, top-p and min-p are two comparisons a logit, with a threshold that
`cuts` finds beforehand; the first launch is then the only one more to read the row.

A program takes a tile of REQUESTS rows. It is 1 where the vocabulary is wide; narrow ones, of tests and of byte-level
models, share a program.

Bytes: pick V * b + BLOCK * b, law V * (2 b + 4) a row, and a scratch of V / BLOCK entries. FLOPs: about
5 V. All of it is bound by memory.

Exactness: a mass is right to about 2^-23 (1 + its distance from the maximum, in powers of 2), a block's sum to 2^-22,
and from there on all is float64. That moves the law by less than 2e-6 in total variation, so kernel and reference pick
alike unless the coin is within 5e-6 (`BAND`) of the edge of a token in the float64 cdf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.cuts import (
    BLOCK,
    Cuts,
    block_of,
    cuts,
    is_kept,
    kept_scores,
    require_rows,
    steepness,
    weights,
)
from specdecode_kernels.launch import blocks, interpreted, require_device, require_dtype, require_shape, warps_of
from specdecode_kernels.picking import first_above, pick_in_block
from specdecode_kernels.softmax import combined, finite
from specdecode_kernels.top_k import top_k
from specdecode_kernels.variant import Variant, int32
from specdecode_ref.batched.records import Rules

__all__ = ["Cuts", "cuts", "kept_scores", "law", "pick", "top_k"]

BAND = 5e-6
"""How near a coin must be to an edge of the float64 cdf for kernel and reference to differ."""

TILE, TILE_INTERPRETED = 4096, 2**20
"""Elements of a program: the interpreter pays for programs and operations, not for elements."""


class Stats(NamedTuple):
    """What is known of each block of each row, [R, blocks].

    top:   float32, the largest logit the rules keep; -inf where they keep none; +inf where the block holds NaN.
    mass:  float32, the sum of 2^((logit - top) log2(e) / T).
    first: int32, the first token that has the top.
    """

    top: Tensor
    mass: Tensor
    first: Tensor


def law(logits: Tensor, rules: Rules) -> Tensor:
    """The laws float32 [R, V] of rows of logits [R, V], each under its own rule; a row without a law is NaN.

    Raises InputError for shapes that do not fit, NotApplicableError for a dtype or device that kernels do not take.
    """
    logits = require_rows(logits, rules)
    require_device(_law, logits, rules.temperature)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        cut, stats = _prepare(logits, rules)
        arguments, grid, shape = _launch(logits, rules, cut)
        _law[grid](*arguments, *stats, out, **shape)
    return out


def pick(logits: Tensor, rules: Rules, coins: Tensor) -> Tensor:
    """The token int64 [R] that each row's coin draws from its law; -1 where the row has none. coins: float64 [R].

    Raises InputError for shapes that do not fit, NotApplicableError for a dtype or device that kernels do not take.
    """
    logits = require_rows(logits, rules)
    require_shape("coins", coins, len(logits))
    require_dtype("coins", coins, torch.float64)
    require_device(_pick, logits, rules.temperature, coins)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        cut, stats = _prepare(logits, rules)
        arguments, grid, shape = _launch(logits, rules, cut)
        _pick[grid[:1]](*arguments, *stats, coins.contiguous(), out, **shape)
    return out


def bytes_moved(function: str, rows: int, vocabulary: int, itemsize: int, plain: bool = True) -> int:
    """Bytes read from and written to global memory by "law" or "pick", without those of `cuts.bytes_moved`.

    Exact where one program takes one row and no row is greedy, but that the last block of a vocabulary may be short.
    """
    block = block_of(vocabulary)
    count = blocks(vocabulary, block)
    read = vocabulary * itemsize
    rule, scratch = 8 if plain else 8 + 4 + 8, count * (4 + 4 + 4)
    stats = read + count * rule + scratch
    if function == "pick":
        return rows * (stats + scratch + rule + min(block, vocabulary) * itemsize + 8 + 8)
    return rows * (stats + count * (scratch + rule) + read + 4 * vocabulary)


def _prepare(logits: Tensor, rules: Rules) -> tuple[Cuts | None, Stats]:
    """The first launches: where rows are cut, and what their blocks hold."""
    cut = None if rules.plain else cuts(logits, rules)
    arguments, grid, shape = _launch(logits, rules, cut)
    dtypes = (torch.float32, torch.float32, torch.int32)
    stats = Stats(*(torch.empty(len(logits), grid[1], dtype=dtype, device=logits.device) for dtype in dtypes))
    _stats[grid](*arguments, *stats, **{name: value for name, value in shape.items() if name != "BLOCKS"})
    return cut, stats


def _launch(logits: Tensor, rules: Rules, cut: Cuts | None) -> tuple[tuple, tuple[int, int], dict[str, int]]:
    """What the launches over a tile of rows share: their first arguments, the largest grid, their constants."""
    rows, size = logits.shape
    block = block_of(size)
    count = blocks(size, block)
    requests = requests_of(rows, max(block, count), interpreted(_stats))
    floors, ties = cut or (logits, logits)  # unread where nothing is cut
    arguments = (logits, logits.stride(0), rows, size, count, rules.temperature.contiguous(), floors, ties)
    constants = {"CUT": cut is not None, "REQUESTS": requests, "BLOCK": block}
    constants |= {"BLOCKS": triton.next_power_of_2(count), "num_warps": warps_of(block * requests)}
    return arguments, (blocks(rows, requests), count), constants


def requests_of(rows: int, width: int, interpreted: bool) -> int:
    """How many rows of `width` elements one program takes."""
    tile = TILE_INTERPRETED if interpreted else TILE
    return max(1, min(triton.next_power_of_2(rows), tile // triton.next_power_of_2(width)))


@triton.jit
def _read(logits, row_stride, rows, live, index, size, floors, ties, CUT: tl.constexpr):
    """float32 logits [REQUESTS, BLOCK] of the live rows, -inf where there is none or it is cut; NaN as +inf."""
    at = logits + rows.to(tl.int64)[:, None] * row_stride + index
    x = tl.load(at, mask=live[:, None] & (index < size), other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    if CUT:
        floor = tl.load(floors + rows, mask=live, other=float("-inf"))[:, None]
        last = tl.load(ties + rows, mask=live, other=0).to(tl.int32)[:, None]
        x = tl.where(is_kept(x, index, floor, last), x, float("-inf"))
    return x


@triton.jit
def _stats(
    logits,
    row_stride,
    count,
    size,
    block_count,
    temperatures,
    floors,
    ties,
    tops,
    masses,
    firsts,
    CUT: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks): `Stats`."""
    rows = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    live = rows < count
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _read(logits, row_stride, rows, live, index, size, floors, ties, CUT)
    top, first = tl.max(x, 1, return_indices=True)
    scale = steepness(tl.load(temperatures + rows, mask=live, other=1.0))
    mass = tl.sum(weights(x, tl.where(finite(top), top, 0.0)[:, None], scale[:, None]), 1)
    at = rows.to(tl.int64) * block_count + block
    tl.store(tops + at, top, mask=live)
    tl.store(masses + at, mass, mask=live)
    tl.store(firsts + at, block * BLOCK + first, mask=live)


@triton.jit
def _load_stats(tops, masses, firsts, rows, live, block_count, size, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)[None, :]
    at = rows.to(tl.int64)[:, None] * block_count + block
    here = live[:, None] & (block < block_count)
    top = tl.load(tops + at, mask=here, other=float("-inf"))
    mass = tl.load(masses + at, mask=here, other=0.0)
    return top, mass, tl.load(firsts + at, mask=here, other=size)


@triton.jit
def _pick(
    logits,
    row_stride,
    count,
    size,
    block_count,
    temperatures,
    floors,
    ties,
    tops,
    masses,
    firsts,
    coins,
    tokens,
    CUT: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (rows): block, row of 64, token."""
    rows = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    live = rows < count
    temperature = tl.load(temperatures + rows, mask=live, other=1.0)
    scale = steepness(temperature)
    block_tops, block_masses, first = _load_stats(tops, masses, firsts, rows, live, block_count, size, BLOCKS)
    top, fine, weight = combined(block_tops, block_masses, scale)
    greedy = tl.min(tl.where(block_tops == top[:, None], first, size), 1)

    drawn = fine & (temperature > 0)
    block, rest = first_above(weight, tl.load(coins + rows, mask=live, other=0.0), BLOCKS)
    block = tl.where(drawn, block, 0)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _read(logits, row_stride, rows, drawn, index, size, floors, ties, CUT)
    anchor = tl.max(x, 1)
    mass = weights(x, tl.where(finite(anchor), anchor, 0.0)[:, None], scale[:, None])
    token = block * BLOCK + pick_in_block(mass, rest, BLOCK)
    token = tl.where(fine, tl.where(drawn, token, greedy), -1)
    tl.store(tokens + rows, token.to(tl.int64), mask=live)


@triton.jit
def _law(
    logits,
    row_stride,
    count,
    size,
    block_count,
    temperatures,
    floors,
    ties,
    tops,
    masses,
    firsts,
    laws,
    CUT: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (rows, blocks): each block's masses over the row's total."""
    rows = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    live = rows < count
    temperature = tl.load(temperatures + rows, mask=live, other=1.0)
    scale = steepness(temperature)
    block_tops, block_masses, first = _load_stats(tops, masses, firsts, rows, live, block_count, size, BLOCKS)
    top, fine, weight = combined(block_tops, block_masses, scale)
    greedy = tl.min(tl.where(block_tops == top[:, None], first, size), 1)
    total = tl.sum(weight, 1)
    share = (1 / tl.where(fine, total, 1.0)).to(tl.float32)

    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _read(logits, row_stride, rows, live & fine, index, size, floors, ties, CUT)
    p = weights(x, tl.where(fine, top, 0.0)[:, None], scale[:, None]) * share[:, None]
    p = tl.where((temperature > 0)[:, None], p, (index == greedy[:, None]).to(tl.float32))
    p = tl.where(fine[:, None], p, float("nan"))
    at = rows.to(tl.int64)[:, None] * size + index
    tl.store(laws + at, p, mask=live[:, None] & (index < size))


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: one vocabulary under all rules; in full, every dtype and width, plain too."""
    for name in ("bf16", "fp16", "fp32") if full else ("bf16",):
        for size in (32000, 49152, 128256, 151936) if full else (128256,):
            yield from _variants(name, size, full)


def _variants(name: str, size: int, full: bool) -> Iterator[Variant]:
    label, count = f"V={size} {name}", triton.next_power_of_2(blocks(size, BLOCK))
    for cut in (False, True) if full else (True,):
        shape = {"CUT": cut, "REQUESTS": 1, "BLOCK": BLOCK}
        tail = f"{label}{' cut' if cut else ''}"
        yield _variant(f"stats {tail}", _stats, name, size, shape)
        yield _variant(f"pick {tail}", _pick, name, size, shape | {"BLOCKS": count})
        yield _variant(f"law {tail}", _law, name, size, shape | {"BLOCKS": count})


def _variant(label: str, kernel: Any, dtype: str, size: int, constants: dict[str, int]) -> Variant:
    types = {"logits": f"*{dtype}", "row_stride": "i64:16", "temperatures": "*fp64", "coins": "*fp64"}
    types |= dict.fromkeys(("floors", "tops", "masses", "laws"), "*fp32")
    types |= dict.fromkeys(("ties", "tokens"), "*i64") | {"firsts": "*i32"}
    types |= {"size": int32(size), "block_count": int32(blocks(size, BLOCK)), "count": "i32"}
    taken = {argument: types[argument] for argument in kernel.arg_names if argument in types}
    return Variant(label, kernel, taken, constants, warps=warps_of(BLOCK))
