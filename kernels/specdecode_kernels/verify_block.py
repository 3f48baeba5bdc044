"""Block verification of chains, in three launches: `verify_stats`, `block_surplus`, `block_emit`.

Sun et al., arXiv 2403.10444; the reference is `specdecode_ref.verify.block`. A prefix of i drafted tokens has weight

    w_0 = 1,    w_i = min(1, w_{i-1} p(x_i) / q(x_i)),    s_i = sum_x max(w_i p(x) - q(x), 0)

and the longest prefix is accepted whose coin passes u (s_i + (1 - w_i)) < s_i, or u < w_gamma at the end: no division,
so that s_i = 0 never passes, and 1 - w_i first, so that at w_i = 1 any other s_i always does. All s_i may be needed,
hence one more pass over the rows of both sides:

                    block 0   block 1   block 2
    request 0  i=0 |---------|---------|-----|      block_surplus, grid (B (N - 1), blocks): the share of a block in s_i
               i=1 |---------|---------|-----|
               ..                                   block_emit, grid (B): adds up, decides, picks (`emission.py`)

Where a token is certain or a law greedy, s_i = w_i (1 - p(x)) needs no pass.

Bytes, for rows of V logits of b bytes and gamma drafted tokens: V b (gamma + 1), then 2 V b gamma for drawn drafts, and
V_d b gamma more with a draft that does not pass its lse. FLOPs: about 5 a logit in the first launch, 10 a pair later.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from specdecode_kernels import row_stats
from specdecode_kernels.cuts import steepness
from specdecode_kernels.emission import pair_mass, pick_from_row, pick_token
from specdecode_kernels.launch import warps_of
from specdecode_kernels.row_stats import WARPS, emit_warps
from specdecode_kernels.variant import Variant
from specdecode_kernels.verify_chain import (
    BONUS,
    FINE,
    NOT_A_LAW,
    NOT_DRAWN,
    RESIDUAL,
    TARGET,
    anywhere,
    chain_types,
    column_bytes,
    entry,
    walk,
    write_chain,
)
from specdecode_ref.batched import records

WITHOUT = tl.constexpr(records.WITHOUT)


def bytes_moved(batch: int, nodes: int, vocab: int, itemsize: int, *, drawn: bool, lse: bool) -> int:
    """Bytes of the three launches, for a draft with the target's vocabulary and dtype; scratch and columns once."""
    pairs = batch * (nodes - 1) if drawn else 0
    sides = batch * nodes + (0 if lse else pairs)
    block, _ = row_stats.tile(vocab)
    scratch = (12 * sides + 8 * pairs) * -(-vocab // block)
    picks = batch * (1 + drawn) * min(block, vocab) * itemsize  # at most: a path to the end picks from p
    passes = pairs * 2 * vocab * itemsize
    return row_stats.bytes_moved(sides, vocab, itemsize) + scratch + picks + passes + column_bytes(batch, nodes)


@triton.jit
def _weights_of_prefixes(p, q, gamma, NODES: tl.constexpr):
    """w_0 to w_gamma, float64 [NODES]: each exactly its predecessor where p = q, and 0 where p = 0."""
    i = tl.arange(0, NODES)
    w = tl.full([NODES], 1.0, tl.float64)
    weight = tl.full([], 1.0, tl.float64)
    for step in range(gamma):
        p_x, q_x = entry(p, step), entry(q, step)
        owed = weight * p_x
        # Divides by q only where q > owed >= 0.
        less = weight * (p_x / tl.where(owed >= q_x, 1.0, q_x))
        weight = tl.where(owed >= q_x, (owed > 0).to(tl.float64), less)
        w = tl.where(i == step + 1, weight, w)
    return w


@triton.jit
def _scaled(logits, stride, size, cut, law, i, share):
    """What `pair_mass` takes of one side: row i, its maximum, and what turns weights into probabilities."""
    floors, ties = cut
    top, total, _ = law
    row = (logits + i.to(tl.int64) * stride, size, (floors + i, ties + i))
    return row, entry(top, i), (share / entry(total, i)).to(tl.float32)


def surplus_warps(block: int, nodes: int) -> int:
    """Warps of a program of the second launch, as the compiler spills the least: more threads for long chains."""
    return WARPS if nodes <= 8 else warps_of(block)


@triton.jit
def block_surplus(
    logits,
    logits_b,
    logits_n,
    draft,
    draft_b,
    draft_n,
    lse,
    tokens,
    draws,
    temperatures,
    floors,
    ties,
    draft_floors,
    draft_ties,
    peaks,
    masses,
    firsts,
    surplus,
    rows,
    nodes,
    vocab,
    draft_vocab,
    blocks,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Grid (B (N - 1), blocks). surplus: float32 [B, N, blocks], written where row i tests a drawn token."""
    b, i = (tl.program_id(0) // (nodes - 1)).to(tl.int64), tl.program_id(0) % (nodes - 1)
    block = tl.program_id(1)
    first = b * nodes
    temperature = tl.load(temperatures + b)
    stats = (peaks, masses, firsts)
    cut_p, cut_q = (floors + first, ties + first), (draft_floors + first, draft_ties + first)
    side_p = (logits + b * logits_b, logits_n, vocab, cut_p)
    side_q = (draft + b * draft_b, draft_n, draft_vocab, cut_q)
    _, p, q, drawn, law_p, law_q, broken, unlawful, gamma = walk(
        b, (tokens, draws), side_p, side_q, temperature, stats, lse, rows, nodes, blocks,
        NODES, WIDTH, HAS_DRAFT, HAS_LSE, PLAIN,
    )  # fmt: skip
    lawful = ~(anywhere(broken & (tl.arange(0, NODES) < gamma)) | unlawful)
    if lawful & (temperature > 0) & (entry(drawn.to(tl.int32), i) > 0):
        w = entry(_weights_of_prefixes(p, q, gamma, NODES), i)
        scaled_p = _scaled(logits + b * logits_b, logits_n, vocab, cut_p, law_p, i, w)
        scaled_q = _scaled(draft + b * draft_b, draft_n, draft_vocab, cut_q, law_q, i, 1.0)
        data = (scaled_p, scaled_q, steepness(temperature))
        mass = pair_mass(block * BLOCK + tl.arange(0, BLOCK), data, PLAIN)
        tl.store(surplus + (first + i) * blocks + block, tl.sum(mass, 0))


@triton.jit
def block_emit(
    logits,
    logits_b,
    logits_n,
    draft,
    draft_b,
    draft_n,
    lse,
    tokens,
    draws,
    temperatures,
    floors,
    ties,
    draft_floors,
    draft_ties,
    peaks,
    masses,
    firsts,
    accept,
    emit,
    path,
    length,
    token,
    kind,
    p_eff,
    q_eff,
    status,
    surplus,
    rows,
    nodes,
    vocab,
    draft_vocab,
    blocks,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Grid (B)."""
    b = tl.program_id(0).to(tl.int64)
    first = b * nodes
    temperature = tl.load(temperatures + b)
    greedy = temperature == 0
    scale = steepness(temperature)
    stats = (peaks, masses, firsts)
    logits += b * logits_b
    draft += b * draft_b
    cut_p, cut_q = (floors + first, ties + first), (draft_floors + first, draft_ties + first)
    x, p, q, drawn, law_p, law_q, broken, unlawful, gamma = walk(
        b, (tokens, draws), (logits, logits_n, vocab, cut_p), (draft, draft_n, draft_vocab, cut_q), temperature,
        stats, lse, rows, nodes, blocks, NODES, WIDTH, HAS_DRAFT, HAS_LSE, PLAIN,
    )  # fmt: skip
    i = tl.arange(0, NODES)
    tested = i < gamma
    # The order of the reference: row by row, first whether p is a law, then whether q can have given x.
    undrawn = drawn & (tl.load(draws + first + i + 1, mask=tested, other=0) == WITHOUT) & ~(q > 0)
    no_law = tl.min(tl.where(broken & tested, i, NODES), 0)
    no_draw = tl.min(tl.where(undrawn & tested, i, NODES), 0)
    verdict = tl.where(unlawful | ((no_law < NODES) & (no_law <= no_draw)), NOT_A_LAW, FINE)
    verdict = tl.where((verdict == FINE) & (no_draw < NODES), NOT_DRAWN, verdict)

    w = _weights_of_prefixes(p, q, gamma, NODES)
    s = w * (1 - p)
    if HAS_DRAFT:
        block = tl.arange(0, WIDTH)[None, :]
        mask = (drawn & (verdict + 0 * i == FINE))[:, None] & (block < blocks)
        mask = mask & (temperature + 0.0 * i > 0)[:, None]
        share = tl.load(surplus + (first + i)[:, None] * blocks + block, mask=mask, other=0.0)
        s_drawn = tl.sum(share.to(tl.float64), 1)
        _, _, best_p = law_p
        _, _, best_q = law_q
        s_greedy = tl.where(best_p == best_q, 0.0, w)
        s = tl.where(drawn, tl.where(greedy, s_greedy, s_drawn), s)
    s = tl.where(tested, s, 0.0)
    u = tl.load(accept + first + i, mask=(i > 0) & (i <= gamma), other=0.0)
    passed = tl.where(i == gamma, u < w, u * (s + (1 - w)) < s) & (i > 0) & (i <= gamma)
    stop = tl.max(tl.where(passed, i, 0), 0)
    verdict = tl.where((verdict == FINE) & anywhere(broken & (i == gamma) & (i == stop)), NOT_A_LAW, verdict)
    bad = verdict != FINE
    rejected = stop < gamma
    came = tl.where(rejected, RESIDUAL, tl.where(stop > 0, BONUS, TARGET))
    write_chain((path, length, kind, status), b, stop, came, verdict, nodes, NODES)
    h = tl.where(i == gamma, w, tl.where(s > 0, s / tl.where(s > 0, s + (1 - w), 1.0), 0.0))
    seen = (i > 0) & (i <= gamma) & (i >= stop) & ~bad
    tl.store(p_eff + first + i, tl.where(seen, h, float("nan")), mask=i < nodes)
    tl.store(q_eff + first + i, tl.where(seen, 1.0, float("nan")).to(tl.float64), mask=i < nodes)

    row = first + stop
    coin = tl.load(emit + row)
    top_p, _, best_p = law_p
    paired = rejected & (entry(drawn.to(tl.int32), stop) > 0) & ~greedy & ~bad
    chosen = tl.where(bad, -1, entry(best_p, stop))
    alone = ~(bad | greedy)
    if HAS_DRAFT:  # noqa: SIM102, a constant: without a draft, what is inside is not compiled
        if paired:
            scaled_p = _scaled(logits, logits_n, vocab, cut_p, law_p, stop, entry(w, stop))
            scaled_q = _scaled(draft, draft_n, draft_vocab, cut_q, law_q, stop, 1.0)
            each = tl.arange(0, WIDTH)
            left = tl.load(surplus + row * blocks + each, mask=each < blocks, other=0.0)
            data = (scaled_p, scaled_q, scale)
            chosen = pick_token(left.to(tl.float64), coin, data, pair_mass, WIDTH, BLOCK, PLAIN)
            alone = chosen < 0  # rounding left no residual: from p
    if alone:
        gone = tl.where(rejected & ~paired, entry(x, stop), -1)
        row_p = (logits + stop.to(tl.int64) * logits_n, vocab, (floors + row, ties + row))
        chosen = pick_from_row(stats, row, row_p, entry(top_p, stop), scale, gone, coin, blocks, WIDTH, BLOCK, PLAIN)
    tl.store(token + b, chosen.to(tl.int64))


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: 4 tokens of a draft that knows its lse; where full, all kinds of drafts."""
    for name, types, constants in chain_types(full):
        if constants["HAS_DRAFT"]:
            warps = surplus_warps(constants["BLOCK"], constants["NODES"])
            yield Variant(f"block_surplus {name}", block_surplus, types, constants, warps=warps)
        warps = emit_warps(constants["BLOCK"], bool(constants["HAS_DRAFT"]))
        yield Variant(f"block_emit {name}", block_emit, types, constants, warps=warps)
