"""The likeliest k tokens and their log probabilities, with one read of the vocabulary: `top_k`, a part of `sampling`.

    `_candidates`   grid (R, blocks)   | BLOCK | BLOCK | BLOCK |     the row, read once
                                           |       |       |
    scratch                             its k best, m_j and Z_j      8 K + 8 bytes a block
                                           \\       |       /
    `_best`         grid (R)            the k best of all of them, less the log-sum-exp

Bytes: V * b a row, and the scratch of V / BLOCK blocks, written and read. FLOPs: about 5 V, and k comparisons a logit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.cuts import BLOCK, LOG2_E, block_of, contiguous_rows, weights
from specdecode_kernels.launch import FLOATS, blocks, require_device, require_dtype, require_shape
from specdecode_kernels.softmax import combined, finite
from specdecode_kernels.variant import Variant, int32
from specdecode_ref.batched.sampling import Best
from specdecode_ref.errors import InputError, NotApplicableError

MOST = 64
"""The largest k of `top_k`."""

INDEX_BITS = tl.constexpr(2**31 - 1)
NOTHING = tl.constexpr(-(2**63))


def top_k(logits: Tensor, k: int) -> Best:
    """The k likeliest tokens of each row [R, V] at temperature 1, and their log probabilities in float32.

    One read of the vocabulary: each block hands on its k best and its share of the log-sum-exp. A row that holds NaN
    or +inf, or nothing finite, has NaN and -1 throughout; where k is above V, V are returned.

    Raises InputError for a k below 1, NotApplicableError for one above 64, another dtype or device.
    """
    require_dtype("logits", logits, *FLOATS)
    require_shape("logits", logits, -1, -1)
    logits = contiguous_rows(logits)
    require_device(_candidates, logits)
    if k < 1:
        raise InputError("a k of 1 or more", k, "ask for at least one token")
    if k > MOST:
        raise NotApplicableError(f"a k of at most {MOST}", k, "use the PyTorch reference")
    (rows, size), device = logits.shape, logits.device
    k = min(k, size)
    best = Best(
        torch.empty(rows, k, dtype=torch.float32, device=device),
        torch.empty(rows, k, dtype=torch.int64, device=device),
    )
    block, width = block_of(size), triton.next_power_of_2(k)
    count = blocks(size, block)
    top, mass = (torch.empty(rows, count, dtype=torch.float32, device=device) for _ in range(2))
    found = torch.empty(rows, count, width, dtype=torch.int64, device=device)
    if rows:
        _candidates[(rows, count)](
            logits, logits.stride(0), size, count, k, top, mass, found, K=width, BLOCK=block, num_warps=8
        )
        most = triton.next_power_of_2(count)
        _best[(rows,)](top, mass, found, count, k, *best, K=width, BLOCKS=most, num_warps=8)
    return best


def bytes_moved(rows: int, vocabulary: int, itemsize: int, k: int) -> int:
    """Bytes read from and written to global memory."""
    scratch = blocks(vocabulary, block_of(vocabulary)) * (4 + 4 + 8 * triton.next_power_of_2(k))
    return rows * (vocabulary * itemsize + 2 * scratch + k * (4 + 8))


@triton.jit
def _largest(packed, k, K: tl.constexpr):
    """The k largest of distinct int64, descending; what is not there is NOTHING."""
    place = tl.arange(0, K)
    found = tl.full([K], NOTHING, tl.int64)
    for i in range(k):
        best = tl.max(packed, 0)
        found = tl.where(place == i, best, found)
        packed = tl.where(packed == best, NOTHING, packed)
    return found


@triton.jit
def _candidates(
    logits,
    row_stride,
    size,
    block_count,
    k,
    tops,
    masses,
    found,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R, blocks): the k best of a block, as logit and token in one int64, and its share of the log-sum-exp.

    The logit's bits, mapped to an integer of the same order, stand above the token's complement: so the first of equals
    is the largest.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + index, mask=index < size, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), tl.where(x == 0, 0.0, x))  # one zero only: -0 and 0 are equal logits
    top = tl.max(x, 0)
    mass = tl.sum(weights(x, tl.where(finite(top), top, 0.0), LOG2_E), 0)
    bits = x.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = tl.where(index < size, (key << 32) | (INDEX_BITS - index), NOTHING)
    at = row * block_count + block
    tl.store(tops + at, top)
    tl.store(masses + at, mass)
    tl.store(found + at * K + tl.arange(0, K), _largest(packed, k, K))


@triton.jit
def _best(
    tops,
    masses,
    found,
    block_count,
    k,
    logs,
    tokens,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (R): the k best of all blocks' best, and their logits less the log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)[None, :]
    here = block < block_count
    block_tops = tl.load(tops + row * block_count + block, mask=here, other=float("-inf"))
    block_masses = tl.load(masses + row * block_count + block, mask=here, other=0.0)
    top, fine, weight = combined(block_tops, block_masses, tl.full([1], LOG2_E, tl.float32))
    top, fine, total = tl.max(top, 0), tl.max(fine.to(tl.int32), 0) > 0, tl.sum(tl.sum(weight, 1), 0)

    slot = tl.arange(0, BLOCKS * K)
    packed = tl.load(found + row * block_count * K + slot, mask=slot < block_count * K, other=NOTHING)
    best = _largest(packed, k, K)
    key = (best >> 32).to(tl.int32)
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    there = tl.arange(0, K) < k
    known = there & fine
    lse = tl.where(fine, top, 0.0).to(tl.float64) + tl.log(tl.where(fine, total, 1.0))
    log = (tl.where(known, x, 0.0).to(tl.float64) - lse).to(tl.float32)
    token = INDEX_BITS - (best & 0xFFFFFFFF)
    at = row * k + tl.arange(0, K)
    tl.store(logs + at, tl.where(known, log, float("nan")), mask=there)
    tl.store(tokens + at, tl.where(known, token, -1), mask=there)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: eight of one vocabulary; in full, every dtype and width, one and all."""
    for name in ("bf16", "fp16", "fp32") if full else ("bf16",):
        for size in (32000, 49152, 128256, 151936) if full else (128256,):
            for k in (1, 8, 64) if full else (8,):
                yield from _variants(name, size, k)


def _variants(name: str, size: int, k: int) -> Iterator[Variant]:
    label, count = f"k={k} V={size} {name}", blocks(size, BLOCK)
    types = {"found": "*i64", "block_count": int32(count), "k": "i32"} | dict.fromkeys(("tops", "masses"), "*fp32")
    reads = types | {"logits": f"*{name}", "row_stride": "i64:16", "size": int32(size)}
    yield Variant(f"candidates {label}", _candidates, reads, {"K": k, "BLOCK": BLOCK}, warps=8)
    merges = types | {"logs": "*fp32", "tokens": "*i64"}
    constants = {"K": k, "BLOCKS": triton.next_power_of_2(count)}
    yield Variant(f"best {label}", _best, merges, constants, warps=8, wide=False)
