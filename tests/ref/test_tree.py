"""The draft tree: what follows from its parents, and what it refuses to be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specdecode_ref.errors import InputError
from specdecode_ref.tree import DraftTree, ancestor_mask, ancestors, children, depths

PARENTS = (-1, 0, 0, 1, 1, 3, 2)
LAW = torch.full((4,), 0.25)


def random_parents(rng: random.Random, size: int) -> tuple[int, ...]:
    return (-1, *(rng.randrange(i) for i in range(1, size)))


def test_what_follows_from_the_parents() -> None:
    assert depths(PARENTS) == (0, 1, 1, 2, 2, 3, 2)
    assert children(PARENTS) == ((1, 2), (3, 4), (6,), (5,), (), (), ())
    assert ancestors(PARENTS, 5) == (0, 1, 3, 5)
    assert ancestors(PARENTS, 0) == (0,)
    assert depths((-1, -1, 0)) == (0, 0, 1), "appended later, several nodes may hang on the committed text"


@pytest.mark.parametrize("size", [1, 2, 3, 17, 63])
def test_a_node_sees_its_ancestors_and_itself(size: int) -> None:
    rng = random.Random(size)
    for _ in range(10):
        parents = random_parents(rng, size)
        mask = ancestor_mask(parents)
        for node in range(size):
            path = ancestors(parents, node)
            assert mask[node].nonzero()[:, 0].tolist() == sorted(path)
            assert depths(parents)[node] == len(path) - 1
            assert all(parents[child] == node for child in children(parents)[node])


def test_a_chain() -> None:
    chain = DraftTree.chain(9, (4, 5), (LAW, LAW))
    assert chain.tokens == (9, 4, 5) and chain.parents == (-1, 0, 1)
    assert chain.draws == (None, "with_replacement", "with_replacement")
    assert chain.q[2] is None and chain.depth == 2 and chain.is_chain and len(chain) == 3
    assert chain.history(0) == () and chain.history(2) == (4, 5)
    assert DraftTree.chain(9, (4, 5)).draws[1:] == ("deterministic", "deterministic")


def test_a_bare_tree_is_an_empty_chain() -> None:
    bare = DraftTree.bare(3)
    assert bare == DraftTree.chain(3, ())
    assert bare.depth == 0 and bare.is_chain and bare.children == ((),)


def test_branches_make_a_tree() -> None:
    tree = DraftTree((0,) * 7, PARENTS, (None, *["deterministic"] * 6), (None,) * 7)
    assert not tree.is_chain and tree.depth == 3
    assert tree.children == children(PARENTS) and tree.depths == depths(PARENTS)


@pytest.mark.parametrize(
    "wrong",
    [
        ((), (), (), ()),
        ((1, 2), (-1,), (None, "deterministic"), (None, None)),
        ((1, 2), (-1, 0), (None,), (None, None)),
        ((1, 2), (-1, 0), (None, "deterministic"), (None,)),
        ((1, 2), (0, 0), (None, "deterministic"), (None, None)),
        ((1, 2), (-1, -1), (None, "deterministic"), (None, None)),
        ((1, 2), (-1, 1), (None, "deterministic"), (None, None)),
        ((1, 2, 3), (-1, 2, 0), (None, "deterministic", "deterministic"), (None, None, None)),
        ((1, 2), (-1, 0), (None, "with_replacement"), (None, None)),
        ((1, 2), (-1, 0), (None, "without_replacement"), (None, LAW)),
        ((1, -1), (-1, 0), (None, "deterministic"), (None, None)),
    ],
    ids=[
        *("empty", "parents short", "draws short", "q short", "root with a parent", "two roots", "own parent"),
        *("child first", "no law", "law at the wrong node", "placeholder token"),
    ],
)
def test_a_tree_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError):
        DraftTree(*wrong)
