"""What verification needs to know of a row of logits, from one read of it: `verify_stats`, the first launch.

The law of a row is p(x) = exp((x - top) / T) / total, with its maximum `top` and total = sum exp((x - top) / T). A row
is split into blocks; each program leaves for its block

    peak = max x,    mass = sum exp((x - peak) / T),    first = the first index with x = peak,

and whoever needs the law puts the blocks together: top = max peak, total = sum mass exp((peak - top) / T). The masses
stay of use afterwards: they say which block a coin falls on, so an emission from p reads one block more and not a row.

                 block 0   block 1   block 2
    target row  |---------|---------|-----|            grid (rows, blocks): the target's B N rows first,
    draft row   |---------|---------|---|              then the draft's, whose V_d need not be V

Skipped: rows of places without a node, draft rows that nothing was drawn from and, where the draft passed `lse`, all of
its rows that are not greedy. NaN or +inf anywhere in a block makes its peak NaN.

Bytes: V b a target row and V_d b a draft row (b bytes a logit), 12 a block written. FLOPs: about 5 a logit.

Precision: exponents are float32, of differences from a maximum, so a probability has a relative error of about
(|x - top| / T + 4) 2^-23: it is largest where the least mass is. Sums over blocks are float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from specdecode_kernels import launch
from specdecode_kernels.cuts import is_kept, steepness, weights
from specdecode_kernels.variant import Variant
from specdecode_ref.batched.records import DETERMINISTIC as _DETERMINISTIC
from specdecode_ref.errors import NotApplicableError

BLOCKS = ((1024, 256, 16), (65536, 2048, 1), (524288, 4096, 1))
"""(vocabulary, tokens a block, rows a program): the first entry whose vocabulary is large enough. There are 128 blocks
at most."""

WARPS = 8
"""Warps of a program that reads blocks."""


COLDEST = tl.constexpr(1e-30)
"""Colder than this, 1 / T is no float32."""

DETERMINISTIC = tl.constexpr(_DETERMINISTIC)

NOWHERE = tl.constexpr(2**31 - 1)
"""An index behind every vocabulary."""


def tile(vocab: int) -> tuple[int, int]:
    """Tokens and rows of a program. Raises NotApplicableError for a vocabulary that would need more than 128 blocks."""
    for most, block, rows in BLOCKS:
        if vocab <= most:
            return block, rows
    raise NotApplicableError(f"a vocabulary of at most {BLOCKS[-1][0]} tokens", vocab, "use the PyTorch reference")


def emit_warps(block: int, has_draft: bool) -> int:
    """Warps of a program that picks, as the compiler spills the least; where no q is read, half of them have room."""
    return launch.warps_of(block if has_draft else block // 2)


def bytes_moved(rows: int, vocab: int, itemsize: int) -> int:
    """Bytes of the first launch for `rows` rows of one side that are not skipped: logits read, statistics written."""
    return rows * (vocab * itemsize + 12 * launch.blocks(vocab, tile(vocab)[0]))


@triton.jit
def read_kept(logits, index, size, cut, PLAIN: tl.constexpr):
    """float32 logits of one row, -inf where the rule drops a token or the row has none. cut: (floor, ties) pointers."""
    x = tl.load(logits + index, mask=(index >= 0) & (index < size), other=float("-inf")).to(tl.float32)
    if not PLAIN:
        floor, ties = cut
        x = tl.where(is_kept(x, index, tl.load(floor), tl.load(ties)), x, float("-inf"))
    return x


@triton.jit
def chance(x, index, law, greedy, scale):
    """The probability, float64, of tokens with logits x. law: (top, total, best), scalars or of x's shape."""
    top, total, best = law
    return tl.where(greedy, (index == best).to(tl.float64), weights(x, top, scale).to(tl.float64) / total)


@triton.jit
def row_laws(stats, row, real, scale, blocks, WIDTH: tl.constexpr):
    """The laws (top, total, best) of rows, and which rows have none. row, real: [R]; WIDTH: blocks, padded."""
    peaks, masses, firsts = stats
    block = tl.arange(0, WIDTH)[None, :]
    at = row[:, None] * blocks + block
    mask = real[:, None] & (block < blocks)
    peak = tl.load(peaks + at, mask=mask, other=float("-inf"))
    mass = tl.load(masses + at, mask=mask, other=0.0)
    first = tl.load(firsts + at, mask=mask, other=NOWHERE)
    strange = tl.max((peak != peak).to(tl.int32), 1) > 0
    peak = tl.where(strange[:, None], float("-inf"), peak)
    top = tl.max(peak, 1)
    broken = top == float("-inf")
    top = tl.where(broken, 0.0, top)
    total = tl.sum(tl.where(mask, mass, 0.0).to(tl.float64) * weights(peak, top[:, None], scale), 1)
    best = tl.min(tl.where(peak == top[:, None], first, NOWHERE), 1)
    return top, tl.where(broken, 1.0, total), best, broken


@triton.jit
def draft_laws(stats, lse, row, rows, real, temperature, blocks, WIDTH: tl.constexpr, HAS_LSE: tl.constexpr):
    """As `row_laws`, for the draft, whose statistics stand behind `rows` of the target.

    With an lse, exp(x / T - lse) = exp((x - top) / T) / total for any `top`: it is lse T rounded to float32, so that
    x - top is exact where most of the mass is, and total = exp(lse - top / T).
    """
    scale = steepness(temperature)
    if HAS_LSE:
        greedy = temperature + 0.0 * row == 0
        top, total, best, broken = row_laws(stats, rows + row, real & greedy, scale, blocks, WIDTH)
        known = tl.load(lse + row, mask=real, other=0.0)
        unknown = (known != known) | (tl.abs(known) == float("inf"))
        known = tl.where(unknown, 0.0, known).to(tl.float64)
        warmth = tl.maximum(temperature, COLDEST)
        near = (known * warmth).to(tl.float32)
        rest = known - near.to(tl.float64) / warmth
        top = tl.where(greedy, top, near)
        total = tl.where(greedy, total, 1.0 + rest + rest * rest / 2)
        broken = tl.where(greedy, broken, unknown)
    else:
        top, total, best, broken = row_laws(stats, rows + row, real, scale, blocks, WIDTH)
    return top, total, best, broken


@triton.jit
def _block_stats(stats, at, logits, needed, block, size, cut, scale, BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    """Of one block of several rows; at, logits, needed, scale: [R]."""
    peaks, masses, firsts = stats
    index = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = needed[:, None] & (index < size)
    x = tl.load(logits[:, None] + index, mask=mask, other=float("-inf")).to(tl.float32)
    strange = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 1) > 0
    if not PLAIN:
        floors, ties = cut
        floor = tl.load(floors, mask=needed, other=float("-inf"))[:, None]
        x = tl.where(is_kept(x, index, floor, tl.load(ties, mask=needed, other=0)[:, None]), x, float("-inf"))
    x = tl.where(strange[:, None], float("-inf"), x)
    peak = tl.max(x, 1)
    anchor = tl.where(peak > float("-inf"), peak, 0.0)
    tl.store(peaks + at, tl.where(strange, float("nan"), peak), mask=needed)
    tl.store(masses + at, tl.sum(weights(x, anchor[:, None], scale[:, None]), 1), mask=needed)
    tl.store(firsts + at, tl.min(tl.where(x == peak[:, None], index, NOWHERE), 1), mask=needed)


@triton.jit
def _was_drawn_from(b, i, tokens, parents, draws, nodes, NODES: tl.constexpr, CHAIN: tl.constexpr):
    """Where node i of request b has a child that was drawn from the draft's law. b, i: [R]."""
    node = tl.arange(0, NODES)[None, :]
    at = b[:, None] * nodes + node
    mask = (node > i[:, None]) & (node < nodes)
    child = (tl.load(tokens + at, mask=mask, other=-1) >= 0) & mask
    if CHAIN:
        child = child & (node == i[:, None] + 1)
    else:
        child = child & (tl.load(parents + at, mask=mask, other=-1) == i[:, None])
    drawn = child & (tl.load(draws + at, mask=mask, other=DETERMINISTIC) != DETERMINISTIC)
    return tl.max(drawn.to(tl.int32), 1) > 0


@triton.jit
def verify_stats(
    logits,
    logits_b,
    logits_n,
    draft,
    draft_b,
    draft_n,
    tokens,
    parents,
    draws,
    temperatures,
    floors,
    ties,
    draft_floors,
    draft_ties,
    peaks,
    masses,
    firsts,
    arrivals,
    rows,
    nodes,
    vocab,
    draft_vocab,
    blocks,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Grid (groups of ROWS rows, the target's, then the draft's, if any; blocks). arrivals: [B], set to 0 for later."""
    group, block = tl.program_id(0), tl.program_id(1)
    stats = (peaks, masses, firsts)
    groups = tl.cdiv(rows, ROWS)
    of_draft = group >= groups
    row = tl.where(of_draft, group - groups, group) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    b, i = (row // nodes).to(tl.int64), row % nodes
    temperature = tl.load(temperatures + b, mask=real, other=1.0)
    scale = steepness(temperature)
    if of_draft:
        needed = real & _was_drawn_from(b, i, tokens, parents, draws, nodes, NODES, CHAIN)
        if HAS_LSE:
            needed = needed & (temperature == 0)
        if tl.max(needed.to(tl.int32), 0) > 0:
            start = draft + b * draft_b + i.to(tl.int64) * draft_n
            at = (rows + row) * blocks + block
            cut = (draft_floors + row, draft_ties + row)
            _block_stats(stats, at, start, needed, block, draft_vocab, cut, scale, BLOCK, PLAIN)
    else:
        tl.store(arrivals + b, tl.zeros_like(row), mask=real & (i == 0) & (block + row * 0 == 0))
        needed = real & ((i == 0) | (tl.load(tokens + row, mask=real, other=-1) >= 0))
        start = logits + b * logits_b + i.to(tl.int64) * logits_n
        at = row * blocks + block
        _block_stats(stats, at, start, needed, block, vocab, (floors + row, ties + row), scale, BLOCK, PLAIN)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: a chain of 4 drafted tokens, and where full, trees, all rules, all dtypes."""
    types = dict.fromkeys(("tokens", "parents", "draws", "ties", "draft_ties"), "*i64")
    types |= dict.fromkeys(("floors", "draft_floors", "peaks", "masses"), "*fp32")
    types |= dict.fromkeys(("rows", "nodes", "blocks"), "i32") | dict.fromkeys(("vocab", "draft_vocab"), "i32:16")
    types |= dict.fromkeys(("logits_b", "logits_n", "draft_b", "draft_n"), "i64:16")
    types |= {"temperatures": "*fp64", "firsts": "*i32", "arrivals": "*i32"}
    shapes = [("bf16", 4096, 8, True, False, True)]
    if full:
        dtypes, flags = ("bf16", "fp16", "fp32"), (False, True)
        shapes += [(dtype, 4096, 64, False, lse, plain) for dtype in dtypes for lse in flags for plain in flags]
        shapes += [(dtype, 2048, 8, True, False, True) for dtype in dtypes]
    for dtype, block, nodes, chain, lse, plain in shapes:
        constants = {"NODES": nodes, "ROWS": 1, "BLOCK": block, "CHAIN": chain, "HAS_LSE": lse, "PLAIN": plain}
        name = f"verify_stats {dtype} N={nodes} BLOCK={block} {'chain' if chain else 'tree'}"
        name += " lse" * lse + " rules" * (not plain)
        pointers = {"logits": f"*{dtype}", "draft": f"*{dtype}"}
        yield Variant(name, verify_stats, types | pointers, constants, warps=WARPS, registers=96)
