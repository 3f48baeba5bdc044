"""What others do in place of our kernels, rewritten here so that all run on the same inputs.

Verification, for V tokens, gamma drafted ones, logits of b bytes; bytes a request and token of the vocabulary:

    compiled     torch.compile of softmax, gather, compare, residual, cdf                      fp32 laws, several passes
    mrv2         float32 copy of all rows, pass for the temperature, and the five launches     (b + 16)(gamma + 1) + ...
    fused        the five launches below on the logits as they are                             2 b gamma + 2 b

    _partials  grid (B N, blocks)   maximum and sum of exponentials of each block, target's and draft's tested rows
    _decide    grid (B)             one token after the other, until one is rejected
    _resample  grid (B, blocks)     residual or bonus row, Gumbel noise, the best of each block
    _best      grid (B)             the best of all

This is the order of work of vLLM's model runner v2 ("mrv2", with the temperature in a pass of its own) and of its
proposed successor ("fused"); their code reads indices, greedy rows and seeds beside it, which costs next to nothing.

Attention: the dense mask that scaled_dot_product_attention takes, and FlexAttention with a mask made beforehand, though
it would have to be made anew in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from specdecode_kernels.launch import blocks
from specdecode_kernels.variant import Variant

BLOCK, SMALL = 8192, 1024
"""Tokens of a program of `_partials`, and of `_resample`."""


def plain_torch(
    logits: Tensor, draft: Tensor, tokens: Tensor, temperature: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor]:
    """Lengths of the accepted paths and last tokens, int64 [B] each, as one would write it in PyTorch.

    logits: [B, N, V]. draft: [B, N - 1, V]. tokens: int64 [B, N], of a chain. temperature: float32 [B], above 0.
    coins: float32 [2, B, N], to accept and to emit.
    """
    scale = 1 / temperature[:, None, None]
    p, q = (logits.float() * scale).softmax(-1), (draft.float() * scale).softmax(-1)
    x = tokens[:, 1:, None]
    p_x, q_x = p[:, :-1].gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]
    accepted = coins[0, :, 1:] * q_x < p_x
    stop = accepted.long().cumprod(1).sum(1)
    at = stop[:, None, None].expand(-1, 1, p.shape[-1])
    row = p.gather(1, at)[:, 0] - pad(q, (0, 0, 0, 1)).gather(1, at)[:, 0]
    cdf = row.clamp(min=0).cumsum(-1)
    u = coins[1].gather(1, stop[:, None])
    return stop + 1, (cdf <= u * cdf[:, -1:]).sum(-1)


@cache
def compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """`plain_torch` through torch.compile."""
    return torch.compile(plain_torch, dynamic=False)


def mrv2_style(
    logits: Tensor, draft: Tensor, tokens: Tensor, temperature: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor]:
    """As `plain_torch`; draft: [B, N, V], like the logits contiguous."""
    batch, nodes, size = logits.shape
    copy = logits.float()
    _divide[(batch * nodes, blocks(size, BLOCK))](copy, temperature, nodes, size, BLOCK=BLOCK, num_warps=8)
    return _pipeline(copy, draft, tokens, temperature, coins, fold=False)


def fused_temperature(
    logits: Tensor, draft: Tensor, tokens: Tensor, temperature: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor]:
    """As `mrv2_style`, without the copy."""
    return _pipeline(logits, draft, tokens, temperature, coins, fold=True)


def bytes_moved(peer: str, batch: int, gamma: int, vocab: int, itemsize: int, rejected: float) -> int:
    """Bytes of the large reads and writes of "mrv2" and "fused". rejected: requests that resample from two rows."""
    rows, row = gamma + 1, vocab * batch
    width = itemsize if peer == "fused" else 4
    copy = 0 if peer == "fused" else row * rows * (itemsize + 4 + 4 + 4)
    stats = row * gamma * (width + itemsize)
    return round(copy + stats + row * width + rejected * vocab * itemsize)


def _pipeline(
    logits: Tensor, draft: Tensor, tokens: Tensor, temperature: Tensor, coins: Tensor, fold: bool
) -> tuple[Tensor, Tensor]:
    batch, nodes, size = logits.shape
    count, small = blocks(size, BLOCK), blocks(size, SMALL)
    partial = torch.empty(4, batch * nodes, count, dtype=torch.float32, device=logits.device)
    _partials[(batch * nodes, count)](
        logits, draft, temperature, partial, nodes, size, count, FOLD=fold, BLOCK=BLOCK, num_warps=8
    )
    width = triton.next_power_of_2(count)
    stop = torch.empty(batch, dtype=torch.int64, device=logits.device)
    lse = torch.empty(2, batch, dtype=torch.float32, device=logits.device)
    inputs = (logits, draft, temperature, tokens, coins)
    _decide[(batch,)](*inputs, partial, stop, lse, nodes, size, count, FOLD=fold, WIDTH=width, num_warps=1)
    best = torch.empty(batch, small, dtype=torch.float32, device=logits.device)
    which = torch.empty(batch, small, dtype=torch.int64, device=logits.device)
    _resample[(batch, small)](
        *(logits, draft, temperature, stop, lse, best, which, nodes, size, small), FOLD=fold, BLOCK=SMALL, num_warps=4
    )
    token = torch.empty(batch, dtype=torch.int64, device=logits.device)
    _best[(batch,)](best, which, token, small, WIDTH=triton.next_power_of_2(small), num_warps=4)
    return stop + 1, token


@triton.jit
def _divide(rows, temperature, nodes, size, BLOCK: tl.constexpr):
    """Grid (B N, blocks): float32 rows by their temperature, in place."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = rows + row * size + index
    x = tl.load(at, mask=index < size)
    tl.store(at, x / tl.load(temperature + row // nodes), mask=index < size)


@triton.jit
def _scaled(row, index, size, scale):
    return tl.load(row + index, mask=index < size, other=float("-inf")).to(tl.float32) * scale


@triton.jit
def _partials(logits, draft, temperature, partial, nodes, size, count, FOLD: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (B N, blocks). partial: [4, B N, blocks], maxima and sums of the target, then of the draft."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row % nodes < nodes - 1:
        index = block * BLOCK + tl.arange(0, BLOCK)
        scale = 1 / tl.load(temperature + row // nodes)
        step = tl.num_programs(0) * count
        out = partial + row * count + block
        x = _scaled(logits + row * size, index, size, scale if FOLD else 1.0)
        top = tl.max(x, 0)
        tl.store(out, top)
        tl.store(out + step, tl.sum(tl.exp(x - top), 0))
        x = _scaled(draft + row * size, index, size, scale)
        top = tl.max(x, 0)
        tl.store(out + 2 * step, top)
        tl.store(out + 3 * step, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _lse(partial, row, step, count, WIDTH: tl.constexpr):
    block = tl.arange(0, WIDTH)
    tops = tl.load(partial + row * count + block, mask=block < count, other=float("-inf"))
    sums = tl.load(partial + step + row * count + block, mask=block < count, other=0.0)
    top = tl.max(tops, 0)
    return top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))


@triton.jit
def _decide(
    logits,
    draft,
    temperature,
    tokens,
    coins,
    partial,
    stop,
    lse,
    nodes,
    size,
    count,
    FOLD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (B). stop: int64 [B], tokens accepted. lse: [2, B], of the row that the last token comes from."""
    b = tl.program_id(0).to(tl.int64)
    batch = tl.num_programs(0)
    scale = 1 / tl.load(temperature + b)
    step = batch * nodes * count
    accepted = b * 0
    going = 1
    for i in range(nodes - 1):
        if going == 1:
            row = b * nodes + i
            x = tl.load(tokens + row + 1)
            lse_p, lse_q = _lse(partial, row, step, count, WIDTH), _lse(partial + 2 * step, row, step, count, WIDTH)
            p = tl.exp(tl.load(logits + row * size + x).to(tl.float32) * (scale if FOLD else 1.0) - lse_p)
            q = tl.exp(tl.load(draft + row * size + x).to(tl.float32) * scale - lse_q)
            if tl.load(coins + row + 1) * q < p:
                accepted += 1
            else:
                going = 0
                tl.store(lse + b, lse_p)
                tl.store(lse + batch + b, lse_q)
    tl.store(stop + b, accepted)


@triton.jit
def _resample(
    logits, draft, temperature, stop, lse, best, which, nodes, size, count, FOLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (B, blocks): the largest of log(mass) + Gumbel noise (Gumbel, 1954), and its token."""
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    scale = 1 / tl.load(temperature + b)
    i = tl.load(stop + b)
    row = (b * nodes + i) * size
    score = _scaled(logits + row, index, size, scale if FOLD else 1.0)
    if i < nodes - 1:
        p = tl.exp(score - tl.load(lse + b))
        q = tl.exp(_scaled(draft + row, index, size, scale) - tl.load(lse + tl.num_programs(0) + b))
        score = tl.where(p > q, tl.log(tl.maximum(p - q, 1e-30)), float("-inf"))
    noise = tl.maximum(tl.rand(b.to(tl.int32), index), 1e-9)
    score -= tl.log(-tl.log(noise))
    top, place = tl.max(score, 0, return_indices=True)
    tl.store(best + b * count + block, top)
    tl.store(which + b * count + block, (block * BLOCK + place).to(tl.int64))


@triton.jit
def _best(best, which, token, count, WIDTH: tl.constexpr):
    """Grid (B): the token of the largest."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    _, place = tl.max(
        tl.load(best + b * count + block, mask=block < count, other=float("-inf")), 0, return_indices=True
    )
    tl.store(token + b, tl.load(which + b * count + place))


def dense_mask(lengths: Tensor, ancestors: Tensor, slots: int, dtype: torch.dtype, group: int) -> Tensor:
    """What is added to the scores, [B, 1, group N, S]: 0 where a node sees a slot. Arguments as in `tree_attention`."""
    nodes = ancestors.shape[1]
    place = torch.arange(slots, device=lengths.device) - lengths[:, None]
    seen = (place < 0)[:, None].expand(-1, nodes, -1)
    index = place.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
    inside = ((place >= 0) & (place < nodes))[:, None] & tree_mask(ancestors).gather(2, index)
    added = torch.zeros(seen.shape, dtype=dtype, device=lengths.device).masked_fill_(~(seen | inside), -torch.inf)
    return added.repeat(1, group, 1)[:, None]


def tree_mask(ancestors: Tensor) -> Tensor:
    """bool [B, N, N]: node i sees node j."""
    node = torch.arange(ancestors.shape[1], device=ancestors.device)
    return (ancestors[:, :, node // 64] >> (node % 64)) & 1 == 1


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[B, N, H_q, D] with a mask [B, 1, G N, S]: the queries that share a key head are stacked as rows of it."""
    batch, nodes, _, dim = q.shape
    heads = keys.shape[1]
    rows = q.view(batch, nodes, heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(batch, heads, -1, dim)
    seen = scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return seen.view(batch, heads, -1, nodes, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)


def flex_mask(lengths: Tensor, ancestors: Tensor, slots: int) -> object:
    """FlexAttention's BlockMask of the same."""
    from torch.nn.attention.flex_attention import create_block_mask

    nodes, tree = ancestors.shape[1], tree_mask(ancestors)

    def sees(b: Tensor, h: Tensor, node: Tensor, slot: Tensor) -> Tensor:
        place = slot - lengths[b]
        return (place < 0) | ((place < nodes) & tree[b, node, place.clamp(0, nodes - 1)])

    return create_block_mask(sees, len(lengths), None, nodes, slots, device=lengths.device)


@cache
def flex_attention() -> Callable[..., Tensor]:
    """(q [B, H_q, N, D], keys, values, block_mask=..., enable_gqa=True) -> [B, H_q, N, D], through torch.compile."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: for bf16 logits, and float32 ones where full."""
    types = dict.fromkeys(("temperature", "coins", "partial", "lse", "best", "rows"), "*fp32")
    types |= dict.fromkeys(("tokens", "stop", "which", "token"), "*i64")
    types |= dict.fromkeys(("nodes", "count"), "i32") | {"size": "i32:16", "draft": "*bf16"}
    yield Variant("peer divide", _divide, types, {"BLOCK": BLOCK}, warps=8)
    for dtype in ("bf16", "fp32") if full else ("bf16",):
        fold = {"FOLD": dtype == "bf16"}
        given = types | {"logits": f"*{dtype}"}
        yield Variant(f"peer partials {dtype}", _partials, given, fold | {"BLOCK": BLOCK}, warps=8)
        yield Variant(f"peer decide {dtype}", _decide, given, fold | {"WIDTH": 16}, warps=1, wide=False)
        yield Variant(f"peer resample {dtype}", _resample, given, fold | {"BLOCK": SMALL}, wide=False)
    yield Variant("peer best", _best, types, {"WIDTH": 128}, wide=False)
