"""Tree attention: the nodes of a draft tree against the cache, in one read of it. Twin of `batched.tree_attention`.

A decode step reads the whole cache for one query. A tree of N nodes asks N times as much of the same bytes, so it is
as good as free, as long as those bytes are still read once. What loses that elsewhere is a kernel that gives up its
split of the keys, or reads them again, as soon as a query has a second row. Here the keys are split as ever, and with
G = H_q / H_kv the N G query rows of one key head are packed in one tile:

                 committed slots of row b, `length` of them      N tree slots
                +-----------+-----------+-----------+-----+     +------------+
    N G rows    |  split 0  |  split 1  |  split 2  | ... |     | split last |    one program each, for every key head
                +-----------+-----------+-----------+-----+     +------------+    and request; `_attend`
                 every node sees every slot: no mask code        node i sees slot j where bit j of its ancestors is set

                lse_0, o_0   lse_1, o_1   ...                    lse, o           -> `combine` -> [B, N, H_q, D]

`splits.py` says how the committed slots are cut and put together again. How many splits there are is chosen from
shapes; where they begin is computed on the device from the lengths, so that a graph can be replayed as the text grows.
Only the split with the ragged end has a masked block, and a block of the tree lies inside one 64-bit word of the masks.
More rows than the largest tile holds are tiled: each tile reads the keys and values again, from the L2 cache where its
neighbour has just been.

With P committed slots and elements of b bytes, a layer of a request moves 2 (P + N) H_kv D b bytes of keys and values,
and 8 (splits + 1) N H_q (D + 1) bytes of partial results, and takes 4 (P + N) N H_q D FLOPs: in 16 bit N G FLOPs a
byte, which is free until it nears the machine's ratio (295 on an H100, 206 on an H200).

Scores, sums and accumulators are float32. In 16 bit the weights of the second product are rounded to the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.launch import FLOATS, blocks, interpreted, require_device, require_dtype, require_shape
from specdecode_kernels.splits import chunk_of, combine, filled_splits, length_of, rows_to_combine, splits_for
from specdecode_kernels.variant import Variant
from specdecode_ref.errors import InputError, NotApplicableError

WORD = tl.constexpr(64)
"""Nodes a word of an ancestor mask holds."""

LOG2_E = tl.constexpr(1.4426950408889634)

DIMS = (64, 128)
"""Head dimensions there are kernels for."""


class Shape(NamedTuple):
    """A compiled form of `_attend`: rows a tile, slots a block, warps, stages of the pipeline."""

    rows: int
    block: int
    warps: int
    stages: int


def shape_of(rows: int, dtype: torch.dtype) -> Shape:
    """The form for so many query rows of a key head. Exact float32 products run on no tensor core: a small tile.

    From 64 rows on, sm_90 multiplies with wgmma, whose tile has 64; fewer rows take mma.sync, which is enough to keep
    up with the memory.
    """
    if dtype == torch.float32:
        return Shape(16, 16, 8, 2)
    tile = min(128, max(16, triton.next_power_of_2(rows)))
    return Shape(tile, 64, 8 if tile == 128 else 4, 3)


def tree_attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ancestors: Tensor) -> Tensor:
    """softmax(q k / sqrt(D)) v over what each node may see, [B, N, H_q, D] in q's dtype.

    q: [B, N, H_q, D]. keys, values: [B, H_kv, S, D], H_q a multiple of H_kv: query heads h * G to h * G + G - 1 share
    key head h; views are welcome, for instance one layer of a cache [B, layers, 2, H_kv, S, D]. lengths: int64 [B],
    committed slots. ancestors: int64 [B, N, ceil(N / 64)] as in `Topology`; a node without any bit is none, and gets 0.

    Raises NotApplicableError for another dtype, head dimension or device, InputError for shapes that do not fit.
    """
    return attend(q, keys, values, lengths, ancestors, None)


def attend(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ancestors: Tensor, splits: int | None) -> Tensor:
    """`tree_attention` with the committed slots cut into up to `splits` splits; None: as the cache's capacity suggests.

    For whoever knows a bound on the lengths that is far below the capacity: `splits_for` of that bound.
    """
    _require(q, keys, values, lengths, ancestors)
    batch, nodes, heads, dim = q.shape
    _, kv_heads, slots, _ = keys.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    q = q if q.stride(-1) == 1 else q.contiguous()
    lengths, ancestors = lengths.contiguous(), ancestors.contiguous()
    rows = nodes * heads // kv_heads
    form = shape_of(rows, q.dtype)
    tiles = blocks(rows, form.rows)
    splits = splits_for(batch, kv_heads, tiles, slots) if splits is None else max(1, splits)
    parts = torch.empty(batch, kv_heads, splits + 1, rows, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, kv_heads, splits + 1, rows, dtype=torch.float32, device=q.device)
    _attend[((splits + 1) * tiles, kv_heads, batch)](
        *(q, keys, values, lengths, ancestors, parts, lse),
        *(nodes, slots, rows, heads // kv_heads, splits, ancestors.shape[2], tiles),
        *(*q.stride()[:3], *keys.stride()[:3], *values.stride()[:3]),
        ROWS=form.rows,
        BLOCK=form.block,
        DIM=dim,
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_attend),
        num_warps=form.warps,
        num_stages=form.stages,
    )
    combine(parts, lse, lengths, ancestors, out, slots, form.block)
    return out


def bytes_moved(
    committed: Sequence[int], nodes: int, heads: int, kv_heads: int, dim: int, size: int, splits: int
) -> int:
    """Bytes that one layer reads and writes, for rows with so many committed slots. size: of an element, in bytes.

    Keys and values count once for each tile of rows. It is a little less where no row of a tile sees some tree slot.
    """
    rows, batch = nodes * heads // kv_heads, len(committed)
    form = shape_of(rows, {2: torch.bfloat16, 4: torch.float32}[size])
    tiles = blocks(rows, form.rows)
    filled = [filled_splits(length, splits, form.block) for length in committed]
    cache = 2 * sum(length + nodes for length in committed) * kv_heads * tiles * dim * size
    queries = sum(used + 1 for used in filled) * nodes * heads * dim * size
    partial = 2 * sum(used + 1 for used in filled) * nodes * heads * (dim + 1) * 4
    masks = 2 * batch * nodes * heads * blocks(nodes, WORD.value) * 8
    lengths = batch * kv_heads * ((splits + 1) * tiles + blocks(rows, rows_to_combine(rows))) * 8
    return cache + queries + partial + masks + lengths + batch * nodes * heads * dim * size


def _require(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ancestors: Tensor) -> None:
    require_device(_attend, q, keys, values, lengths, ancestors)
    require_shape("q", q, -1, -1, -1, -1)
    batch, nodes, heads, dim = q.shape
    require_shape("keys", keys, batch, -1, -1, dim)
    require_shape("values", values, *keys.shape)
    require_shape("lengths", lengths, batch)
    require_shape("ancestors", ancestors, batch, nodes, blocks(nodes, WORD.value))
    require_dtype("q", q, *FLOATS)
    require_dtype("keys", keys, q.dtype)
    require_dtype("values", values, q.dtype)
    require_dtype("lengths", lengths, torch.int64)
    require_dtype("ancestors", ancestors, torch.int64)
    if dim not in DIMS:
        raise NotApplicableError("a head dimension of 64 or 128", dim, "use the PyTorch reference")
    if heads == 0 or keys.shape[1] == 0 or heads % keys.shape[1]:
        came = f"{heads} query heads and {keys.shape[1]} key heads"
        raise InputError("query heads in a multiple of the key heads", came, "pass what belongs together")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        came = f"strides {keys.stride(-1)} and {values.stride(-1)}"
        raise NotApplicableError("keys and values whose last dimension is contiguous", came, "lay the cache out so")
    if max(keys.stride(2), values.stride(2)) * WORD.value >= 2**31:
        came = f"strides {keys.stride(2)} and {values.stride(2)}"
        raise NotApplicableError("slots less than 2^25 elements apart", came, "lay the cache out closer")


@triton.jit
def _product(a, b, acc, WIDEN: tl.constexpr):
    """a b + acc in float32. WIDEN: Triton's interpreter would multiply the bits of bfloat16, taken for integers."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _absorb(acc, peak, total, q, k, v, seen, MASKED: tl.constexpr, WIDEN: tl.constexpr):
    """One more block of keys and values into the running softmax (base 2) of each row.

    acc: [ROWS, DIM], of weight `total` [ROWS] below 2^peak. Where a row has seen nothing yet peak is -inf, and 0 takes
    its place in the exponents: -inf - -inf would be NaN.
    """
    SCALE: tl.constexpr = q.shape[1] ** -0.5 * LOG2_E
    scores = _product(q, tl.trans(k), None, WIDEN)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * SCALE)
    against = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weight = tl.exp2(scores * SCALE - against[:, None])
    fade = tl.exp2(peak - against)
    acc = _product(weight.to(v.dtype), v, acc * fade[:, None], WIDEN)
    return acc, higher, total * fade + tl.sum(weight, 1)


@triton.jit
def _attend(
    q,
    keys,
    values,
    lengths,
    ancestors,
    parts,
    lse,
    nodes,
    slots,
    rows,
    group,
    splits,
    words,
    tiles,
    q_batch_stride,
    q_node_stride,
    q_head_stride,
    k_batch_stride,
    k_head_stride,
    k_slot_stride,
    v_batch_stride,
    v_head_stride,
    v_slot_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The softmax of one tile of rows over one split; tiles of the same keys are neighbours."""
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = length_of(lengths, batch, slots)
    chunk = chunk_of(length, splits, BLOCK)
    in_tree = split == splits
    begin = tl.where(in_tree, length, split * chunk)
    end = tl.where(in_tree, tl.minimum(length + nodes, slots), tl.minimum(begin + chunk, length))
    if (begin >= end) & (split < splits):
        return
    full = tl.where(in_tree, begin, begin + (end - begin) // BLOCK * BLOCK)

    row = tile * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    slot = tl.arange(0, BLOCK)
    inside = row < rows
    node = row // group
    queries = q + batch * q_batch_stride + node.to(tl.int64) * q_node_stride
    queries += (head * group + row % group).to(tl.int64) * q_head_stride
    x = tl.load(queries[:, None] + dim, mask=inside[:, None], other=0.0)
    masks = ancestors + (batch * nodes + node) * words
    keys += batch * k_batch_stride + head.to(tl.int64) * k_head_stride + begin.to(tl.int64) * k_slot_stride
    values += batch * v_batch_stride + head.to(tl.int64) * v_head_stride + begin.to(tl.int64) * v_slot_stride
    k_block = slot[:, None] * k_slot_stride + dim
    v_block = slot[:, None] * v_slot_stride + dim

    acc = tl.full([ROWS, DIM], 0.0, dtype=tl.float32)
    total = tl.full([ROWS], 0.0, dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for _ in range(begin, full, BLOCK):
        k, v = tl.load(keys + k_block), tl.load(values + v_block)
        acc, peak, total = _absorb(acc, peak, total, x, k, v, True, False, WIDEN)
        keys += BLOCK * k_slot_stride
        values += BLOCK * v_slot_stride
    for start in range(full, end, BLOCK):
        # The end of the committed slots, which all see, or a block of the tree.
        first = start - full
        word = tl.load(masks + first // WORD, mask=inside & in_tree, other=0)
        word = tl.where(in_tree, word, -1)
        seen = ((word[:, None] >> (first % WORD + slot)) & 1 == 1) & (start + slot < end)
        # Nobody sees the slot of a node that was dropped, or one behind the end: it may hold NaN, and 0 * NaN is NaN.
        needed = tl.max(seen.to(tl.int32), 0) == 1
        k = tl.load(keys + k_block, mask=needed[:, None], other=0.0)
        v = tl.load(values + v_block, mask=needed[:, None], other=0.0)
        acc, peak, total = _absorb(acc, peak, total, x, k, v, seen, True, WIDEN)
        keys += BLOCK * k_slot_stride
        values += BLOCK * v_slot_stride

    place = ((batch * tl.num_programs(1) + head) * (splits + 1) + split) * rows + row
    total = tl.where(total == 0, 1.0, total)
    tl.store(parts + place[:, None] * DIM + dim, acc / total[:, None], mask=inside[:, None])
    tl.store(lse + place, peak + tl.log2(total), mask=inside)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: few rows, and a tile of wgmma; where full, all tiles, dtypes, dimensions."""
    dtypes = {"bf16": torch.bfloat16}
    if full:
        dtypes |= {"fp16": torch.float16, "fp32": torch.float32}
    for name, dtype in dtypes.items():
        for dim in DIMS if full else (128,):
            for rows in (1, 16, 32, 64, 128) if full else (16, 64):
                if rows <= 16 or dtype != torch.float32:
                    yield _attend_variant(name, shape_of(rows, dtype), rows, dim)


def _attend_variant(name: str, form: Shape, rows: int, dim: int) -> Variant:
    constants = {"tiles": 1, "ROWS": form.rows, "BLOCK": form.block, "DIM": dim, "WIDEN": False}
    if rows == 1:  # Triton makes a constant of every argument that is 1
        constants |= dict.fromkeys(("nodes", "rows", "group", "splits", "words"), 1)
    registers = {16: 192, 32: 224}.get(form.rows, 255)
    title = f"tree_attention rows={rows} D={dim} {name}"
    strides = [argument for argument in _attend.arg_names if argument.endswith("_stride")]
    types = dict.fromkeys(("q", "keys", "values"), f"*{name}") | dict.fromkeys(("lengths", "ancestors"), "*i64")
    types |= dict.fromkeys(("parts", "lse"), "*fp32") | dict.fromkeys(strides, "i32:16")
    types |= dict.fromkeys(("nodes", "slots", "rows", "group", "splits", "words"), "i32")
    return Variant(title, _attend, types, constants, form.warps, form.stages, registers, dot=form.rows >= 64)
