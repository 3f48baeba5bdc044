"""The topology a kernel builds is the reference's: of all small trees, of odd and wide ones, and of broken ones."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from specdecode_kernels import tree as kernels
from torch import Tensor

from specdecode_ref.batched import tree as reference
from specdecode_ref.errors import InputError, NotApplicableError

pytestmark = pytest.mark.usefixtures("poisoned")


def compare(parents: Tensor) -> None:
    """Every field, exactly."""
    out, expected = kernels.topology(parents), reference.topology(parents)
    for name, column in expected._asdict().items():
        got = getattr(out, name)
        assert got.dtype == column.dtype and got.shape == column.shape
        rows = (got != column).reshape(len(parents), -1).any(1).nonzero()[:, 0].tolist()
        assert not rows, (name, parents[rows[0]], got[rows[0]], column[rows[0]])


def random_parents(rng: random.Random, nodes: int, broken: float = 0.0) -> list[int]:
    """A tree of any shape, from chains to stars, with gaps; now and then a parent that cannot be one."""
    reach = rng.choice([1, 2, 5, nodes])
    row = [-1]
    for node in range(1, nodes):
        parent = rng.randrange(max(0, node - reach), node)
        if rng.random() < broken:
            parent = rng.choice([-1, -2, node, node + 1, nodes, 2**40, -(2**40), 2**32, rng.randrange(nodes)])
        row.append(parent)
    return row


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_all_small_trees(nodes: int) -> None:
    """Every choice of parents, possible or not, and a root that names a parent."""
    choices = [-2, -1, *range(nodes + 1)] if nodes < 5 else range(-1, nodes)
    compare(torch.tensor([[0 if len(below) % 2 else -1, *below] for below in product(choices, repeat=nodes - 1)]))


@pytest.mark.parametrize("nodes", [7, 8, 9, 31, 33, 63, 64, 65, 130])
def test_wider_trees(nodes: int) -> None:
    rng = random.Random(nodes)
    count = 24 if nodes < 31 else 8 if nodes < 65 else 4
    compare(torch.tensor([random_parents(rng, nodes, rng.choice([0.0, 0.0, 0.05, 0.3])) for _ in range(count)]))


def test_chains_and_stars_across_words() -> None:
    """The deepest tree needs every round of every word; in the broken chain, all that hangs below is dropped."""
    nodes = 131
    chain = torch.arange(-1, nodes - 1)
    star = torch.zeros(nodes, dtype=torch.int64)
    comb = torch.arange(nodes) // 2 * 2 - 1  # a chain of the odd nodes, with a leaf beside each
    broken, gap, late = chain.clone(), chain.clone(), star.clone()
    broken[70], gap[128], late[66] = 70, -1, 67
    compare(torch.stack([chain, star, comb.clamp(min=-1), broken, gap, late]))


def test_a_tree_of_six_words() -> None:
    compare(torch.tensor([random_parents(random.Random(3), 330, 0.004)]))


def test_a_strided_batch() -> None:
    wide = torch.tensor([random_parents(random.Random(seed), 12) for seed in range(6)])
    compare(wide[::2, :9])
    compare(wide.T.contiguous().T)


@pytest.mark.parametrize(("batch", "nodes"), [(3, 5), (70, 8), (2, 64), (2, 65), (1, 200)])
def test_bytes_of_chains(traffic: Any, batch: int, nodes: int) -> None:
    parents = torch.arange(-1, nodes - 1).repeat(batch, 1)
    with traffic(parents=parents) as moved:
        out = kernels.topology(parents)
    moved.name(out=list(out))
    assert moved.bytes == kernels.bytes_moved(batch, nodes, inherited=batch * max(0, nodes - 64))
    assert moved.stored["out"] == sum(column.nbytes for column in out), "every place is written once"
    assert moved.stored["rest"] == moved.loaded["rest"] == 0


def test_what_it_refuses() -> None:
    with pytest.raises(NotApplicableError, match="at most 1024 nodes; got 1025"):
        kernels.topology(torch.full((1, 1025), -1))
    with pytest.raises(NotApplicableError, match="parents of dtype int64"):
        kernels.topology(torch.full((1, 3), -1, dtype=torch.int32))
    for shape in [(3,), (2, 0)]:
        with pytest.raises(InputError):
            kernels.topology(torch.full(shape, -1))
    assert kernels.topology(torch.empty(0, 5, dtype=torch.int64)).ancestors.shape == (0, 5, 1)
