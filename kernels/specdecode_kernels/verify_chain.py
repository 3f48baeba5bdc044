"""Rejection sampling along chains, in two launches: `verify_stats`, then `chain_emit`.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; the reference is `specdecode_ref.verify.chain`. Row i
of a request is the law after node i, and tests node i + 1, drafted as x:

    p_i(x) = exp((logit_x - top_i) / T) / total_i,    accept where u q_i(x) < p_i(x),    stop = the first that fails

All rows are put together from their block statistics at once, in registers; a logit is read for each x, and the rest is
a minimum over i. Every program of a request does this again, as it costs less than to wait for another launch:

                 block 0   block 1   block 2
    request 0   |  walk   |  walk   |  walk   |     grid (B, blocks)
                |         |         |         |
                 then, if the token after a rejected, drawn x is due: each program sums max(p - q, 0) over its block;
                 the last one to arrive has all sums, picks a block, and reads it once more
                 in all other cases, program 0 picks alone (`emission.py`)

Bytes, for rows of V logits of b bytes and gamma drafted tokens: V b (gamma + 1) in the first launch, 2 V b in the
second for a request that rejects a drawn token. With a draft that does not pass its lse, V_d b gamma more in the first.
FLOPs: about 5 a logit read in the first launch, 10 a pair in the second.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from specdecode_kernels import row_stats
from specdecode_kernels.cuts import is_kept, steepness
from specdecode_kernels.emission import pair_mass, pick_from_row, pick_token
from specdecode_kernels.row_stats import DETERMINISTIC, chance, draft_laws, emit_warps, row_laws
from specdecode_kernels.variant import Variant
from specdecode_ref.batched import records

FINE, NOT_A_LAW, NOT_DRAWN = map(tl.constexpr, (records.FINE, records.NOT_A_LAW, records.NOT_DRAWN))
BONUS, RESIDUAL, TARGET = map(tl.constexpr, (records.BONUS, records.RESIDUAL, records.TARGET))


def bytes_moved(batch: int, nodes: int, vocab: int, itemsize: int, *, drawn: bool, lse: bool, residuals: int) -> int:
    """Bytes of both launches, for a draft with the target's vocabulary and dtype; scratch and columns once.

    drawn: the drafts are not certain. residuals: requests whose last token comes from max(p - q, 0).
    """
    sides = batch * nodes + (batch * (nodes - 1) if drawn and not lse else 0)
    block, _ = row_stats.tile(vocab)
    picks = (batch + residuals) * min(block, vocab) * itemsize + residuals * 2 * vocab * itemsize
    stats = 12 * sides * -(-vocab // block)
    return row_stats.bytes_moved(sides, vocab, itemsize) + stats + picks + column_bytes(batch, nodes)


def column_bytes(batch: int, nodes: int) -> int:
    """Bytes of what is not logits: tokens, draws and coins read, the verdicts written."""
    return batch * (nodes * (2 * 8 + 2 * 8 + 3 * 8) + 8 + 4 * 8)


@triton.jit
def entry(vector, i):
    """Entry i of a vector, as a scalar. For 0 <= i < its size."""
    here = tl.arange(0, vector.shape[0]) == i
    return tl.sum(tl.where(here, vector, tl.zeros_like(vector)), 0)


@triton.jit
def anywhere(condition):
    """True where any entry of a vector of booleans is."""
    return tl.max(condition.to(tl.int32), 0) > 0


@triton.jit
def walk(
    b,
    drafted,
    side_p,
    side_q,
    temperature,
    stats,
    lse,
    rows,
    nodes,
    blocks,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """What each row of a chain tests: x and its p and q, float64 [NODES]; which x were drawn; the laws of both sides.

    The last, `gamma`, is how many tokens were drafted: up to the first placeholder. Rows behind it hold anything.
    """
    tokens, draws = drafted
    greedy = temperature == 0
    scale = steepness(temperature)
    i = tl.arange(0, NODES)
    behind = (i > 0) & (i < nodes) & (tl.load(tokens + b * nodes + i, mask=i < nodes, other=-1) < 0)
    gamma = tl.min(tl.where(behind, i, nodes), 0) - 1
    tested = i < gamma
    x = tl.load(tokens + b * nodes + i + 1, mask=tested, other=-1)
    drawn = tested & (tl.load(draws + b * nodes + i + 1, mask=tested, other=DETERMINISTIC) != DETERMINISTIC)
    row = b * nodes + i

    logits, stride, size, cut = side_p
    top, total, best, broken = row_laws(stats, row, i <= gamma, scale, blocks, WIDTH)
    law_p = (top, total, best)
    broken = broken & (i <= gamma)
    p = chance(_logits_of(logits, stride, size, cut, i, x, tested, PLAIN), x, law_p, greedy, scale)
    if HAS_DRAFT:
        logits, stride, size, cut = side_q
        top, total, best, unlawful = draft_laws(stats, lse, row, rows, drawn, temperature, blocks, WIDTH, HAS_LSE)
        law_q = (top, total, best)
        q = chance(_logits_of(logits, stride, size, cut, i, x, drawn, PLAIN), x, law_q, greedy, scale)
        q = tl.where(drawn, q, 1.0)
        unlawful = anywhere(unlawful & drawn)
    else:
        law_q = law_p
        q = tl.full([NODES], 1.0, tl.float64)
        unlawful = anywhere(drawn)  # drawn from a law that was not passed
    return x, p, q, drawn, law_p, law_q, broken, unlawful, gamma


@triton.jit
def _logits_of(logits, stride, size, cut, i, x, real, PLAIN: tl.constexpr):
    """The logit of token x[i] in row i, -inf where it has none. logits: pointer to row 0."""
    mask = real & (x >= 0) & (x < size)
    value = tl.load(logits + i.to(tl.int64) * stride + x, mask=mask, other=float("-inf")).to(tl.float32)
    if not PLAIN:
        floors, ties = cut
        floor = tl.load(floors + i, mask=mask, other=float("-inf"))
        value = tl.where(is_kept(value, x, floor, tl.load(ties + i, mask=mask, other=0)), value, float("-inf"))
    return value


@triton.jit
def write_chain(out, b, stop, kind, status, nodes, NODES: tl.constexpr):
    """A chain's verdict, but for its token and tests: the path 0 to `stop`, or a bare round without a verdict."""
    path, length, kinds, statuses = out
    fine = status == FINE
    node = tl.arange(0, NODES)
    last = tl.where(fine, stop, 0)
    tl.store(path + b * nodes + node, tl.where(node <= last, node, -1).to(tl.int64), mask=node < nodes)
    tl.store(length + b, (last + 1).to(tl.int64))
    tl.store(kinds + b, tl.where(fine, kind, TARGET).to(tl.int64))
    tl.store(statuses + b, status.to(tl.int64))


@triton.jit
def chain_emit(
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
    arrivals,
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
    """Grid (B, blocks). surplus: float32 [B, blocks], scratch. arrivals: int32 [B], all 0."""
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = b * nodes
    temperature = tl.load(temperatures + b)
    greedy = temperature == 0
    scale = steepness(temperature)
    stats = (peaks, masses, firsts)
    logits += b * logits_b
    draft += b * draft_b
    side_p = (logits, logits_n, vocab, (floors + first, ties + first))
    side_q = (draft, draft_n, draft_vocab, (draft_floors + first, draft_ties + first))
    x, p, q, drawn, law_p, law_q, broken, unlawful, gamma = walk(
        b, (tokens, draws), side_p, side_q, temperature, stats, lse, rows, nodes, blocks,
        NODES, WIDTH, HAS_DRAFT, HAS_LSE, PLAIN,
    )  # fmt: skip

    i = tl.arange(0, NODES)
    tested = i < gamma
    u = tl.load(accept + first + i + 1, mask=tested, other=0.0)
    accepted = (u * q < p) & ~broken
    stop = tl.min(tl.where(tested & ~accepted, i, gamma), 0).to(tl.int64)
    bad = unlawful | anywhere(broken & (i <= stop))
    rejected = stop < gamma
    if block == 0:
        came = tl.where(rejected, RESIDUAL, tl.where(stop > 0, BONUS, TARGET))
        write_chain((path, length, kind, status), b, stop, came, tl.where(bad, NOT_A_LAW, FINE), nodes, NODES)
        seen = tested & (i <= stop) & ~bad
        tl.store(p_eff + first, float("nan"))
        tl.store(q_eff + first, float("nan"))
        tl.store(p_eff + first + i + 1, tl.where(seen, p, float("nan")), mask=i + 1 < nodes)
        tl.store(q_eff + first + i + 1, tl.where(seen, q, float("nan")), mask=i + 1 < nodes)

    row = first + stop
    coin = tl.load(emit + row)
    top_p, total_p, best_p = law_p
    top_p = entry(top_p, stop)
    row_p = (logits + stop * logits_n, vocab, (floors + row, ties + row))
    paired = rejected & (entry(drawn.to(tl.int32), stop) > 0) & ~greedy & ~bad
    # -1 where another program picks; a greedy law has one token, with or without a rejected one.
    chosen = tl.full([], -1, tl.int32)
    alone = (block == 0) & ~(bad | paired | greedy)
    if HAS_DRAFT:  # noqa: SIM102, a constant: without a draft, what is inside is not compiled
        if paired:
            top_q, total_q, _ = law_q
            row_q = (draft + stop * draft_n, draft_vocab, (draft_floors + row, draft_ties + row))
            scaled_p = (row_p, top_p, (1 / entry(total_p, stop)).to(tl.float32))
            scaled_q = (row_q, entry(top_q, stop), (1 / entry(total_q, stop)).to(tl.float32))
            data = (scaled_p, scaled_q, scale)
            here = pair_mass(block * BLOCK + tl.arange(0, BLOCK), data, PLAIN)
            tl.store(surplus + b * blocks + block, tl.sum(here, 0))
            tl.debug_barrier()
            if tl.atomic_add(arrivals + b, 1) == blocks - 1:
                each = tl.arange(0, WIDTH)
                left = tl.load(surplus + b * blocks + each, mask=each < blocks, other=0.0, cache_modifier=".cg")
                chosen = pick_token(left.to(tl.float64), coin, data, pair_mass, WIDTH, BLOCK, PLAIN)
                alone = chosen < 0  # rounding left no residual: from p
    if alone:
        gone = tl.where(rejected & ~paired, entry(x, stop), -1)
        chosen = pick_from_row(stats, row, row_p, top_p, scale, gone, coin, blocks, WIDTH, BLOCK, PLAIN)
    if block == 0 and (bad | greedy):
        tl.store(token + b, tl.where(bad, -1, entry(best_p, stop)).to(tl.int64))
    elif chosen >= 0:
        tl.store(token + b, chosen.to(tl.int64))


def chain_types(full: bool) -> Iterator[tuple[str, dict[str, str], dict[str, int]]]:
    """Name, types and constants of the forms of a chain's kernels."""
    words = ("tokens", "draws", "ties", "draft_ties", "path", "length", "token", "kind", "status")
    types = dict.fromkeys(words, "*i64") | {"firsts": "*i32", "arrivals": "*i32"}
    types |= dict.fromkeys(("temperatures", "accept", "emit", "p_eff", "q_eff"), "*fp64")
    types |= dict.fromkeys(("lse", "floors", "draft_floors", "peaks", "masses", "surplus"), "*fp32")
    types |= dict.fromkeys(("rows", "nodes", "blocks"), "i32") | dict.fromkeys(("vocab", "draft_vocab"), "i32:16")
    types |= dict.fromkeys(("logits_b", "logits_n", "draft_b", "draft_n"), "i64:16")
    shapes = [("bf16", 4096, 32, 8, True, True, True)]
    if full:
        kinds = (
            (True, True, True),
            (True, True, False),
            (True, False, True),
            (True, False, False),
            (False, False, True),
        )
        shapes = [(dtype, 4096, 32, 8, *kind) for dtype in ("bf16", "fp16", "fp32") for kind in kinds]
        shapes += [
            ("bf16", 2048, 32, 8, True, True, True),
            *(("bf16", 4096, width, nodes, True, True, True) for width, nodes in ((32, 32), (64, 16))),
        ]
    for dtype, block, width, nodes, draft, lse, plain in shapes:
        constants = {"NODES": nodes, "WIDTH": width, "BLOCK": block}
        constants |= {"HAS_DRAFT": draft, "HAS_LSE": lse, "PLAIN": plain}
        what = ["lse"] * lse + ["draft"] * (draft and not lse) + ["certain"] * (not draft) + ["rules"] * (not plain)
        name = f"{dtype} N={nodes} BLOCK={block} {' '.join(what)}"
        yield name, types | {"logits": f"*{dtype}", "draft": f"*{dtype}"}, constants


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: 4 tokens of a draft that knows its lse; where full, all kinds of drafts."""
    for name, types, constants in chain_types(full):
        warps = emit_warps(constants["BLOCK"], bool(constants["HAS_DRAFT"]))
        yield Variant(f"chain_emit {name}", chain_emit, types, constants, warps=warps)
