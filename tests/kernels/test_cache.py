"""A kernel's commit leaves every bit of every plane as the reference's does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from specdecode_kernels import cache as kernels
from torch import Tensor

from specdecode_ref.batched import cache as reference
from specdecode_ref.errors import InputError, NotApplicableError

BITS = {2: torch.int16, 4: torch.int32}


def random_planes(batch: int, layers: int, heads: int, slots: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Keys and values of all layers in one tensor [B, layers, 2, H, S, D] of random bits, NaNs among them."""
    big = torch.empty(batch, layers, 2, heads, slots, dim, dtype=dtype)
    bits = big.view(BITS[dtype.itemsize])
    bits.random_(-(2**15), 2**15)
    return big


def views(big: Tensor) -> list[Tensor]:
    """Its planes [B, H, S, D]."""
    return [big[:, layer, part] for layer in range(big.shape[1]) for part in (0, 1)]


def random_paths(rng: random.Random, batch: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Ragged ascending paths [B, N] from the root, -1 behind them, and their lengths; a third of them chains."""
    path, count = torch.full((batch, nodes), -1), torch.zeros(batch, dtype=torch.int64)
    for b in range(batch):
        kept = rng.randint(0, nodes)
        taken = range(kept) if rng.random() < 0.3 else sorted({0, *rng.sample(range(nodes), kept)})
        count[b] = len(taken)
        path[b, : len(taken)] = torch.tensor(list(taken), dtype=torch.int64)
    return path, count


def compare(big: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """The same commit on a copy, by the reference: the same bits everywhere."""
    other, before = big.clone(), lengths.clone()
    reference.commit(views(other), before, path, count)
    kernels.commit(views(big), lengths, path, count)
    assert torch.equal(lengths, before)
    bits = BITS[big.element_size()]
    assert torch.equal(big.view(bits), other.view(bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "dim", "nodes"), [(3, 16, 6), (1, 5, 1), (2, 80, 21), (5, 130, 9)])
def test_ragged_paths(dtype: torch.dtype, heads: int, dim: int, nodes: int) -> None:
    """Aligned and not, paths of several tiles, heads of several programs."""
    rng = random.Random(nodes)
    big = random_planes(3, 1, heads, 40, dim, dtype)
    compare(big, torch.tensor([0, 19, 7]), *random_paths(rng, 3, nodes))


def test_a_hundred_rounds_do_not_drift() -> None:
    rng = random.Random(1)
    big, lengths = random_planes(1, 1, 2, 320, 3, torch.bfloat16), torch.tensor([3])
    other, before = big.clone(), lengths.clone()
    for _ in range(100):
        path, count = random_paths(rng, 1, 4)
        kernels.commit(views(big), lengths, path, count)
        reference.commit(views(other), before, path, count)
    assert lengths > 100 and torch.equal(lengths, before)
    assert torch.equal(big.view(torch.int16), other.view(torch.int16))


def test_strided_paths_and_lengths() -> None:
    wide = torch.tensor([[0, 9, 2, 9, 5], [0, 9, 1, 9, 3]])
    both = torch.tensor([[4, 3], [6, 2]])
    big = random_planes(2, 1, 2, 20, 8, torch.float32)
    compare(big, both[:, 0], wide[:, ::2], both[:, 1])
    assert both[:, 0].tolist() == [7, 8]
    compare(big, both[:, 0], wide.T.contiguous().T[:, ::2], both[:, 1])
    compare(random_planes(2, 1, 2, 20, 8, torch.float32), torch.tensor([0, 0]), wide[:, 2:4], torch.tensor([1, 1]))


def test_a_path_of_several_tiles() -> None:
    """Every second node of 33: each tile reads what lies beyond all that was written."""
    path = torch.arange(0, 34, 2)[None]
    compare(random_planes(1, 1, 2, 40, 8, torch.bfloat16), torch.tensor([3]), path, torch.tensor([17]))


def test_an_address_that_comes_back_is_no_stale_table() -> None:
    """Planes are freed and others take their place, now and then at the same addresses; each is committed rightly."""
    before = len(kernels._tables)
    for seed in range(6):
        torch.manual_seed(seed)
        big = random_planes(1, 1, 1, 6, 8 if seed % 2 else 4, torch.float32)
        compare(big, torch.tensor([1]), torch.tensor([[0, 2, 4]]), torch.tensor([3]))
        compare(big, torch.tensor([0]), torch.tensor([[0, 3]]), torch.tensor([2]))
        del big
    assert before < len(kernels._tables) <= before + 6


@pytest.mark.parametrize(("rows", "apart"), [(2, 2**31), (3, 2**30 + 1)])
def test_offsets_beyond_31_bits(rows: int, apart: int) -> None:
    """Rows far apart, aligned and not, in memory that is never touched between them."""
    flat = torch.empty((rows - 1) * apart + 32, dtype=torch.bfloat16)
    plane = flat.as_strided((rows, 1, 4, 8), (apart, 32, 8, 1))
    plane.copy_(torch.arange(32.0 * rows).reshape(rows, 1, 4, 8))
    lengths, path = torch.zeros(rows, dtype=torch.int64), torch.tensor([[0, 3]]).expand(rows, 2)
    kernels.commit([plane], lengths, path, torch.full((rows,), 2))
    assert plane[:, 0, :, 0].tolist() == [[n, n + 24, n + 16, n + 24] for n in range(0, 32 * rows, 32)]
    assert lengths.tolist() == [2] * rows


NOTHING = {
    "a node that is none": (1, [0, -1], 2),
    "a node before its place": (1, [0, 0], 2),
    "far beyond the slots": (3, [0, 2**40], 2),
    "one slot too far": (2, [0, 2], 2),
    "before the first slot": (-5, [0, 6], 2),
    "far before it": (-(2**63), [0, 2**62], 2),
    "a sum that overflows": (2**63 - 1, [0, 1, 2**62], 3),
    "a count that is none": (0, [0, 3], -(2**32) + 2),
}
"""Lengths, paths and counts of an engine with a bug, in planes of four slots."""


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", NOTHING)
def test_what_is_no_path_moves_nothing(name: str) -> None:
    """Not in the planes, and not in the memory before and behind them."""
    length, path, count = NOTHING[name]
    around = random_planes(3, 1, 1, 4, 8, torch.float32)
    before = around.clone()
    kernels.commit(views(around[1:2]), torch.tensor([length]), torch.tensor([path]), torch.tensor([count]))
    assert torch.equal(around.view(torch.int32), before.view(torch.int32))


def test_of_a_path_out_of_order_what_goes_forward_is_moved() -> None:
    """A count beyond the path ends with it."""
    planes = torch.arange(48.0).reshape(1, 1, 6, 8)
    lengths = torch.tensor([1])
    kernels.commit([planes], lengths, torch.tensor([[0, 4, 1, 2]]), torch.tensor([4]))
    assert planes[0, 0, :, 0].tolist() == [0, 8, 40, 24, 32, 40]
    kernels.commit([planes], torch.tensor([2]), torch.tensor([[0, 3]]), torch.tensor([99]))
    assert planes[0, 0, :, 0].tolist() == [0, 8, 40, 40, 32, 40]


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8), (2, 2, 4, 0)])
def test_planes_of_nothing(shape: tuple[int, ...]) -> None:
    lengths, path = torch.zeros(shape[0], dtype=torch.int64), torch.zeros(shape[0], 3, dtype=torch.int64)
    kernels.commit([torch.empty(shape)], lengths, path, torch.full_like(lengths, 2))
    kernels.commit([torch.empty(shape)], lengths, path[:, :0], torch.ones_like(lengths))
    assert lengths.tolist() == [3] * shape[0]


def test_bytes(traffic: Any) -> None:
    """What moves is read and written once; a chain moves nothing."""
    big = random_planes(3, 2, 5, 40, 130, torch.float32)
    path = torch.tensor([[0, 1, 2, 3], [0, 2, 3, -1], [0, 1, 3, -1]])
    count = torch.tensor([4, 3, 3])
    with traffic(planes=views(big), path=path) as moved:
        kernels.commit(views(big), torch.tensor([0, 19, 7]), path, count)
    moves = 0 + 2 + 1
    assert moved.loaded["planes"] == moved.stored["planes"] == moves * 4 * 5 * 130 * 4
    assert moved.stored["rest"] == moved.stored["path"] == 0
    assert moved.bytes == kernels.bytes_moved(4, 5, 130, 4, moves, count.tolist())


def test_what_it_refuses() -> None:
    lengths, path, count = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1).long()
    plane = torch.zeros(1, 2, 4, 8)
    for planes in ([], [plane, plane]):
        with pytest.raises(InputError):
            kernels.commit(planes, lengths, path, count)
    padded = torch.zeros(1, 2, 5, 8)[:, :, :4]
    for planes in (
        *([plane.double()], [plane.byte()], [plane.mT]),
        *([plane, plane[:, :, :, :4]], [plane, plane.half()], [plane, padded]),
    ):
        with pytest.raises(NotApplicableError) as caught:
            kernels.commit(planes, lengths, path, count)
        assert "\n" not in str(caught.value)
    with pytest.raises(NotApplicableError, match="count of dtype int64"):
        kernels.commit([plane], lengths, path, count.int())
    with pytest.raises(InputError, match="path of shape"):
        kernels.commit([plane], lengths, path[0], count)
    assert lengths.item() == 0
