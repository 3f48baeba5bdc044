"""What top-k, top-p and min-p leave of a row, as one threshold: logits above a floor, and some equal to it.

Each of the three rules keeps the largest logits of a row, so all of them together do; only top-p ever parts tokens of
equal logits, and it keeps the first in token order. Hence two numbers a row say everything, and whoever reads logits
afterwards applies the rules with two comparisons (`kept_scores`), without a sort and without a copy of the row.

    top-k:  the largest floor with   sum over {x >= floor} of 1                    >= k
    top-p:  the largest floor with   sum over {x >= floor} of e^((x - max) / T)    >= top_p * (that sum over all so far)
    min-p:  floor = max + T ln(min_p)

Top-k is top-p at infinite temperature, so one search does both. It bisects on the bits of a float, mapped to integers
of the same order: 16 of them for bfloat16, 19 for float16, 32 for float32. One program a row; a tile of BLOCK lanes
walks over it, and a lane keeps the largest logit it has seen:

    row      | BLOCK | BLOCK | BLOCK | .. |      pass 1: the largest logit of each lane
                 \\       |       /                         |
    lanes        maximum of each column    ->    bisect in registers: a floor that is low enough
                                                           |
    row      | BLOCK | BLOCK | BLOCK | .. |      bisect from there up to the maximum, one pass a round

Few floats lie between the two, about 2^8 in bfloat16, hence about 8 rounds. Masses are float32, added over at most
V / BLOCK blocks in float32 and over lanes in float64: right to about 3e-6 of themselves, so the kept set can differ
from the float64 one only where the mass above a token is as close as that to top_p.

Bytes: one read of the row from memory, V * b, and about 10 from the L2 cache, where even 512 kB of a float32 row stay.
FLOPs: about 5 V a round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.launch import FLOATS, require_device, require_dtype, require_shape, warps_of
from specdecode_kernels.variant import Variant
from specdecode_ref.batched.records import Rules
from specdecode_ref.errors import InputError

BLOCK = 4096
"""Lanes of a program."""

LOG2_E = tl.constexpr(1.4426950408889634)

FLATTEST, STEEPEST = tl.constexpr(1e-30), tl.constexpr(1e30)
"""Bounds of 1 / temperature: beyond them every law is uniform, or a point mass, and no product may be inf * 0."""

SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""How many low bits of a float32 are equal in all numbers of a dtype."""


class Cuts(NamedTuple):
    """What the rules leave of each row.

    floor: float32 [R]. Logits below it are cut; -inf keeps all.
    ties:  int64 [R]. Tokens whose logit equals the floor are kept below this index only; V keeps all.
    """

    floor: Tensor
    ties: Tensor


def cuts(logits: Tensor, rules: Rules) -> Cuts:
    """The thresholds of rows of logits [R, V], each under its own rule. Rows without a law and greedy rows keep all.

    Raises InputError for shapes that do not fit, NotApplicableError for a dtype or device that kernels do not take.
    """
    logits = require_rows(logits, rules)
    rows, size = logits.shape
    if rules.plain:
        floor = torch.full((rows,), -torch.inf, dtype=torch.float32, device=logits.device)
        return Cuts(floor, torch.full((rows,), size, dtype=torch.int64, device=logits.device))
    require_device(_cuts, logits, rules.temperature)
    floor = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ties = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _cuts[(rows,)](
            logits,
            logits.stride(0),
            rules.temperature.contiguous(),
            rules.top_k.contiguous(),
            rules.top_p.contiguous(),
            rules.min_p.contiguous(),
            floor,
            ties,
            size,
            SHIFT=SHIFTS[logits.dtype],
            MIN_P_FIRST=rules.order == "vllm",
            BLOCK=block_of(size),
            num_warps=warps_of(block_of(size)),
        )
    return Cuts(floor, ties)


def bytes_moved(rows: int, vocabulary: int, itemsize: int) -> int:
    """Bytes read from and written to global memory: the logits once (later rounds hit the L2 cache), rules, cuts."""
    return rows * (vocabulary * itemsize + 4 * 8 + 4 + 8)


def require_rows(logits: Tensor, rules: Rules) -> Tensor:
    """Logits [R, V] whose rows are contiguous. Raises where they are not rows of floats with a rule each."""
    require_dtype("logits", logits, *FLOATS)
    require_shape("logits", logits, -1, -1)
    require_shape("rules", rules.temperature, len(logits))
    return contiguous_rows(logits)


def contiguous_rows(logits: Tensor) -> Tensor:
    """Logits [R, V] as they are, or a copy where the last dimension has gaps. Raises InputError where V is 0."""
    if logits.shape[-1] == 0:
        raise InputError("logits of at least one token", list(logits.shape), "pass the whole vocabulary")
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def block_of(size: int) -> int:
    """Lanes for a row of `size` tokens: BLOCK, or fewer where the row is narrower; a multiple of 64."""
    return max(64, min(BLOCK, triton.next_power_of_2(size)))


@triton.jit
def steepness(temperature):
    """The float32 factor of logits in exponents of 2, log2(e) / T, for a float64 temperature; at 0 it is that of 1."""
    positive = tl.where(temperature > 0, temperature, 1.0)
    return tl.minimum(tl.maximum(1 / tl.maximum(positive, 1e-300) * LOG2_E, FLATTEST), STEEPEST).to(tl.float32)


@triton.jit
def is_kept(x, index, floor, ties):
    """Where a logit is above the cut. False at NaN; at -inf of no meaning, as -inf has no mass either way."""
    return (x > floor) | ((x == floor) & (index < ties))


@triton.jit
def kept_scores(x, index, temperature, floor, ties):
    """float32 scores: x / temperature where the rules keep a token, -inf elsewhere.

    x: float32 raw logits, index: their tokens. temperature: float32, above 0 (1 for greedy rows). floor, ties: of the
    row, as in `Cuts`. A NaN comes out as -inf: look for it in x.
    """
    return tl.where(is_kept(x, index, floor, ties), x / temperature, float("-inf"))


@triton.jit
def read(logits, index, size):
    """float32 logits of one row, -inf behind its end; NaN as +inf, so that a maximum cannot miss it."""
    x = tl.load(logits + index, mask=index < size, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def weights(x, anchor, scale):
    """float32 2^((x - anchor) scale), and 0 at -inf whatever the anchor is."""
    finite = x > float("-inf")
    return tl.where(finite, tl.exp2((tl.where(finite, x, anchor) - anchor) * scale), 0.0)


@triton.jit
def _key(x):
    """float32 to int32 of the same order; -0 comes right before +0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key, SHIFT: tl.constexpr):
    """The float32 of a key that was shifted right; the lost bits are all 0 in positive numbers, all 1 in negative."""
    lost = tl.where(key < 0, (1 << SHIFT) - 1, 0)
    wide = ((key << SHIFT) | lost).to(tl.int32)
    return (wide ^ ((wide >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(floor, logits, size, anchor, scale, BLOCK: tl.constexpr):
    """The weight, float64, of the logits of a row that are at least `floor`. One pass; the row holds no NaN or +inf."""
    lanes = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < size, other=float("-inf")).to(tl.float32)
        lanes += tl.where(x >= floor, tl.exp2((x - anchor) * scale), 0.0)
    return tl.sum(lanes.to(tl.float64), 0)


@triton.jit
def _search(goal, lowest, highest, lanes, logits, size, anchor, scale, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest floor, from `lowest` to `highest`, above which a row still weighs `goal`; else `lowest`.

    First among the largest logits of the lanes, a part of the row: where they weigh enough, the row does.
    """
    keys, weight = _key(lanes) >> SHIFT, tl.exp2((lanes - anchor) * scale)
    low = (_key(lowest) >> SHIFT).to(tl.int64)
    end = (_key(highest) >> SHIFT).to(tl.int64) + 1
    high = end
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum(tl.where(keys >= middle, weight, 0.0).to(tl.float64), 0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    high = end
    while high - low > 1:
        middle = (low + high) >> 1
        enough = _above(_logit(middle, SHIFT), logits, size, anchor, scale, BLOCK) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _logit(low, SHIFT)


@triton.jit
def _after(count, value, logits, size, BLOCK: tl.constexpr):
    """The index behind the `count`-th logit of a row that equals `value`; `size` where there are no more than that."""
    before = tl.full([], 0, tl.int32)
    found = before + size
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        equal = (read(logits, index, size) == value).to(tl.int32)
        here = tl.sum(equal, 0)
        if (before < count) & (before + here >= count):
            at = (equal > 0) & (before + tl.cumsum(equal, 0) == count)
            found = tl.sum(tl.where(at, index, 0), 0) + 1
        before += here
    return found


@triton.jit
def _next_float(x):
    """The least float32 above x."""
    key = _key(x) + 1
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _min_p_floor(min_p, temperature, top):
    """The least float32 that is at least max + T ln(min_p)."""
    floor = float("-inf")
    if min_p > 0:
        exact = top.to(tl.float64) + temperature * tl.log(min_p)
        near = tl.maximum(exact, -3.4028234663852886e38).to(tl.float32)
        floor = tl.where(near.to(tl.float64) < exact, _next_float(near), near)
    return floor


@triton.jit
def _cuts(
    logits,
    row_stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    floors,
    ties,
    size,
    SHIFT: tl.constexpr,
    MIN_P_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R): the rules of a row, one after the other; each only raises the floor."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature = tl.load(temperatures + row)
    k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    by_k = (k > 0) & (k < size)
    floor = float("-inf")
    last = size
    if (temperature > 0) & (by_k | (top_p < 1) | (min_p > 0)):
        lanes = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            lanes = tl.maximum(lanes, read(logits, start + tl.arange(0, BLOCK), size))
        top = tl.max(lanes, 0)
        top = tl.where(top == 0, 0.0, top)  # +0: from a floor of -0 the next float is +0, which is equal to it
        if (top > float("-inf")) & (top < float("inf")):
            least = _min_p_floor(min_p, temperature, top)
            if by_k:
                floor = _search(k.to(tl.float64), floor, top, lanes, logits, size, top, FLATTEST, SHIFT, BLOCK)
            if top_p < 1:
                scale = steepness(temperature)
                if MIN_P_FIRST:
                    floor = tl.maximum(floor, least)
                goal = top_p * _above(floor, logits, size, top, scale, BLOCK)
                floor = _search(goal, floor, top, lanes, logits, size, top, scale, SHIFT, BLOCK)
                each = weights(floor, top, scale).to(tl.float64)
                short = goal - _above(_next_float(floor), logits, size, top, scale, BLOCK)
                if (short > 0) & (each > 0):
                    count = tl.minimum(tl.ceil(short / each), size).to(tl.int32)
                    last = _after(count, floor, logits, size, BLOCK)
            last = tl.where(least > floor, size, last)
            floor = tl.maximum(floor, least)
    tl.store(floors + row, floor)
    tl.store(ties + row, last)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: one a dtype, and both orders for the first."""
    types = {"row_stride": "i64:16", "floors": "*fp32", "ties": "*i64", "size": "i32:16", "top_ks": "*i64"}
    types |= dict.fromkeys(("temperatures", "top_ps", "min_ps"), "*fp64")
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    for dtype, name in names.items() if full else [(torch.bfloat16, "bf16")]:
        for first in (False, True) if full else (False,):
            constants = {"SHIFT": SHIFTS[dtype], "MIN_P_FIRST": first, "BLOCK": BLOCK}
            label = f"cuts {name}{' min-p first' if first else ''}"
            yield Variant(label, _cuts, types | {"logits": f"*{name}"}, constants, warps=warps_of(BLOCK))
