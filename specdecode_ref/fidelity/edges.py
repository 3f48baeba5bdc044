"""Theory, in exact fractions: where the outcome of a rejection rule may change.

Nothing here calls the code that is tested. A child is tested after all its earlier siblings were rejected, so its
history, its threshold min(1, p_eff / q_eff), and the law that is left after the last child follow from the tree alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

from specdecode_ref.tree import DraftTree


class Edges:
    """The breakpoints of one draft's coins. p: rows [V] of floats by node; only rows that matter are read."""

    def __init__(self, draft: DraftTree, p: Mapping[int, Sequence[float]]) -> None:
        self._draft, self._p = draft, p
        self._after: dict[int, tuple[dict[int, float], list[Fraction]]] = {}

    def accept(self, node: int) -> list[float]:
        """The threshold of the coin that `node` is tested with."""
        if not 0 < node < len(self._draft):
            return []
        return [self._walk(self._draft.parents[node])[0][node]]

    def emit(self, node: int, rejected: bool) -> list[float]:
        """The edges of the law that is emitted after `node`: the last residual, or p itself."""
        return cdf_edges(self._walk(node)[1] if rejected else [Fraction(x) for x in self._p[node]])

    def draw(self, node: int) -> list[float]:
        """The edges of the law that `node` was drawn from, given its earlier siblings."""
        if not 0 < node < len(self._draft) or self._draft.draws[node] == "deterministic":
            return []
        return cdf_edges(self._drawn_from(node))

    def _walk(self, node: int) -> tuple[dict[int, float], list[Fraction]]:
        """The thresholds of a node's children, and what is left of p, not normalised, when all are rejected."""
        if node not in self._after:
            thresholds = {}
            mass, total = [Fraction(x) for x in self._p[node]], Fraction(1)
            for child in self._draft.children[node]:
                token, q = self._draft.tokens[child], self._drawn_from(child)
                thresholds[child] = float(min(Fraction(1), mass[token] / total / q[token])) if q[token] else 1.0
                left = [max(Fraction(0), m - total * x) for m, x in zip(mass, q, strict=True)]
                if any(left):
                    mass, total = left, sum(left, Fraction(0))
            self._after[node] = thresholds, mass
        return self._after[node]

    def _drawn_from(self, child: int) -> list[Fraction]:
        draft, parent = self._draft, self._draft.parents[child]
        if draft.draws[child] == "deterministic":
            return [Fraction(x == draft.tokens[child]) for x in range(len(self._p[parent]))]
        row = draft.q[parent]
        assert row is not None
        q = [Fraction(x) for x in row.tolist()]
        if draft.draws[child] == "with_replacement":
            return q
        for sibling in draft.children[parent]:
            if sibling < child and draft.draws[sibling] == "without_replacement":
                q[draft.tokens[sibling]] = Fraction(0)
        total = sum(q, Fraction(0))
        return [x / total for x in q] if total else q


def cdf_edges(mass: Sequence[Fraction]) -> list[float]:
    """Where inverse-transform sampling steps from one token to the next; the mass need not be normalised."""
    total = sum(mass, Fraction(0))
    return [float(x / total) for x in accumulate(mass)] if total else []
