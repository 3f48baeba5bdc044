"""The clock on tree attention: 32 query heads on 8 key heads of 128, bfloat16.

`bytes_moved` counts everything the kernels read and write. Partial results stay in the L2 cache for the most part, so
the share of the bandwidth that a goal is about counts keys and values alone: `cache_gigabytes_per_second`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode_kernels import tree_attention
from specdecode_kernels.bench import peers
from specdecode_kernels.bench.stand import Case, Figures, Stand
from specdecode_kernels.launch import blocks
from specdecode_ref.batched.tree import topology

SECTION = "attention"

HEADS, KV_HEADS, DIM = 32, 8, 128
NODES, CONTEXTS, BATCHES = (1, 16, 64), (1024, 8192, 16384), (1, 8)


class Shape(NamedTuple):
    """Requests, nodes of their trees, committed slots; query heads, key heads, their size."""

    batch: int
    nodes: int
    context: int
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM

    def __str__(self) -> str:
        return f"B={self.batch} N={self.nodes} context={self.context}"


TINY = Shape(2, 5, 40, 2, 1, 64)


class Inputs(NamedTuple):
    """What `tree_attention` takes."""

    q: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    ancestors: Tensor


def cases(smoke: bool) -> Iterator[Case]:
    """Ours in all shapes, then the others where a goal compares them, then elsewhere."""
    shapes = [Shape(b, n, c) for c in reversed(CONTEXTS) for b in reversed(BATCHES) for n in NODES]
    shapes = [TINY] if smoke else shapes
    trees = [shape for shape in shapes if shape.nodes > 1]
    for shape in shapes:
        yield Case(SECTION, f"tree_attention {shape}", partial(_ours, shape=shape))
    for shape in sorted(trees, key=lambda shape: (shape.nodes != 16, -shape.context)):
        for name, peer in {"no split": _unsplit, "dense-mask SDPA": _dense, "FlexAttention": _flex}.items():
            if smoke or name != "FlexAttention" or (shape.nodes == 16 and shape.context >= 8192):  # a long compilation
                yield Case(SECTION, f"{name} {shape}", partial(peer, shape=shape), peer=name != "no split")


def inputs(stand: Stand, shape: Shape, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random ones, with a random tree in each row."""
    generator, rng = stand.generator(seed), random.Random(seed)
    batch, nodes, context, heads, kv_heads, dim = shape
    slots = blocks(context + nodes, 64) * 64

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=stand.device, dtype=dtype)

    parents = [[-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, nodes))] for _ in range(batch)]
    ancestors = topology(torch.tensor(parents)).ancestors.to(stand.device)
    lengths = torch.full((batch,), context, device=stand.device)
    keys, values = (normal(batch, kv_heads, slots, dim) for _ in range(2))
    return Inputs(normal(batch, nodes, heads, dim), keys, values, lengths, ancestors)


def cache_bytes(shape: Shape, size: int = 2) -> int:
    """Bytes of the keys and values of one layer."""
    return 2 * (shape.context + shape.nodes) * shape.kv_heads * shape.dim * size * shape.batch


def splits_of(shape: Shape) -> int:
    """Into how many splits the kernel cuts them."""
    rows = shape.nodes * shape.heads // shape.kv_heads
    tiles = blocks(rows, tree_attention.shape_of(rows, torch.bfloat16).rows)
    return tree_attention.splits_for(shape.batch, shape.kv_heads, tiles, shape.context + shape.nodes)


def bytes_moved(shape: Shape, splits: int) -> int:
    """All bytes of one layer."""
    batch, nodes, context, heads, kv_heads, dim = shape
    return tree_attention.bytes_moved([context] * batch, nodes, heads, kv_heads, dim, 2, splits)


def _ours(stand: Stand, shape: Shape) -> Figures:
    return _timed(stand, shape, tree_attention.tree_attention, splits_of(shape))


def _unsplit(stand: Stand, shape: Shape) -> Figures:
    return _timed(stand, shape, partial(tree_attention.attend, splits=1), 1)


def _timed(stand: Stand, shape: Shape, run: Callable[..., Tensor], splits: int) -> Figures:
    sets = _sets(stand, shape)
    figures = stand.timed([partial(run, *some) for some in sets], bytes_moved(shape, splits))
    rate = cache_bytes(shape) / figures["microseconds"] / 1e3
    return figures | {"cache_gigabytes_per_second": rate, "splits": splits}


def _sets(stand: Stand, shape: Shape) -> list[Inputs]:
    return [inputs(stand, shape, seed) for seed in range(stand.sets(cache_bytes(shape)))]


def _dense(stand: Stand, shape: Shape) -> Figures:
    sets = _sets(stand, shape)
    group = shape.heads // shape.kv_heads
    calls = []
    for q, keys, values, lengths, ancestors in sets:
        mask = peers.dense_mask(lengths, ancestors, keys.shape[2], q.dtype, group)
        calls.append(partial(peers.dense_attention, q, keys, values, mask))
    return stand.timed(calls, None)


def _flex(stand: Stand, shape: Shape) -> Figures:
    stand.require_gpu("FlexAttention, compiled")
    sets = _sets(stand, shape)
    run = peers.flex_attention()
    calls = []
    for q, keys, values, lengths, ancestors in sets:
        mask = peers.flex_mask(lengths, ancestors, keys.shape[2])
        calls.append(partial(run, q.transpose(1, 2), keys, values, block_mask=mask, enable_gqa=True))
    return stand.timed(calls, None)
