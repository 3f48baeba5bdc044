"""The commit of a batch: accepted paths move to the front of the pending slots, in every plane, in one launch.

Row b of a plane holds lengths[b] committed slots and behind them its pending nodes. The j-th node of the accepted path
moves from slot lengths[b] + path[b, j] to lengths[b] + j. Paths ascend, so path[j] >= j: a tile of slots is loaded
whole, a barrier, then it is stored, and no tile writes what a later one still has to read. A node that stands in its
place already (path[j] = j, all of a chain's) is neither read nor written.

           plane 0            plane 1    ...      table [P] of addresses
      +-----------------+   +---------
    H | SLOTS x D, x H' |   |                     grid (P, H / H', B): a program moves one path in H' heads of a plane,
      |  of one program |   |                     SLOTS of its nodes at a time
      +-----------------+   +---------

The planes (32 layers of keys and values are 64 tensors) are reached by a table of their addresses in global memory.
What comes from a table is a bare number: `tl.multiple_of` says that it is a multiple of 16, as the host has checked,
or every load would be 16 bits wide. Elements are moved as integers, so that a NaN keeps its bits.

Bytes: with M the nodes that move, over all rows, 2 M P H D b for elements of b bytes; beside that, each of the
P B ceil(H / H') programs reads an address, its length and count, and its path: 24 + 8 count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.launch import blocks, interpreted, require_device, require_dtype, require_shape
from specdecode_kernels.variant import Variant
from specdecode_ref.errors import InputError, NotApplicableError

TILE = 16 * 1024
"""Bytes a program holds: 128 a thread."""

SLOTS = 8
"""Nodes of a path that move together; few rounds accept more."""

WIDEST = 16
"""Bytes of the widest load, and what addresses and strides should be multiples of."""

_tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def commit(planes: Sequence[Tensor], lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """Move accepted paths to the front of the pending slots, in place; then add `count` to `lengths`.

    planes:  of one shape [B, H, S, D] and the same strides, the last 1; elements of 2 or 4 bytes.
    lengths: int64 [B]. path: int64 [B, N], ascending nodes, as in `Verdicts`. count: int64 [B], how many of them count.

    The first call for a set of planes copies a table of their addresses to the device, so let it happen before a CUDA
    graph is captured. Raises InputError for other shapes, NotApplicableError for other strides or dtypes.
    """
    first = _require(planes, lengths, path, count)
    batch, heads, slots, dim = first.shape
    if path.stride(1) != 1:
        path = path.contiguous()
    if first.numel() and path.numel():
        constants = _constants(heads, dim, first.element_size(), _aligned(planes))
        _commit[(len(planes), blocks(heads, constants["HEADS"]), batch)](
            _table(planes),
            lengths,
            path,
            count,
            path.shape[1],
            heads,
            slots,
            *(stride // constants["UNIT"] for stride in first.stride()[:3]),
            path.stride(0),
            lengths.stride(0),
            count.stride(0),
            **constants,
            num_warps=4,
        )
    # A launch of its own: all programs of a row must have seen the old length, and they run in no order.
    lengths += count


def bytes_moved(planes: int, heads: int, dim: int, size: int, moved: int, counts: Sequence[int]) -> int:
    """Bytes that the launch reads and writes, the addition to `lengths` left out.

    moved:  nodes that change place, over all rows.
    counts: how many nodes of each row's path count; size: bytes of an element.
    """
    programs = planes * blocks(heads, _constants(heads, dim, size, True)["HEADS"])
    return 2 * moved * planes * heads * dim * size + programs * sum(24 + 8 * count for count in counts)


def _require(planes: Sequence[Tensor], lengths: Tensor, path: Tensor, count: Tensor) -> Tensor:
    if not planes:
        raise InputError("at least one plane", "none", "pass the keys and values of every layer")
    first = planes[0]
    require_shape("planes", first, -1, -1, -1, -1)
    batch = first.shape[0]
    require_shape("lengths", lengths, batch)
    require_shape("path", path, batch, -1)
    require_shape("count", count, batch)
    for name, tensor in (("lengths", lengths), ("path", path), ("count", count)):
        require_dtype(name, tensor, torch.int64)
    require_device(_commit, *planes, lengths, path, count)
    if first.is_cuda and interpreted(_commit):
        do = "unset TRITON_INTERPRET, or move the planes to the CPU"
        raise NotApplicableError("planes on the CPU for Triton's interpreter", f"'{first.device}'", do)
    if first.element_size() not in (2, 4):
        came = str(first.dtype).removeprefix("torch.")
        raise NotApplicableError("planes with elements of 2 or 4 bytes", came, "use the PyTorch reference")
    if first.stride(3) != 1 and first.shape[3] > 1:
        raise NotApplicableError("planes whose last stride is 1", first.stride(), "use the PyTorch reference")
    for plane in planes:
        same = (plane.shape, plane.stride(), plane.dtype) == (first.shape, first.stride(), first.dtype)
        if not same:
            came = f"{list(plane.shape)}, {plane.stride()}, {plane.dtype}"
            raise NotApplicableError("planes of one shape, dtype and stride", came, "commit them in separate calls")
    return first


def _aligned(planes: Sequence[Tensor]) -> bool:
    """Every head of every slot begins at a multiple of 16 bytes."""
    steps = [stride * planes[0].element_size() for stride in planes[0].stride()[:3]]
    return all(n % WIDEST == 0 for n in (*steps, *(plane.data_ptr() for plane in planes)))


def _table(planes: Sequence[Tensor]) -> Tensor:
    """The planes' addresses on their device, int64 [P], copied there once.

    It cannot be stale: the addresses are the key, and a table says nothing else. It is never dropped, as a captured
    graph may go on reading it; a set of planes costs 8 P bytes.
    """
    key = planes[0].device, tuple(plane.data_ptr() for plane in planes)
    if key not in _tables:
        if len(set(key[1])) < len(planes):
            raise InputError("planes that are different tensors", "one plane twice", "pass each once")
        _tables[key] = torch.tensor(key[1], dtype=torch.int64, device=key[0])
    return _tables[key]


def _constants(heads: int, dim: int, size: int, aligned: bool) -> dict[str, int]:
    wide = triton.next_power_of_2(dim)
    rows = max(1, TILE // (wide * size * SLOTS))
    heads = min(triton.next_power_of_2(heads), rows)
    return {
        "SIZE": size,
        "DIM": dim,
        "WIDE": wide,
        "HEADS": heads,
        "SLOTS": SLOTS,
        "UNIT": WIDEST // size if aligned else 1,
    }


@triton.jit
def _commit(
    table,
    lengths,
    path,
    count,
    nodes,
    heads,
    slots,
    row_step,
    head_step,
    slot_step,
    path_stride,
    length_stride,
    count_stride,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Grid (planes, blocks of heads, rows)."""
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row * length_stride)
    kept = tl.minimum(tl.maximum(tl.load(count + row * count_stride), 0), nodes).to(tl.int32)
    plane = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.int16 if SIZE == 2 else tl.int32))
    if UNIT * SIZE == 16:
        plane = tl.multiple_of(plane, 16)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None, None]
    column = tl.arange(0, WIDE)[None, None, :]
    base = plane + (row * row_step + head.to(tl.int64) * head_step) * UNIT + column
    inside = (head < heads) & (column < DIM)

    for start in range(0, kept, SLOTS):
        index = start + tl.arange(0, SLOTS)
        node = tl.load(path + row * path_stride + index, mask=index < kept, other=-1)
        # A node that would come from or go to somewhere outside the plane stays where it is. Nor may a sum overflow.
        moves = ((length >= 0) & (node > index) & (node < slots - length))[None, :, None] & inside
        source, target = (length + node)[None, :, None], (length + index)[None, :, None]
        tile = tl.load(base + source * slot_step * UNIT, mask=moves)
        tl.debug_barrier()
        tl.store(base + target * slot_step * UNIT, tile, mask=moves)


def variants(full: bool) -> Iterator[Variant]:
    """The forms to compile ahead of time: 8 heads of 128 in bf16; where full, float32, 64 wide and odd."""
    types = {"table": "*i64"} | dict.fromkeys(("lengths", "path", "count"), "*i64")
    types |= dict.fromkeys(("nodes", "heads", "slots", "row_step", "head_step", "slot_step"), "i32")
    types |= dict.fromkeys(("path_stride", "length_stride", "count_stride"), "i32")
    shapes = [(8, 128, 2, True)]
    if full:
        shapes += [(8, 128, 4, True), (3, 64, 2, True), (2, 80, 2, True), (2, 5, 2, False)]
    for heads, dim, size, aligned in shapes:
        name = f"commit H={heads} D={dim} of {size} bytes{'' if aligned else ', unaligned'}"
        yield Variant(name, _commit, types, _constants(heads, dim, size, aligned), registers=128, wide=aligned)
