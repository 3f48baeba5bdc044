"""Growing trees: what becomes a node, against brute force; and that every kind of tree leaves the output law alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.growth import Grown, Hint, Sketch, Watched, Words, grow
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.shapes import Dynamic, Sampled, Shape, Static, chain, parse
from specdecode_ref.errors import NotApplicableError
from specdecode_ref.fidelity.laws import tv
from specdecode_ref.fidelity.loop import Setup, generated
from specdecode_ref.fidelity.setups import EXACT
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context

PLAIN = SamplingRule()
TEXT = (1, 0, 2)
Path = tuple[int, ...]


def static(text: str) -> Static:
    shape = parse(f"static:{text}")
    assert isinstance(shape, Static)
    return shape


class NoCoins:
    """Refuses: nothing may be drawn."""

    def draft(self, base: int, node: int) -> float:
        raise AssertionError("a coin was asked for")


class Asked:
    """An `After` out of a table, which checks how it is asked: once a level, the root first, parents' levels before."""

    def __init__(self, model: TableModel, words: Words | None = None) -> None:
        self.model, self.words = model, words
        self.levels: list[list[int]] = []
        self.depth: dict[int, int] = {}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Draft logits [D] by definition."""
        row = self.model.logits_after(tokens)
        return row[self.words.ids] if self.words else row

    def __call__(self, sketch: Sketch, level: Sequence[int]) -> Tensor:
        assert level and len(set(level)) == len(level)
        for node in level:
            parent = sketch.parents[node]
            assert (node == 0) == (parent < 0) == (not self.levels)
            self.depth[node] = 1 + self.depth[parent] if node else 0
            assert self.depth[node] == len(self.levels)
            assert node == 0 or parent in self.levels[-1], "a node whose parent was not opened"
        self.levels.append(list(level))
        return torch.stack([self.logits(sketch.history(node)) for node in level])


def grown(
    shape: Shape,
    model: TableModel,
    room: int = 99,
    words: Words | None = None,
    coins: Any = None,
    hint: Hint | None = None,
) -> tuple[Grown, Asked]:
    after = Asked(model, words)
    return grow(shape, Context(TEXT, 2, room), PLAIN, coins or cast(Coins, NoCoins()), after, words, hint), after


def texts(tree: DraftTree) -> list[Path]:
    """The drafted tokens on the path to every node."""
    return [tree.history(node) for node in range(len(tree))]


def eagle2(model: TableModel, shape: Dynamic, room: int = 99) -> dict[Path, float]:
    """EAGLE-2 by the book: expand the likeliest nodes level by level, then keep the likeliest of all; probabilities."""
    chance: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]

    def best() -> list[Path]:
        return sorted(set(chance) - {()}, key=lambda path: -chance[path])[: shape.nodes]

    for _ in range(min(shape.depth, room)):
        if sum(chance[path] for path in level if path in ((), *best())) < shape.reach:
            break
        children: dict[Path, float] = {}
        for path in level:
            probabilities = model.logits_after([*TEXT, *path]).softmax(-1).tolist()
            ranked = sorted(range(len(probabilities)), key=lambda x: -probabilities[x])
            children |= {(*path, x): chance[path] * probabilities[x] for x in ranked[: shape.width]}
        children = {path: p for path, p in children.items() if p >= shape.floor}
        chance |= children
        level = sorted(children, key=lambda path: -chance[path])[: shape.width]
    return {path: chance[path] for path in best()}


SIZES = ((1, 1, 1), (1, 3, 2), (3, 1, 9), (2, 2, 4), (4, 3, 7), (3, 9, 30))
"""(depth, width, nodes)"""


@pytest.mark.parametrize(
    "shape",
    [Dynamic(*sizes, *limits) for sizes, limits in product(SIZES, ((0.0, 0.0), (0.04, 0.0), (0.0, 0.5), (0.04, 0.8)))],
    ids=str,
)
def test_a_dynamic_tree_is_eagle_2(shape: Dynamic) -> None:
    for seed in range(12):
        model = TableModel.random(6, order=2, seed=seed)
        (tree, origin), after = grown(shape, model)
        expected = eagle2(model, shape)
        assert set(texts(tree)) == {(), *expected}
        assert len(after.levels) <= shape.depth and max(map(len, after.levels)) <= shape.width
        assert origin[0] == 0 and list(origin) == sorted(set(origin))
        assert all(draw == "deterministic" for draw in tree.draws[1:]) and all(q is None for q in tree.q)


def test_what_cannot_lead_to_a_place_in_the_tree_is_not_opened() -> None:
    for seed in range(12):
        _, after = grown(Dynamic(4, 3, 1), TableModel.random(6, order=2, seed=seed))
        assert list(map(len, after.levels)) == [1, 1], "the best guess, and that nothing below it is better"


def test_siblings_stand_in_the_order_of_their_ranks() -> None:
    shapes: tuple[Shape, ...] = (Dynamic(3, 4, 12), static("wide"))
    for shape, seed in product(shapes, range(8)):
        model = TableModel.random(7, order=2, seed=seed)
        (tree, _), _ = grown(shape, model)
        for node, children in enumerate(tree.children):
            ranked = model.logits_after([*TEXT, *tree.history(node)]).argsort(descending=True).tolist()
            assert [tree.tokens[child] for child in children] == ranked[: len(children)]


@pytest.mark.parametrize("text", ["0", "0.1.00.01.000", "0.00.1.01.10.2.000.001.20", "wide"])
def test_a_static_tree_has_its_places_and_each_holds_its_rank(text: str) -> None:
    shape, model = static(text), TableModel.random(8, order=2, seed=3)
    (tree, origin), after = grown(shape, model)
    expected: set[Path] = {()}
    for path in shape.paths:
        tokens: list[int] = []
        for rank in path:
            tokens.append(model.logits_after([*TEXT, *tokens]).argsort(descending=True).tolist()[rank])
        expected.add(tuple(tokens))
    assert set(texts(tree)) == expected and len(tree) == len(shape.paths) + 1
    assert origin == tuple(range(len(tree)))
    assert [len(level) for level in after.levels] == [
        len({path[:-1] for path in shape.paths if len(path) == depth + 1}) for depth in range(tree.depth)
    ]


@pytest.mark.parametrize("shape", [chain(3), Sampled((2, 2, 1)), static("0.1.00.000"), Dynamic(3, 2, 8)], ids=str)
@pytest.mark.parametrize("room", [-1, 0, 1, 2, 3, 4])
def test_a_tree_is_no_deeper_than_the_room(shape: Shape, room: int) -> None:
    (tree, _), after = grown(shape, TableModel.random(5, seed=1), room, coins=Coins(3))
    assert tree.depth == min(max(room, 0), 3) == len(after.levels)
    assert tree.tokens[0] == TEXT[-1]
    if isinstance(shape, Dynamic):
        assert set(texts(tree)) == {(), *eagle2(TableModel.random(5, seed=1), shape, room)}


def test_a_floor_takes_away_what_is_below_it_and_nothing_else() -> None:
    for seed in range(10):
        model = TableModel.random(6, order=2, scale=2.5, seed=seed)
        whole = eagle2(model, Dynamic(4, 3, 1000))
        for floor in (0.9, 0.3, 0.1, 0.02):
            (tree, _), after = grown(Dynamic(4, 3, 1000, floor), model)
            assert set(texts(tree)) == {(), *(path for path, chance in whole.items() if chance >= floor)}
            opened = sum(1 for path, chance in whole.items() if chance >= floor and len(path) < 4)
            assert sum(map(len, after.levels)) <= 1 + opened, "a node below the floor was opened"


def test_a_level_that_is_not_likely_to_be_reached_is_not_drafted() -> None:
    law = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log().expand(5, 4)
    for reach, levels in ((0.0, [1, 2, 2, 2]), (0.11, [1, 2, 2, 2]), (0.27, [1, 2, 2]), (0.29, [1, 2]), (0.71, [1])):
        _, after = grown(Dynamic(4, 2, 99, 0.0, reach), TableModel(law))
        assert list(map(len, after.levels)) == levels, "levels below the root are reached with 0.7, 0.28 and 0.112"


def test_below_every_floor_nothing_is_drafted() -> None:
    flat = TableModel(torch.zeros(6, 5, dtype=torch.float64))
    (tree, origin), after = grown(Dynamic(5, 3, 9, 0.21), flat)
    assert len(tree) == 1 and origin == (0,) and after.levels == [[0]]


def test_a_vocabulary_smaller_than_the_tree_is_wide() -> None:
    model = TableModel.random(3, order=2, seed=2)
    (tree, _), _ = grown(Dynamic(2, 9, 100), model)
    assert [len(children) for children in tree.children[:4]] == [3, 3, 3, 3]
    (tree, _), _ = grown(static("0.1.2.3.4.00.01.02.03.30.300.40"), model)
    assert [len(children) for children in tree.children[:4]] == [3, 3, 0, 0] and len(tree) == 7
    (tree, _), _ = grown(Sampled((5, 1)), model, coins=Coins(0))
    assert [len(children) for children in tree.children[:4]] == [3, 1, 1, 1]


def test_ties_and_certainty_still_give_a_tree() -> None:
    """Where a child is as likely as its parent, the parent is kept first; equal siblings are different tokens."""
    certain = torch.full((6, 5), -1e9, dtype=torch.float64)
    certain[torch.arange(6), torch.tensor([1, 2, 3, 4, 0, 0])] = 0.0
    (tree, _), _ = grown(Dynamic(6, 3, 4), TableModel(certain))
    assert tree.tokens == (2, 3, 4, 0, 1) and tree.is_chain
    flat = TableModel(torch.zeros(6, 5, dtype=torch.float64))
    for shape in (Dynamic(3, 3, 7), static("wide")):
        (tree, _), _ = grown(shape, flat)
        assert all(len({tree.tokens[c] for c in children}) == len(children) for children in tree.children)


IDS = torch.tensor([5, 2, 8])


@pytest.mark.parametrize("shape", [Dynamic(3, 2, 6), static("0.1.00.01.10"), Sampled((2, 1)), chain(3)], ids=str)
def test_a_reduced_vocabulary_speaks_the_targets_tokens(shape: Shape) -> None:
    model, words = TableModel.random(9, order=2, seed=4), Words(IDS, 9)
    (tree, _), after = grown(shape, model, words=words, coins=Coins(1) if isinstance(shape, Sampled) else None)
    assert set(tree.tokens[1:]) <= set(IDS.tolist()) and len(tree) > 3
    for node, children in enumerate(tree.children):
        if isinstance(shape, Sampled) and children:
            q = tree.q[node]
            assert q is not None and q.shape == (9,) and q.count_nonzero() == 3
            narrow = after.logits([*TEXT, *tree.history(node)])
            assert torch.allclose(q[IDS], narrow.softmax(-1), rtol=0, atol=1e-15)
        elif children:
            ranked = IDS[after.logits([*TEXT, *tree.history(node)]).argsort(descending=True)].tolist()
            assert [tree.tokens[child] for child in children] == ranked[: len(children)]


def test_words_widen_to_no_chance_at_all() -> None:
    row = Words(IDS, 9).widen(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert row.dtype == torch.float64 and row[IDS].tolist() == [1, 2, 3]
    assert row.softmax(-1).count_nonzero() == 3 and row.isneginf().sum() == 6


def test_a_watched_tree_tells_how_sure_the_draft_was() -> None:
    model = TableModel.random(6, order=2, seed=5)
    told: list[list[float]] = []
    (tree, _), after = grown(Watched(3, 2, 100, ranks=4, tell=told.append), model)
    (scores,) = told
    for node, path in enumerate(texts(tree)):
        chance = math.prod(float(model.logits_after([*TEXT, *path[:i]]).softmax(-1)[path[i]]) for i in range(len(path)))
        assert math.exp(scores[node]) == pytest.approx(chance, rel=1e-5)
    (few, origin), _ = grown(Watched(3, 2, 5, ranks=4, tell=told.append), model)
    assert origin != tuple(range(len(few))) and len(few) == 6
    best = dict(zip(texts(tree), scores, strict=True))
    assert told[1] == [best[path] for path in texts(few)]
    (plain, _), other = grown(Dynamic(3, 2, 100), model)
    assert set(texts(plain)) < set(texts(tree)), "more ranks"
    assert len(after.levels) == len(other.levels) and list(map(len, after.levels)) == list(map(len, other.levels))


HINTED = (0, 3, 1, 1)


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4, 9])
def test_a_certain_hint_is_in_the_tree_as_deep_as_there_is_room(room: int) -> None:
    for seed, shape in product(range(6), (Dynamic(2, 2, 9), Dynamic(6, 3, 5), Dynamic(1, 1, 4, 0.5))):
        (tree, _), after = grown(shape, TableModel.random(5, seed=seed), room, hint=Hint(HINTED, [0.0] * 4))
        deepest = HINTED[: min(room, shape.nodes)]
        assert {deepest[:depth] for depth in range(len(deepest) + 1)} <= set(texts(tree))
        assert tree.depth <= room and len(after.levels) <= shape.depth and len(tree) <= shape.nodes + 1
        assert len(set(texts(tree))) == len(tree), "no token twice below one parent"


def test_a_hint_that_nothing_speaks_for_changes_nothing() -> None:
    shapes: tuple[Shape, ...] = (Dynamic(3, 2, 5), Dynamic(4, 3, 100, 0.05), static("narrow"))
    for seed, shape in product(range(6), shapes):
        model = TableModel.random(5, seed=seed)
        hint = Hint(HINTED, [-9.0 if isinstance(shape, Dynamic) else 0.0] * 4)
        assert set(texts(grown(shape, model, hint=hint)[0].tree)) == set(texts(grown(shape, model)[0].tree))


@pytest.mark.parametrize("shape", [Dynamic(2, 2, 100, 0.2), Dynamic(4, 1, 100, 0.05)], ids=str)
def test_a_hint_keeps_to_the_floor(shape: Dynamic) -> None:
    """Its chance is 0.4 a token: 0.4, 0.16, 0.064 and 0.0256, where it does not begin as the draft's own guess."""
    for seed in range(20):
        model = TableModel.random(5, seed=seed)
        (tree, _), _ = grown(shape, model, hint=Hint(HINTED, [math.log(0.4)] * 4))
        for path in texts(tree):
            chances = [
                max(
                    float(model.logits_after([*TEXT, *path[:i]]).softmax(-1)[token]),
                    0.4 * (path[: i + 1] == HINTED[: i + 1]),
                )
                for i, token in enumerate(path)
            ]
            assert math.prod(chances) >= shape.floor * (1 - 1e-6)


BY_RANK = ("static:0.1.00", "static:0.00.01", "dynamic:2,2,3", "dynamic:2,2,3,0.3")


def law_is_the_targets(shape: str, verifier: str, tokens: int, rule: SamplingRule) -> bool:
    """By the exact law of whole generations out of the real loop, with a draft that is often wrong."""
    target, draft = TableModel.random(3, order=1, scale=1.2, seed=0), TableModel.random(3, order=1, scale=1.2, seed=1)
    world = Setup(target, ModelDrafter(draft, cast(Shape, parse(shape))), (0, 1), rule, verifier, tokens)
    return tv(generated(world, search=verifier == "kseq").law, world.target) <= EXACT


@pytest.mark.parametrize("verifier", ["tree", "onehot", "match", "traversal"])
@pytest.mark.parametrize("shape", BY_RANK)
def test_a_tree_by_rank_leaves_the_output_law_alone(shape: str, verifier: str) -> None:
    """Warm, cool and greedy; each verifier meets each temperature, and so does each kind of tree."""
    warm = 1.0 if (shape < "s") == (verifier in ("tree", "match")) else 0.6
    assert law_is_the_targets(shape, verifier, 3, SamplingRule(temperature=warm))
    assert law_is_the_targets(shape, verifier, 3, SamplingRule(temperature=0))


@pytest.mark.parametrize("shape", ["chain:1", "sampled:2,with"])
@pytest.mark.parametrize("verifier", ["tree", "kseq"])
def test_a_drawn_tree_does_too(shape: str, verifier: str) -> None:
    assert law_is_the_targets(shape, verifier, 2, SamplingRule(top_k=2, repetition_penalty=1.4))


@pytest.mark.parametrize("shape", BY_RANK)
def test_trees_by_rank_are_not_for_k_seq(shape: str) -> None:
    with pytest.raises(NotApplicableError, match="deterministic"):
        law_is_the_targets(shape, "kseq", 3, PLAIN)
