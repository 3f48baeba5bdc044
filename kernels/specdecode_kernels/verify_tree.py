"""Recursive rejection sampling in trees, in two launches: `verify_stats`, then `tree_emit`, one program a request.

SpecInfer, arXiv 2305.09781; Sequoia, arXiv 2402.12374; the reference is `specdecode_ref.verify.tree`. After the j-th
rejected sibling the target's law is the residual, which is never stored. Element by element it is, from r_0 = p on,

    r_j(x) = max(r_{j-1}(x) - q_j(x), 0) / s_j,    q_j = q                            with replacement
                                                         q without its elders / l_j   without
                                                         a point mass                 deterministic

so a list with one note a rejected sibling, (token, draw, 1 / s_j, how to turn logits into q_j), says all about it, and
whoever needs r of a token or of a block computes it again from logits. A rejected token has r = 0 ever after, as it was
rejected because r < q_j there.

    q_j(x) = exp((y_x - top_j) / T) share_j,    top_j = the largest of the logits y that are left,    share_j = 1 / sum

Without replacement, the maximum and the sum are taken anew after each rejection, in the pass that s_j needs anyway. One
minus the mass of the elders would be the same in exact arithmetic only: a draft that is sure of its first child, with
1 - 1e-6, leaves less to the others than the rounding of that mass; and beyond 1 - 1e-45 their float32 weights are 0.

    root --x--> child 1    rejected: note s_1                    pass over the rows for s_1, if drawn
         --x--> child 2    rejected: note s_2                    pass, r_1 computed again on the way
         -----> child 3    accepted: forget the list, go there
                  --x--> child 4 ...

    masses of blocks:  of p from the first launch  ->  of r_j, from the pass of a drawn sibling  ->  a coin picks one
                       less a token, for a deterministic sibling: no pass at all

Bytes, for rows of V logits of b bytes: V b a node, V_d b a node that children were drawn from (unless it passes its
lse), and V b + V_d b a rejected, drawn sibling. FLOPs: about 5 a logit, and 5 more a sibling in a pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from specdecode_kernels import row_stats
from specdecode_kernels.cuts import steepness, weights
from specdecode_kernels.emission import block_masses, pick_token
from specdecode_kernels.launch import warps_of
from specdecode_kernels.row_stats import DETERMINISTIC, WARPS, chance, draft_laws, read_kept, row_laws
from specdecode_kernels.variant import Variant
from specdecode_kernels.verify_block import WITHOUT
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
)


def bytes_moved(
    batch: int, nodes: int, vocab: int, itemsize: int, *, inner: int, lse: bool, rejected: int, residuals: int
) -> int:
    """Bytes of both launches, for a draft with the target's vocabulary and dtype; scratch and columns once.

    inner: nodes of the batch that children were drawn from. rejected: siblings that were drawn and rejected.
    residuals: requests whose last token comes after one of those.
    """
    sides = batch * nodes + (0 if lse else inner)
    block, _ = row_stats.tile(vocab)
    scratch = (12 * sides + 8 * rejected) * -(-vocab // block) + 72 * rejected
    picks = (batch + residuals) * min(block, vocab) * itemsize
    passes = rejected * 2 * vocab * itemsize
    return row_stats.bytes_moved(sides, vocab, itemsize) + scratch + picks + passes + column_bytes(batch, nodes)


def tree_warps(block: int, has_draft: bool) -> int:
    """Warps of a program, as the compiler spills the least: fewer threads with more registers where q is read too."""
    return WARPS if has_draft else warps_of(block)


@triton.jit
def leftover(p, score, index, tried, notes, anchor, scale):
    """r of the tokens `index` after `tried` rejections, and the draft's logits without what went without replacement.

    p: their probabilities, float32 or float64. score: the draft's logits, float32. anchor: the largest of those that
    are left; the others count as that large, which no one sees, as their r is 0. notes: pointers to the list.
    """
    tokens, draws, growths, tops, shares = notes
    weight = weights(tl.minimum(score, anchor), anchor, scale).to(p.dtype)
    for j in range(tried):
        x, draw, growth = tl.load(tokens + j), tl.load(draws + j), tl.load(growths + j)
        share = tl.load(shares + j) * tl.exp2((anchor - tl.load(tops + j)) * scale)
        less = tl.maximum(p - weight * share.to(p.dtype), 0.0)
        p = tl.where(growth > 0, tl.where(index == x, 0.0, less) * growth.to(p.dtype), p)
        score = tl.where((draw == WITHOUT) & (index == x), float("-inf"), score)
    return p, score


@triton.jit
def _sides(index, scaled_p, scaled_q, scale, HAS_DRAFT: tl.constexpr, PLAIN: tl.constexpr):
    """p of tokens, and the draft's logits, both float32."""
    side, top, share = scaled_p
    logits, size, cut = side
    p = weights(read_kept(logits, index, size, cut, PLAIN), top, scale) * share
    if HAS_DRAFT:
        side, _ = scaled_q
        logits, size, cut = side
        score = read_kept(logits, index, size, cut, PLAIN)
    else:
        score = tl.full(p.shape, float("-inf"), tl.float32)
    return p, score


@triton.jit
def drawn_mass(index, data, PLAIN: tl.constexpr):
    """r of the tokens `index` where the draft has logits."""
    scaled_p, scaled_q, scale, tried, notes = data
    p, score = _sides(index, scaled_p, scaled_q, scale, True, PLAIN)
    _, anchor = scaled_q
    r, _ = leftover(p, score, index, tried, notes, anchor, scale)
    return r


@triton.jit
def certain_mass(index, data, PLAIN: tl.constexpr):
    """r of the tokens `index` where all siblings are deterministic."""
    scaled_p, scaled_q, scale, tried, notes = data
    p, score = _sides(index, scaled_p, scaled_q, scale, False, PLAIN)
    _, anchor = scaled_q
    r, _ = leftover(p, score, index, tried, notes, anchor, scale)
    return r


@triton.jit
def _kept(node, token, parent, tokens, parents):
    """Where there is a node whose ancestors are all there. tokens, parents: pointers to the request's."""
    kept = (node > 0) & (token >= 0) & (parent >= 0) & (parent < node)
    above = tl.where(kept, parent, 0)
    while anywhere(above > 0):
        is_token = tl.load(tokens + above, mask=above > 0, other=0) >= 0
        higher = tl.load(parents + above, mask=above > 0, other=0)
        kept = kept & ((above == 0) | (is_token & (higher >= 0) & (higher < above)))
        above = tl.where(kept & (above > 0), higher, 0)
    return kept


@triton.jit
def _unlawful(stats, lse, row, rows, drawn, temperature, blocks, HAS_LSE: tl.constexpr):
    """True where one of the draft's rows `row` is no law, out of those that `drawn` marks."""
    peaks, _, _ = stats
    finite = ~drawn
    strange = drawn & ~drawn
    read = drawn
    if HAS_LSE:
        greedy = temperature + 0.0 * row == 0
        known = tl.load(lse + row, mask=drawn & ~greedy, other=0.0)
        strange = (known != known) | (tl.abs(known) == float("inf"))
        finite = finite | ~greedy
        read = drawn & greedy
    for block in range(blocks):
        peak = tl.load(peaks + (rows + row) * blocks + block, mask=read, other=0.0)
        strange = strange | (peak != peak)
        finite = finite | (peak > float("-inf"))
    return anywhere(strange | ~finite)


@triton.jit
def tree_emit(
    logits,
    logits_b,
    logits_n,
    draft,
    draft_b,
    draft_n,
    lse,
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
    noted_tokens,
    noted_draws,
    growths,
    tops,
    shares,
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
    """Grid (B). Scratch: surplus float32 [B, blocks]; the list int64, int64, float64, float32, float64, each [B, N]."""
    b = tl.program_id(0).to(tl.int64)
    first = b * nodes
    temperature = tl.load(temperatures + b)
    greedy = temperature == 0
    scale = steepness(temperature)
    stats = (peaks, masses, firsts)
    notes = (noted_tokens + first, noted_draws + first, growths + first, tops + first, shares + first)
    logits += b * logits_b
    draft += b * draft_b

    node = tl.arange(0, NODES)
    real = node < nodes
    x_all = tl.load(tokens + first + node, mask=real, other=-1)
    parent = tl.load(parents + first + node, mask=real, other=-1)
    draw_all = tl.load(draws + first + node, mask=real, other=DETERMINISTIC)
    kept = _kept(node, x_all, parent, tokens + first, parents + first)
    drawn_all = kept & (draw_all != DETERMINISTIC)
    if HAS_DRAFT:
        unlawful = _unlawful(stats, lse, first + parent, rows, drawn_all, temperature, blocks, HAS_LSE)
    else:
        unlawful = anywhere(drawn_all)

    verdict = tl.where(unlawful, NOT_A_LAW, FINE)
    going = ~unlawful
    arrived = going
    here = tl.zeros([], tl.int64)
    last = tl.zeros([], tl.int64)
    depth = tl.zeros([], tl.int32)
    tried = tl.zeros([], tl.int32)
    top_p, total_p, best_p = tl.zeros([], tl.float32), tl.full([], 1.0, tl.float64), tl.zeros([], tl.int32)
    top_q, total_q, best_q = tl.zeros([], tl.float32), tl.full([], 1.0, tl.float64), tl.zeros([], tl.int32)
    # Of the draft's logits, less those of siblings without replacement: the largest, and the sum in units of it.
    anchor, remains = tl.zeros([], tl.float32), tl.full([], 1.0, tl.float64)
    size_q = tl.zeros([], tl.int32)  # 0 where no child was drawn: its q is not read
    left = tl.zeros([WIDTH], tl.float64)  # r's masses of the blocks; they sum to 1
    taken = tl.where(node == 0, 0, -1).to(tl.int64)
    p_seen = tl.full([NODES], float("nan"), tl.float64)
    q_seen = tl.full([NODES], float("nan"), tl.float64)
    one = tl.arange(0, 1)
    while going:
        row = first + here
        row_p = (logits + here * logits_n, vocab, (floors + row, ties + row))
        if arrived:
            arrived = going & False
            top, total, best, broken = row_laws(stats, row + one, one == 0, scale, blocks, WIDTH)
            top_p, total_p, best_p = tl.sum(top, 0), tl.sum(total, 0), tl.sum(best, 0)
            verdict = tl.where(anywhere(broken), NOT_A_LAW, verdict)
            left = block_masses(stats, row, top_p, scale, blocks, WIDTH) / total_p
            tried = tried * 0
            if HAS_DRAFT:
                drawn_here = anywhere(drawn_all & (parent == here))
                size_q = tl.where(drawn_here, draft_vocab, 0)
                if drawn_here:
                    top, total, best, _ = draft_laws(
                        stats, lse, row + one, rows, one == 0, temperature, blocks, WIDTH, HAS_LSE
                    )
                    top_q, total_q, best_q = tl.sum(top, 0), tl.sum(total, 0), tl.sum(best, 0)
                    anchor, remains = top_q, total_q
        row_q = (draft + here * draft_n, size_q, (draft_floors + row, draft_ties + row))
        child = tl.min(tl.where(kept & (parent == here) & (node > last), node, nodes), 0).to(tl.int64)
        going = (verdict == FINE) & (child < nodes)
        if going:
            last = child
            x, draw = tl.load(tokens + first + child), tl.load(draws + first + child)
            u = tl.load(accept + first + child)
            p_x = chance(read_kept(row_p[0], x, vocab, row_p[2], PLAIN), x, (top_p, total_p, best_p), greedy, scale)
            q_x = p_x * 0
            score_x = tl.full([], float("-inf"), tl.float32)
            if HAS_DRAFT:
                score_x = read_kept(row_q[0], x, size_q, row_q[2], PLAIN)
                q_x = chance(score_x, x, (top_q, total_q, best_q), greedy, scale)
            r_x, score_x = leftover(p_x, score_x, x, tried, notes, anchor, scale)
            fresh = weights(score_x, anchor, scale).to(tl.float64) / remains
            fresh = tl.where(greedy, tl.where(score_x > float("-inf"), q_x, 0.0), fresh)
            q_now = tl.where(draw == DETERMINISTIC, 1.0, tl.where(draw == WITHOUT, fresh, q_x))
            if (draw == WITHOUT) & ~(fresh > 0):
                verdict = tl.where(going, NOT_DRAWN, verdict)
                going = going & False
            p_seen = tl.where(node == child, r_x, p_seen)
            q_seen = tl.where(node == child, q_now, q_seen)
            if u * q_now < r_x:
                here = child
                arrived = going
                depth += 1
                taken = tl.where(node == depth, child, taken)
            else:
                # The note comes first, its growth still 1, so that the pass reads it like the others.
                share = tl.where(draw == WITHOUT, 1 / remains, 1 / total_q)
                tl.debug_barrier()
                tl.store(noted_tokens + first + tried, x)
                tl.store(noted_draws + first + tried, draw)
                tl.store(growths + first + tried, tl.full([], 1.0, tl.float64))
                tl.store(tops + first + tried, tl.where(draw == WITHOUT, anchor, top_q))
                tl.store(shares + first + tried, tl.where(draw == DETERMINISTIC, 0.0, share))
                tl.debug_barrier()
                after = left
                if (draw == DETERMINISTIC) & ~greedy:
                    after = tl.where(tl.arange(0, WIDTH) == x // BLOCK, tl.maximum(left - r_x, 0.0), left)
                if HAS_DRAFT:  # noqa: SIM102, as it is a constant
                    if (draw != DETERMINISTIC) & ~greedy & going:
                        scaled_p = (row_p, top_p, (1 / total_p).to(tl.float32))
                        peak, mass = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float64)
                        for block in range(blocks):
                            index = block * BLOCK + tl.arange(0, BLOCK)
                            p, score = _sides(index, scaled_p, (row_q, anchor), scale, True, PLAIN)
                            r, score = leftover(p, score, index, tried + 1, notes, anchor, scale)
                            tl.store(surplus + b * blocks + block, tl.sum(r, 0))
                            if draw == WITHOUT:
                                higher = tl.maximum(peak, tl.max(score, 0))
                                ground = tl.where(higher > float("-inf"), higher, 0.0)
                                here_mass = tl.sum(weights(score, ground, scale), 0).to(tl.float64)
                                mass = mass * weights(peak, ground, scale) + here_mass
                                peak = higher
                        if draw == WITHOUT:
                            anchor = tl.where(mass > 0, peak, anchor)
                            remains = tl.where(mass > 0, mass, 1.0)
                        tl.debug_barrier()
                        block = tl.arange(0, WIDTH)
                        after = tl.load(surplus + b * blocks + block, mask=block < blocks, other=0.0).to(tl.float64)
                growth = tl.zeros([], tl.float64)
                s = tl.sum(after, 0)
                if (s > 0) & ~greedy:  # else rounding left nothing: the law stays as it was
                    growth = 1 / s
                    left = after * growth
                tl.debug_barrier()
                tl.store(growths + first + tried, growth)
                tl.debug_barrier()
                tried += 1

    bad = verdict != FINE
    came = tl.where(tried > 0, RESIDUAL, tl.where(depth > 0, BONUS, TARGET))
    taken = tl.where(bad & (node > 0), -1, taken)
    tl.store(path + first + node, taken, mask=real)
    tl.store(length + b, tl.where(bad, 1, depth + 1).to(tl.int64))
    tl.store(kind + b, tl.where(bad, TARGET, came).to(tl.int64))
    tl.store(status + b, verdict.to(tl.int64))
    tl.store(p_eff + first + node, tl.where(bad, float("nan"), p_seen), mask=real)
    tl.store(q_eff + first + node, tl.where(bad, float("nan"), q_seen), mask=real)

    row = first + here
    coin = tl.load(emit + first + depth)
    scaled_p = ((logits + here * logits_n, vocab, (floors + row, ties + row)), top_p, (1 / total_p).to(tl.float32))
    row_q = (draft + here * draft_n, size_q, (draft_floors + row, draft_ties + row))
    scaled_q = (row_q, anchor)
    chosen = tl.where(bad, -1, best_p)
    looking = ~(bad | greedy)
    while looking:
        data = (scaled_p, scaled_q, scale, tried, notes)
        if HAS_DRAFT:
            chosen = pick_token(left, coin, data, drawn_mass, WIDTH, BLOCK, PLAIN)
        else:
            chosen = pick_token(left, coin, data, certain_mass, WIDTH, BLOCK, PLAIN)
        looking = chosen < 0  # all that was left was rounding: from p
        left = block_masses(stats, row, top_p, scale, blocks, WIDTH)
        tried = tried * 0
    tl.store(token + b, chosen.to(tl.int64))


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: a small tree of a draft that knows its lse; where full, all kinds."""
    for name, types, constants in chain_types(full):
        types = types | dict.fromkeys(("parents", "noted_tokens", "noted_draws"), "*i64")
        types |= dict.fromkeys(("growths", "shares"), "*fp64") | {"tops": "*fp32"}
        warps = tree_warps(constants["BLOCK"], bool(constants["HAS_DRAFT"]))
        yield Variant(f"tree_emit {name}", tree_emit, types, constants, warps=warps, registers=255)
