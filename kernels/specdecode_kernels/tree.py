"""The topology of a batch of trees, from their parents: depths, ancestor masks and child lists.

No loop over nodes and no question to the host. Ancestors come by pointer doubling (Wyllie, "The complexity of parallel
computations", 1979): a node looks at its parent, then two steps up, then four. In the round that looks from i to up[i],

    mask[i] |= mask[up[i]]        depth[i] += depth[up[i]]        up[i] = up[up[i]]

A node that hangs on nothing points at itself. After six rounds every node of a word of 64 looks at the top of its
branch inside that word. A top is the root, or hangs on a node of an earlier word, whose mask and depth are done; or its
parent is no earlier node, and then the whole branch is dropped. The number of rounds depends on no pointer, so no tree,
however malformed, can make it run on.

                   N nodes, word after word
              +---------+---------+---------+
    TREES     | OWN     | OWN     |  ...    |      one program; OWN is 64, or less for smaller trees, which then share
    a program +---------+---------+---------+      a program; between words a barrier, as masks come from memory

Child lists are a rank. With key(i) = parent(i) 2048 + i, a node's place among all children is the number of smaller
keys, and the children of node j begin at the number of keys below j 2048: N^2 comparisons in tiles of OWN by OWN.

Bytes a tree, with W words: read 8 N (3 + 2 W), and 8 (W + 1) more for each node that hangs on an earlier word; written
8 (3 N + 1 + N W) + 1. For 64 nodes that is 4.6 kB: the launch and six dependent gathers are what takes time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.launch import blocks, require_device, require_dtype, require_shape
from specdecode_kernels.variant import Variant, int32
from specdecode_ref.batched.tree import WORD, Topology
from specdecode_ref.errors import InputError, NotApplicableError

MOST = 1024
"""Nodes of the widest tree."""

TILE = 4096
"""Comparisons of keys a program makes at a time."""

ROUNDS = tl.constexpr(6)
"""Rounds of doubling that reach across a word."""

SPREAD = tl.constexpr(2048)
"""Keys a parent has for its children: more than there are nodes."""

NO_CHILD = tl.constexpr(2**30)
"""The key of what is no child; behind all others."""


def topology(parents: Tensor) -> Topology:
    """Depths, masks and child lists of trees. parents: int64 [B, N]; -1 at the root and where there is no node.

    Raises InputError for another shape or no node at all, NotApplicableError for another dtype or above 1024 nodes.
    """
    require_shape("parents", parents, -1, -1)
    require_dtype("parents", parents, torch.int64)
    require_device(_topology, parents)
    batch, nodes = parents.shape
    if nodes == 0:
        raise InputError("trees of at least a root", "0 nodes", "pass -1 for a bare root")
    if nodes > MOST:
        raise NotApplicableError(f"trees of at most {MOST} nodes", nodes, "use the PyTorch reference")
    if parents.stride(1) != 1:
        parents = parents.contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=parents.device)

    out = Topology(
        depths=empty(nodes),
        ancestors=empty(nodes, blocks(nodes, WORD)),
        first=empty(nodes + 1),
        children=empty(nodes),
        malformed=empty(dtype=torch.bool),
    )
    if batch:
        constants = _constants(nodes)
        grid = (blocks(batch, constants["TREES"]),)
        warps = _warps(constants)
        _topology[grid](parents, *out, batch, nodes, parents.stride(0), **constants, num_warps=warps)
    return out


def bytes_moved(batch: int, nodes: int, inherited: int = 0) -> int:
    """Bytes read and written for `batch` trees of `nodes` nodes.

    inherited: how many nodes, of all trees, have an ancestor in an earlier word of 64.
    """
    words = blocks(nodes, WORD)
    read = 8 * nodes * (3 + 2 * words)
    written = 8 * (3 * nodes + 1 + nodes * words) + 1
    return batch * (read + written) + 8 * (words + 1) * inherited


def _constants(nodes: int) -> dict[str, int]:
    own = min(max(triton.next_power_of_2(nodes), 8), WORD)
    return {"TREES": TILE // own**2, "OWN": own, "WORDS": blocks(nodes, WORD)}


def _warps(constants: dict[str, int]) -> int:
    """No more threads than nodes: with more, every thread would load all keys of a word for itself."""
    return min(4, constants["TREES"] * constants["OWN"] // 32)


@triton.jit
def _topology(
    parents,
    depths,
    ancestors,
    first,
    children,
    malformed,
    batch,
    nodes,
    stride,
    TREES: tl.constexpr,
    OWN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid (blocks of trees)."""
    tree = tl.program_id(0).to(tl.int64) * TREES + tl.arange(0, TREES)
    for word in range(WORDS):
        _ancestry(parents, depths, ancestors, tree[:, None], word, batch, nodes, stride, TREES, OWN, WORDS)
        tl.debug_barrier()
    dropped = tl.zeros((TREES,), tl.int32)
    for word in range(WORDS):
        dropped += _child_lists(
            parents, depths, first, children, tree[:, None], word, batch, nodes, stride, TREES, OWN, WORDS
        )
    tl.store(first + tree * (nodes + 1), 0, tree < batch)
    tl.store(malformed + tree, dropped > 0, tree < batch)


@triton.jit
def _ancestry(
    parents,
    depths,
    ancestors,
    tree,
    word,
    batch,
    nodes,
    stride,
    TREES: tl.constexpr,
    OWN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Depths and masks of the nodes of one word; those of the words before it stand in memory."""
    lane = tl.broadcast_to(tl.arange(0, OWN)[None, :], (TREES, OWN))
    node = word * OWN + lane
    real = (tree < batch) & (node < nodes)
    parent = tl.load(parents + tree * stride + node, real, other=-1)
    hangs = (parent >= 0) & (parent < node)  # never at node 0, whatever it names
    inside = hangs & (parent >= word * OWN)

    up = tl.where(inside, parent - word * OWN, lane).to(tl.int32)
    depth = inside.to(tl.int64)
    mask = tl.full((TREES, OWN), 1, tl.int64) << lane
    for _ in tl.static_range(ROUNDS):
        mask |= tl.gather(mask, up, 1)
        depth += tl.gather(depth, up, 1)
        up = tl.gather(up, up, 1)

    exists = (up == 0) & (word == 0)
    place = tree * nodes + node
    if WORDS == 1:
        tl.store(ancestors + place, tl.where(exists, mask, 0), real)
    else:
        above = tl.gather(tl.where(hangs & (parent < word * OWN), parent, -1), up, 1)
        inherited = tl.load(depths + tree * nodes + above, above >= 0, other=-1)
        depth += inherited + 1
        inherits = inherited >= 0
        exists = exists | inherits
        COLUMNS: tl.constexpr = triton.next_power_of_2(WORDS)
        column = tl.arange(0, COLUMNS)[None, None, :]
        row = ancestors + (tree * nodes + above)[:, :, None] * WORDS + column
        bits = tl.load(row, inherits[:, :, None] & (column < WORDS), other=0)
        bits |= tl.where((column == word) & exists[:, :, None], mask[:, :, None], 0)
        tl.store(ancestors + place[:, :, None] * WORDS + column, bits, real[:, :, None] & (column < WORDS))
    tl.store(depths + place, tl.where(exists, depth, -1), real)


@triton.jit
def _child_lists(
    parents,
    depths,
    first,
    children,
    tree,
    word,
    batch,
    nodes,
    stride,
    TREES: tl.constexpr,
    OWN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Where the nodes of one word stand among the children, and where their own begin; how many were dropped."""
    lane = tl.arange(0, OWN)[None, :]
    node = word * OWN + lane
    real = (tree < batch) & (node < nodes)
    key, dropped = _key(parents, depths, tree, node, real, nodes, stride)
    place = tl.zeros((TREES, OWN), tl.int32)
    end = tl.zeros((TREES, OWN), tl.int32)
    total = tl.zeros((TREES,), tl.int32)
    for chunk in range(WORDS):
        there = chunk * OWN + lane
        other, _ = _key(parents, depths, tree, there, (tree < batch) & (there < nodes), nodes, stride)
        place += tl.sum((other[:, None, :] < key[:, :, None]).to(tl.int32), 2)
        end += tl.sum((other[:, None, :] < ((node + 1) * SPREAD)[:, :, None]).to(tl.int32), 2)
        total += tl.sum((other < NO_CHILD).to(tl.int32), 1)
    tl.store(first + tree * (nodes + 1) + node + 1, end, real)
    tl.store(children + tree * nodes + place, node, real & (key < NO_CHILD))
    tl.store(children + tree * nodes + node, -1, real & (node >= total[:, None]))
    return tl.sum(dropped.to(tl.int32), 1)


@triton.jit
def _key(parents, depths, tree, node, real, nodes, stride):
    parent = tl.load(parents + tree * stride + node, real, other=-1)
    exists = tl.load(depths + tree * nodes + node, real, other=-1) >= 0
    key = tl.where(exists & (node > 0), parent.to(tl.int32) * SPREAD + node, NO_CHILD)
    return key, real & ~exists & (parent != -1)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: trees of 64 nodes; where full, of 8 to 1024."""
    types = dict.fromkeys(("parents", "depths", "ancestors", "first", "children"), "*i64") | {"malformed": "*i1"}
    for nodes in (8, 16, 32, 64, 128, 320, 1024) if full else (64, 128):
        constants = _constants(nodes)
        types |= {"batch": "i32", "nodes": int32(nodes), "stride": int32(nodes)}
        registers = 128 if nodes <= WORD else 255  # of 64 threads: no other program waits for them
        yield Variant(
            f"tree N={nodes}", _topology, dict(types), constants, _warps(constants), registers=registers, wide=False
        )
