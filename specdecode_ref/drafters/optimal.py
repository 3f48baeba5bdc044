"""The static tree that accepts most, from how often a child of each rank is right (Sequoia, arXiv 2402.12374).

Sequoia's positional assumption (section 3.1) is that the chance of a child depends on its rank among its siblings; here
it may depend on its depth too. Then a node is accepted with the product of the chances along its path, its value, and a
tree accepts the sum of its nodes' values. Sequoia finds the best tree by dynamic programming. Where no child is
likelier than the sibling before it, no value exceeds the parent's or the elder sibling's, so the n most valuable places
of all form a tree, which is then the best one of n nodes: taking place after place gives what the programme would.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import prod

from specdecode_ref.drafters.shapes import Static
from specdecode_ref.errors import InputError

Acceptance = Sequence[Sequence[float]]
"""acceptance[d][r]: the chance that the child of rank r (from 0) is the accepted one, given that its parent, a node at
depth d (the root has depth 0), was accepted. There are as many levels as rows, and as many ranks as a row has entries.
"""


def optimal(acceptance: Acceptance, nodes: int) -> Static:
    """The static tree of so many nodes with the largest expected accepted length; of equals, the shallowest.

    A child measured likelier than its elder sibling counts as just as likely, as ranks are filled in order. The tree is
    smaller where `acceptance` has not that many places. Raises InputError.

    >>> str(optimal([[0.6, 0.3], [0.6, 0.1]], 3))
    'static:0.1.00'
    """
    _check(acceptance, nodes)
    chances = [list(accumulate(row, min)) for row in acceptance]
    paths: list[tuple[int, ...]] = []
    border: list[tuple[float, int, tuple[int, ...]]] = [(-chances[0][0], 1, (0,))]
    while border and len(paths) < nodes:
        _, _, path = heappop(border)
        paths.append(path)
        for place in ((*path, 0), (*path[:-1], path[-1] + 1)):  # its first child, its next sibling
            if len(place) <= len(chances) and place[-1] < len(chances[len(place) - 1]):
                heappush(border, (-_value(chances, place), len(place), place))
    return Static(tuple(sorted(paths, key=lambda path: (len(path), path))))


def expected(acceptance: Acceptance, static: Static) -> float:
    """How many of the tree's nodes are accepted in a round, on average; places that `acceptance` lacks add nothing."""
    return sum(_value(acceptance, path) for path in static.paths)


def _value(acceptance: Acceptance, path: Sequence[int]) -> float:
    """The chance that the node at the end of the path is accepted."""
    if len(path) > len(acceptance) or any(rank >= len(row) for rank, row in zip(path, acceptance, strict=False)):
        return 0.0
    return prod(acceptance[depth][rank] for depth, rank in enumerate(path))


def _check(acceptance: Acceptance, nodes: int) -> None:
    if nodes < 1:
        raise InputError("a tree of 1 node or more", nodes, "use the drafter 'none' to draft nothing")
    if not acceptance or not all(row and all(0 <= chance <= 1 for chance in row) for row in acceptance):
        raise InputError("chances from 0 to 1 for one depth and rank or more", acceptance, "measure acceptance again")
