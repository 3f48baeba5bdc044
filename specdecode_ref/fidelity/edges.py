"""Theory, in exact fractions: where the outcome of a verifier may change.

Nothing here calls the code that is tested. In each rule a node's coin is compared with a threshold that follows from
the tree alone, because a node is tested only after certain others were rejected; the same holds for the law that is
emitted from. `theory(name)` gives the breakpoints of the rule of that name, and for an unknown rule those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

from specdecode_ref.tree import DraftTree
from specdecode_ref.verify.lenient import LENIENCE

Mass = list[Fraction]
"""A law over the vocabulary, not necessarily normalised."""

Rows = Mapping[int, Sequence[float]]
"""The target's laws [V] by node; only rows that matter are read."""


class Edges(Protocol):
    """The breakpoints of one draft's coins under one rule."""

    def accept(self, node: int) -> list[float]:
        """Where the coin that `node` is tested with may change the outcome."""
        ...

    def emit(self, node: int, rejected: bool) -> list[float]:
        """The edges of the law that is emitted after `node`: what rejections left, or p itself."""
        ...


class Plain:
    """No accept coins, and tokens from p itself: `match`, and the rules with a threshold in place of a coin."""

    def __init__(self, draft: DraftTree, p: Rows) -> None:
        self._p = p

    def accept(self, node: int) -> list[float]:
        """See `Edges`."""
        return []

    def emit(self, node: int, rejected: bool) -> list[float]:
        """See `Edges`."""
        return [] if rejected else cdf_edges(exact(self._p[node]))


class Rejection:
    """Recursive rejection, chains included: `chain` and `tree`.

    A child is tested after all its earlier siblings were rejected, with min(1, p_eff / q_eff).
    lenience: multiplies q in the test, and only there.
    """

    def __init__(self, draft: DraftTree, p: Rows, lenience: float = 1.0) -> None:
        self._draft, self._p, self._lenience = draft, p, Fraction(lenience)
        self._after: dict[int, tuple[dict[int, float], Mass]] = {}

    def accept(self, node: int) -> list[float]:
        """See `Edges`."""
        if not 0 < node < len(self._draft):
            return []
        return [self._walk(self._draft.parents[node])[0][node]]

    def emit(self, node: int, rejected: bool) -> list[float]:
        """See `Edges`."""
        return cdf_edges(self._walk(node)[1] if rejected else exact(self._p[node]))

    def _walk(self, node: int) -> tuple[dict[int, float], Mass]:
        """The thresholds of a node's children, and what is left of p, not normalised, when all are rejected."""
        if node not in self._after:
            thresholds = {}
            mass, total = exact(self._p[node]), Fraction(1)
            for child in self._draft.children[node]:
                token, q = self._draft.tokens[child], drawn_from(self._draft, child, len(mass))
                claim = self._lenience * q[token]
                thresholds[child] = float(min(Fraction(1), mass[token] / total / claim)) if claim else 1.0
                left = [max(Fraction(0), m - total * x) for m, x in zip(mass, q, strict=True)]
                if any(left):
                    mass, total = left, sum(left, Fraction(0))
            self._after[node] = thresholds, mass
        return self._after[node]


class Traversal:
    """Traversal of a tree from its leaves, and block verification, which is the same on a chain.

    `owed` is the mass of p that the output must still receive at a node, given that its path was drawn and all that was
    tested before was rejected. A child takes min(owed, q_eff) and leaves the rest, out of the probability of its
    rejection; a node whose children have all been rejected is accepted with the mass that is owed there.
    """

    def __init__(self, draft: DraftTree, p: Rows) -> None:
        self._draft, self._p = draft, p
        self._owed: dict[int, Mass] = {}
        self._visit()

    def accept(self, node: int) -> list[float]:
        """See `Edges`."""
        return [float(sum(self._owed[node], Fraction(0)))] if node > 0 else []

    def emit(self, node: int, rejected: bool) -> list[float]:
        """See `Edges`."""
        return cdf_edges(self._owed[node])

    def _visit(self) -> None:
        left = [list(children) for children in self._draft.children]
        node, self._owed[0] = 0, exact(self._p[0])
        while node >= 0:
            owed = self._owed[node]
            if left[node]:
                child = left[node].pop(0)
                x, q = self._draft.tokens[child], drawn_from(self._draft, child, len(owed))
                weight = min(Fraction(1), owed[x] / q[x]) if q[x] else Fraction(owed[x] > 0)
                self._owed[child] = [weight * m for m in exact(self._p[child])]
                node = child
                continue
            parent = self._draft.parents[node]
            if parent >= 0:
                self._owed[parent] = self._rest(parent, node)
            node = parent

    def _rest(self, parent: int, child: int) -> Mass:
        """What is owed at `parent` after `child` was rejected; unchanged where nothing is, as that never happens."""
        owed = self._owed[parent]
        q = drawn_from(self._draft, child, len(owed))
        rejected = 1 - sum(map(min, owed, q), Fraction(0))
        rest = [max(Fraction(0), m - x) for m, x in zip(owed, q, strict=True)]
        if not any(rest) and parent == 0:
            return owed
        return [m / rejected for m in rest] if rejected else rest


def onehot(draft: DraftTree, p: Rows) -> Rejection:
    """Recursive rejection of the same tokens, taken as certain."""
    return Rejection(replace(draft, draws=(None, *["deterministic"] * (len(draft) - 1))), p)  # type: ignore[arg-type]


def lenient(draft: DraftTree, p: Rows) -> Rejection:
    """The tests of lenient rejection at its default lenience."""
    return Rejection(draft, p, LENIENCE)


_Make = Callable[[DraftTree, Rows], Edges]
_THEORIES: dict[str, _Make] = {
    **dict.fromkeys(("match", "kseq", "typical", "relaxed"), Plain),
    **dict.fromkeys(("chain", "tree"), Rejection),
    **dict.fromkeys(("block", "traversal"), Traversal),
    "onehot": onehot,
    "lenient": lenient,
}
"""By verifier."""

SEARCHED = frozenset({"kseq"})
"""Rules whose edges must be searched for: the rho of k-SEQ is the root of an equation and no fraction."""


class Union:
    """The breakpoints of several theories together."""

    def __init__(self, parts: Sequence[Edges]) -> None:
        self._parts = parts

    def accept(self, node: int) -> list[float]:
        """See `Edges`."""
        return [edge for part in self._parts for edge in part.accept(node)]

    def emit(self, node: int, rejected: bool) -> list[float]:
        """See `Edges`; those of p itself in any case."""
        edges = {edge for part in self._parts for edge in part.emit(node, rejected)}
        return sorted(edges.union(self._parts[0].emit(node, False)))


def theory(name: str | None) -> _Make:
    """The edges of the verifier of that name; all that are known where it is none of them."""
    if name in _THEORIES:
        return _THEORIES[name]
    return lambda draft, p: Union([make(draft, p) for make in (Rejection, Traversal, onehot)])


def draw_edges(draft: DraftTree, node: int, vocab: int) -> list[float]:
    """The edges of the law that `node` was drawn from, given its earlier siblings; none for a deterministic node."""
    if not 0 < node < len(draft) or draft.draws[node] == "deterministic":
        return []
    return cdf_edges(drawn_from(draft, node, vocab))


def drawn_from(draft: DraftTree, child: int, vocab: int) -> Mass:
    """q_eff [V] of a node, given its earlier siblings."""
    parent = draft.parents[child]
    if draft.draws[child] == "deterministic":
        return [Fraction(x == draft.tokens[child]) for x in range(vocab)]
    row = draft.q[parent]
    assert row is not None
    q = exact(row.tolist())
    if draft.draws[child] == "with_replacement":
        return q
    for sibling in draft.children[parent]:
        if sibling < child and draft.draws[sibling] == "without_replacement":
            q[draft.tokens[sibling]] = Fraction(0)
    total = sum(q, Fraction(0))
    return [x / total for x in q] if total else q


def exact(row: Sequence[float]) -> Mass:
    """Floats as the fractions they are."""
    return [Fraction(x) for x in row]


def cdf_edges(mass: Sequence[Fraction]) -> list[float]:
    """Where inverse-transform sampling steps from one token to the next; the mass need not be normalised."""
    total = sum(mass, Fraction(0))
    return [float(x / total) for x in accumulate(mass)] if total else []
