"""Choosing the shape of a tree from a calibration: what a shape would have done with the drafts that were measured.

At temperature 0 decoding is a walk along the target's own text: a round that starts at a place accepts what the draft
there and the text have in common, and the next one starts behind it. The calibration holds a wide draft for every
place, so the walk can be made for any smaller shape without running a model, each round paid with what its rows and its
levels cost. As far as the wide drafts reach, the replay is exact for chains, static trees, and dynamic trees that open
as many nodes on a level; narrower ones may open a node that the wide draft did not, and it then counts as a leaf.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple, TypeVar

import numpy as np

from specdecode_ref.drafters.calibration import Calibration, Draft
from specdecode_ref.drafters.optimal import optimal
from specdecode_ref.drafters.shapes import MOST_NODES, Auto, Dynamic, Optimal, Sampled, Shape, Static, Wanted, chain
from specdecode_ref.errors import InputError

CHAINS, STATIC = range(1, 9), range(2, 25)
DEPTHS, WIDTHS, NODES = range(2, 7), range(1, 5), (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16)
FLOORS, REACHES = (0.0, 0.03, 0.05, 0.08, 0.12, 0.2), (0.0, 0.35, 0.55, 0.75)
"""What `auto` tries: the lengths of chains, the nodes of optimal static trees, and all dynamic trees of such sizes."""

T = TypeVar("T")


class Round(NamedTuple):
    """What a shape makes of one draft: rows of the target's step, nodes opened on each level, tokens accepted."""

    rows: int
    opened: tuple[int, ...]
    accepted: int


class Forecast(NamedTuple):
    """tau: tokens a round; speed: tokens a second, without what the loop itself takes."""

    tau: float
    speed: float


def resolve(wanted: Wanted, calibration: Calibration, kinds: tuple[type, ...] = (Sampled, Static, Dynamic)) -> Shape:
    """The shape to use: `Optimal` and `Auto` by the calibration, any other as it is.

    kinds: what `auto` may choose; a drafter that puts hints in its tree, say, needs a `Dynamic` one.
    """
    if isinstance(wanted, Optimal):
        return optimal(calibration.acceptance, wanted.nodes)
    if isinstance(wanted, Auto):
        tried = [candidate for candidate in candidates(calibration) if isinstance(candidate[0], kinds)]
        return max(tried, key=lambda candidate: candidate[1].speed)[0]
    return wanted


def candidates(calibration: Calibration) -> Iterator[tuple[Shape, Forecast]]:
    """Every shape that `auto` tries and what it would reach, the simple ones first."""
    prices = _Prices.of(calibration)
    shapes: list[Sampled | Static] = [
        *map(chain, CHAINS),
        *(optimal(calibration.acceptance, nodes) for nodes in STATIC),
    ]
    for shape in dict.fromkeys(shapes):
        yield shape, _walk(calibration.texts, _fixed(shape), prices)
    for width in WIDTHS:
        grown = _all_grown(calibration, max(DEPTHS), width)
        for depth, nodes, floor, reach in product(DEPTHS, NODES, FLOORS, REACHES):
            if max(depth, width) <= nodes <= width + (depth - 1) * width**2:
                dynamic = Dynamic(depth, width, nodes, floor, reach)
                yield dynamic, _walk(grown, _cut(dynamic), prices)


def forecast(shape: Shape, calibration: Calibration) -> Forecast:
    """What decoding with that shape would have reached at temperature 0.

    Raises InputError for sampled trees, whose draws at temperature 0 are all the same token.
    """
    prices = _Prices.of(calibration)
    if isinstance(shape, Dynamic):
        return _walk(_all_grown(calibration, shape.depth, shape.width), _cut(shape), prices)
    return _walk(calibration.texts, _fixed(shape), prices)


def _all_grown(calibration: Calibration, depth: int, width: int) -> list[list[_Grown]]:
    return [[_Grown.of(draft, depth, width) for draft in text] for text in calibration.texts]


def _walk(texts: Sequence[Sequence[T]], play: Callable[[T], Round], prices: _Prices) -> Forecast:
    """Decode all texts, from draft to draft."""
    rounds = tokens = 0
    seconds = 0.0
    for text in texts:
        place = 0
        while place < len(text):
            played = play(text[place])
            rounds += 1
            tokens += played.accepted + 1
            seconds += prices.seconds(played)
            place += played.accepted + 1
    return Forecast(tokens / rounds, tokens / seconds)


def _fixed(shape: Sampled | Static) -> Callable[[Draft], Round]:
    """Replays a chain or a static tree: it accepts the path as far as it has its places."""
    if isinstance(shape, Static):
        paths = shape.paths
    elif max(shape.branching) == 1:
        paths = tuple((0,) * depth for depth in range(1, len(shape.branching) + 1))
    else:
        raise InputError("a chain, or a tree filled by rank", shape, "measure a sampled tree by decoding with it")
    places = set(paths)
    opened = Counter(len(parent) for parent in {path[:-1] for path in paths})
    levels = tuple(opened[depth] for depth in range(len(opened)))

    def play(draft: Draft) -> Round:
        accepted = 0
        while accepted < len(draft.ranks) and draft.ranks[: accepted + 1] in places:
            accepted += 1
        return Round(len(places) + 1, levels, accepted)

    return play


class _Ranked(NamedTuple):
    """The nodes of a draft down to some level. Nodes go by their losses, -log of their paths' chances.

    losses: of all nodes, ascending. places: where the nodes of the accepted path stand among them.
    """

    losses: list[float]
    places: list[int]


class _Level(NamedTuple):
    """The nodes of a level that could be opened, the best first.

    losses: theirs. better: how many nodes of their level and those above are better. reached: how likely the first
    one, two, ... of them are reached together.
    """

    losses: list[float]
    better: list[int]
    reached: list[float]


@dataclass(frozen=True)
class _Grown:
    """A draft as EAGLE-2 grows it, before its nodes are chosen.

    opened: what could be opened on each level, the root first. below: all nodes when those levels have been opened.
    """

    opened: list[_Level]
    below: list[_Ranked]

    @classmethod
    def of(cls, draft: Draft, depth: int, width: int) -> _Grown:
        """The part of a wide draft that a tree of that depth and width would have grown."""
        nodes: list[int] = []
        opened, ranked = list[_Level](), list[_Ranked]()
        level, place = [0], {0: 0}
        while level and len(opened) < depth:
            losses = [-draft.scores[node] for node in level]
            reached = list(accumulate(math.exp(-loss) for loss in losses))
            opened.append(_Level(losses, [place[node] for node in level], reached))
            below = sorted(child for node in level for child in draft.children[node][:width])
            nodes = sorted([*nodes, *below], key=lambda node: -draft.scores[node])
            place = {node: i for i, node in enumerate(nodes)}
            path = [place[node] for node in draft.path[1:] if node in place]
            ranked.append(_Ranked([-draft.scores[node] for node in nodes], path))
            level = sorted(below, key=lambda node: -draft.scores[node])[:width]
        return cls(opened, ranked)


def _cut(shape: Dynamic) -> Callable[[_Grown], Round]:
    """Replays the choice of nodes: the most probable ones, none below the floor, and no level out of reach.

    No node is more probable than its parent, so a floor takes away the same nodes before growing and after it, and a
    node is opened only if it is among the best so far.
    """
    most = -math.log(shape.floor) if shape.floor else math.inf

    def play(grown: _Grown) -> Round:
        counts: list[int] = []
        for level in grown.opened[: shape.depth]:
            count = min(bisect_right(level.losses, most), bisect_left(level.better, shape.nodes))
            if not count or level.reached[count - 1] < shape.reach:
                break
            counts.append(count)
        ranked = grown.below[len(counts) - 1]
        kept = min(shape.nodes, bisect_right(ranked.losses, most))
        return Round(kept + 1, tuple(counts), bisect_left(ranked.places, kept))

    return play


class _Prices(NamedTuple):
    """rows[n]: seconds of a target step of n rows; level[n]: of a further draft level that opens n nodes."""

    start: float
    rows: list[float]
    level: list[float]

    @classmethod
    def of(cls, calibration: Calibration) -> _Prices:
        """Straight lines between the sizes that were measured; larger ones cost in proportion."""
        return cls(calibration.start, _line(calibration.rows), _line(calibration.level))

    def seconds(self, played: Round) -> float:
        """What the round took."""
        return self.start + self.rows[played.rows] + sum(self.level[nodes] for nodes in played.opened[1:])


def _line(costs: Mapping[int, float]) -> list[float]:
    sizes = sorted(costs)
    wanted = np.arange(MOST_NODES + 2)
    line = np.interp(wanted, sizes, [costs[size] for size in sizes])
    return (line * np.maximum(1, wanted / sizes[-1])).tolist()
