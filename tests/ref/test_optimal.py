"""Optimal trees: nothing beats them, by brute force and by Sequoia's dynamic programme written out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from specdecode_ref.drafters.optimal import expected, optimal
from specdecode_ref.drafters.shapes import NAMED, Static
from specdecode_ref.errors import InputError

Table = list[list[float]]


def falling(rng: random.Random, depth: int, ranks: int) -> Table:
    """Chances that fall with rank and sum to at most 1, with a tie and a zero now and then."""
    table = []
    for _ in range(depth):
        row = sorted((rng.choice([rng.random(), 0.5, 0.0]) for _ in range(rng.randint(1, ranks))), reverse=True)
        table.append([chance / max(1.0, sum(row)) for chance in row])
    return table


def trees(acceptance: Table, nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of so many nodes that fits, grown by a node at a time."""
    found: set[frozenset[tuple[int, ...]]] = {frozenset([()])}
    for _ in range(nodes):
        found = {tree | {place} for tree in found for place in places(acceptance, tree)}
    return {tree - {()} for tree in found}


def places(acceptance: Table, tree: frozenset[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    for parent in tree:
        if len(parent) < len(acceptance):
            rank = sum(node[:-1] == parent for node in tree if node)
            if rank < len(acceptance[len(parent)]):
                yield (*parent, rank)


def value(acceptance: Table, path: tuple[int, ...]) -> float:
    chance = 1.0
    for depth, rank in enumerate(path):
        chance *= acceptance[depth][rank]
    return chance


@pytest.mark.parametrize("seed", range(25))
def test_no_tree_of_that_size_accepts_more(seed: int) -> None:
    rng = random.Random(seed)
    acceptance = falling(rng, rng.randint(1, 4), 3)
    for nodes in range(1, 7):
        best = optimal(acceptance, nodes)
        everything = trees(acceptance, nodes)
        if not everything:
            assert best.nodes < nodes and set(best.paths) == max(trees(acceptance, best.nodes), key=len)
            continue
        most = max(sum(value(acceptance, path) for path in tree) for tree in everything)
        assert best.nodes == nodes
        assert expected(acceptance, best) == pytest.approx(most, abs=1e-12)


def sequoia(acceptance: Table, nodes: int) -> float:
    """The dynamic programme: most accepted by a subtree of m nodes, its own root included, with a root at a depth."""

    @cache
    def subtree(m: int, depth: int) -> float:
        return 1 + siblings(m - 1, depth, 0)

    @cache
    def siblings(m: int, depth: int, rank: int) -> float:
        """m nodes below a root at that depth, under its children of that rank and later."""
        if m == 0:
            return 0.0
        if depth >= len(acceptance) or rank >= len(acceptance[depth]):
            return float("-inf")
        return max(
            acceptance[depth][rank] * subtree(first, depth + 1) + siblings(m - first, depth, rank + 1)
            for first in range(1, m + 1)
        )

    return siblings(nodes, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_the_dynamic_programme_finds(seed: int) -> None:
    acceptance = [[chance / 2 ** (depth / 2) for chance in (0.55, 0.2, 0.1, 0.04)] for depth in range(6)]
    rng = random.Random(seed)
    acceptance = [sorted((chance * rng.random() for chance in row), reverse=True) for row in acceptance]
    for nodes in (1, 5, 12, 24, 40):
        assert expected(acceptance, optimal(acceptance, nodes)) == pytest.approx(sequoia(acceptance, nodes), abs=1e-12)


def test_a_chance_that_rises_with_rank_still_gives_a_tree() -> None:
    best = optimal([[0.2, 0.7], [0.5]], 3)
    assert best == Static(((0,), (1,), (0, 0)))
    assert expected([[0.2, 0.7], [0.5]], best) == pytest.approx(0.2 + 0.7 + 0.1), "counted with the chances as measured"


def test_of_equals_the_shallowest() -> None:
    assert optimal([[0.0, 0.0], [0.0, 0.0]], 2) == Static(((0,), (1,)))
    assert optimal([[1.0, 1.0], [1.0]], 3) == Static(((0,), (1,), (0, 0)))


def test_places_that_were_not_measured_add_nothing() -> None:
    assert expected([[0.5, 0.25]], Static(((0,), (1,), (2,), (0, 0)))) == pytest.approx(0.75)


@pytest.mark.parametrize("name", NAMED)
def test_the_trees_with_a_name_are_the_best_for_heads_like_medusas(name: str) -> None:
    acceptance = [[top / (rank + 1) ** 2 for rank in range(10)] for top in (0.60, 0.50, 0.42, 0.35)]
    sizes = {"narrow": 5, "middle": 10, "wide": 20, "medusa": 63}
    assert Static(NAMED[name]) == optimal(acceptance, sizes[name])


@pytest.mark.parametrize("acceptance", [[], [[]], [[0.5], []], [[1.1]], [[-0.1]], [[float("nan")]]], ids=str)
def test_chances_that_are_none_are_refused(acceptance: Table) -> None:
    with pytest.raises(InputError, match=r"expected .*; got .*; "):
        optimal(acceptance, 3)
    with pytest.raises(InputError, match="1 node or more"):
        optimal([[0.5]], 0)
