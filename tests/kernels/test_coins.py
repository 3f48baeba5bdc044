"""The coins that a kernel draws are the reference's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from specdecode_kernels import coins as kernels

from specdecode_ref.batched import coins as reference
from specdecode_ref.errors import InputError, NotApplicableError

SEEDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 0x9E3779B97F4A7C15, 2**63, 2**64 - 1)
EDGES = torch.tensor([0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1])


@pytest.mark.parametrize("name", ["draft", "accept", "emits"])
def test_they_are_the_reference_s(name: str) -> None:
    """Every edge of a sequence number beside ordinary ones, words of the seed with and without their top bit."""
    base = torch.tensor([1, 0, 40_000, 2**31 - 1, 12, 5])
    for seed in SEEDS:
        for count in (1, 5):
            expected = getattr(reference, name)(seed, EDGES, base, count)
            assert torch.equal(getattr(kernels, name)(seed, EDGES, base, count), expected), (seed, count)


@pytest.mark.parametrize(("batch", "count"), [(1, 257), (70, 4), (3, 64), (0, 3), (3, 0)])
def test_sizes_that_do_not_fill_a_tile(batch: int, count: int) -> None:
    sequences, base = torch.arange(batch), torch.arange(batch) * 3
    drawn = kernels.accept(99, sequences, base, count)
    assert drawn.shape == (batch, count) and drawn.dtype == torch.float64
    assert torch.equal(drawn, reference.accept(99, sequences, base, count).reshape(batch, count))


def test_strided_keys() -> None:
    both = torch.tensor([[3, 10], [4, 20], [5, 30]])
    sequences, base = both[:, 0], both[:, 1]
    assert torch.equal(kernels.draft(7, sequences, base, 3), reference.draft(7, sequences, base, 3))
    same = torch.tensor([6]).expand(3)
    assert torch.equal(kernels.emits(7, sequences, same, 3), reference.emits(7, sequences, same, 3))


@triton.jit
def _one(out, node, seed_low, seed_high):
    tl.store(out, kernels.uniform(node, 5, 2, 1, seed_low, seed_high))


def test_another_kernel_can_draw_one_coin() -> None:
    out = torch.full((1,), torch.nan, dtype=torch.float64)
    _one[(1,)](out, 3, -1, 0x12345678)
    assert out == reference.accept(0x12345678FFFFFFFF, torch.tensor([2]), torch.tensor([5]), 4)[0, 3]


@pytest.mark.parametrize(("batch", "count"), [(70, 4), (3, 300)])
def test_bytes(traffic: Any, batch: int, count: int) -> None:
    sequences, base = torch.arange(batch), torch.arange(batch)
    with traffic(keys=[sequences, base]) as moved:
        drawn = kernels.draft(3, sequences, base, count)
    moved.name(drawn=drawn)
    assert moved.stored["drawn"] == drawn.nbytes
    assert moved.bytes == kernels.bytes_moved(batch, count)
    assert moved.loaded["rest"] == moved.stored["rest"] == 0


def test_what_it_refuses() -> None:
    one = torch.tensor([0])
    for seed in (-1, 2**64):
        with pytest.raises(InputError, match="seed"):
            kernels.draft(seed, one, one, 1)
    with pytest.raises(InputError, match="count"):
        kernels.draft(0, one, one, -1)
    with pytest.raises(InputError, match="sequences of shape"):
        kernels.draft(0, torch.tensor([0, 1]), one, 1)
    with pytest.raises(NotApplicableError, match="base of dtype int64"):
        kernels.draft(0, one, one.int(), 1)
