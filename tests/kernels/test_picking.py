"""The inverse CDF in levels, by itself: where a coin falls, and what is never picked."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from specdecode_kernels.picking import ROW, first_above, pick_in_block
from torch import Tensor

COINS = torch.tensor([0.0, 0.1, 0.5, 0.999, 1 - 2.0**-53], dtype=torch.float64)


@triton.jit
def _first(mass, coins, found, rests, SIZE: tl.constexpr):
    i = tl.program_id(0)
    index, rest = first_above(tl.load(mass + tl.arange(0, SIZE)), tl.load(coins + i), SIZE)
    tl.store(found + i, index.to(tl.int64))
    tl.store(rests + i, rest)


@triton.jit
def _block(mass, coins, found, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    index = pick_in_block(tl.load(mass + tl.arange(0, BLOCK)), tl.load(coins + i), BLOCK)
    tl.store(found + i, index.to(tl.int64))


def first(mass: Tensor) -> tuple[list[int], list[float]]:
    found, rests = torch.empty(len(COINS), dtype=torch.int64), torch.empty_like(COINS)
    _first[(len(COINS),)](mass, COINS, found, rests, SIZE=len(mass))
    return found.tolist(), rests.tolist()


def test_the_first_index_above_the_coin_and_what_is_left_of_it() -> None:
    found, rests = first(torch.tensor([0.0, 0.25, 0.25, 0.5], dtype=torch.float64))
    assert found == [1, 1, 3, 3, 3]
    assert rests == pytest.approx([0.0, 0.4, 0.0, 0.998, 1.0])
    assert all(0 <= rest < 1 for rest in rests)


def test_an_index_without_mass_is_never_found() -> None:
    assert first(torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64))[0] == [1] * 5
    assert first(torch.zeros(4, dtype=torch.float64))[0] == [4] * 5


def test_a_block_is_picked_from_as_its_cdf_says() -> None:
    mass = torch.rand(4 * ROW.value, generator=torch.Generator().manual_seed(1))
    mass[60:140] = 0.0  # the end of one row, all of the next, the start of a third
    found = torch.empty(len(COINS), dtype=torch.int64)
    _block[(len(COINS),)](mass, COINS, found, BLOCK=len(mass))
    above = mass.double().cumsum(0)
    assert found.tolist() == torch.searchsorted(above, COINS * above[-1], right=True).tolist()
