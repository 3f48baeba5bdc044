"""What the conformance kit asks of a verifier: small draft trees of every shape, under laws of every kind.

All drafts of a case are enumerated with their probabilities, so that the law of what comes out is exact. The laws
depend on the context, because constant ones hide every bug of an index. Small cases come first: the first that fails is
the smallest input that shows the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdecode_ref.fidelity.laws import Next
from specdecode_ref.tree import DraftTree, depths
from specdecode_ref.types import Draw

Make = Callable[[np.random.Generator, int], np.ndarray]

WITH: Draw = "with_replacement"
WITHOUT: Draw = "without_replacement"
CERTAIN: Draw = "deterministic"
MOST_DRAFTS = 130


def smooth(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """All tokens have mass, of one order of magnitude or two."""
    return rng.gamma(0.7, size=vocab) + 1e-3


def holes(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """At least one token has mass, and about half have none."""
    row = smooth(rng, vocab) * (rng.random(vocab) < 0.5)
    row[rng.integers(vocab)] += 0.5
    return row


def certain(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """All mass on one token."""
    return np.eye(vocab)[rng.integers(vocab)]


def skewed(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Masses over twelve orders of magnitude."""
    return 10.0 ** rng.uniform(-12, 0, size=vocab)


def short(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Tenths and the like, so that an example can be followed by hand."""
    return rng.integers(1, 6, size=vocab).astype(np.float64)


def few(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Three tokens have mass, anywhere in the vocabulary."""
    row = np.zeros(vocab)
    row[rng.choice(vocab, min(3, vocab), replace=False)] = rng.gamma(0.7, size=min(3, vocab)) + 0.05
    return row


@dataclass(frozen=True)
class Shape:
    """A draft without its tokens: parents and draws of all nodes, as in `DraftTree`."""

    parents: tuple[int, ...]
    draws: tuple[Draw | None, ...]

    @classmethod
    def chain(cls, *draws: Draw) -> Shape:
        """A chain with a node for each draw."""
        return cls(tuple(range(-1, len(draws))), (None, *draws))

    @classmethod
    def tree(cls, parents: Sequence[int], *draws: Draw) -> Shape:
        """`parents` of all nodes but the root; one draw for all of them, or one each."""
        return cls((-1, *parents), (None, *(draws * len(parents) if len(draws) == 1 else draws)))

    @property
    def is_chain(self) -> bool:
        """True when no node has two children."""
        return len(set(self.parents)) == len(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(depths(self.parents))

    def __str__(self) -> str:
        drawn = ", ".join(dict.fromkeys(str(draw).replace("_", " ") for draw in self.draws[1:]))
        if len(self.parents) == 1:
            return "no draft"
        form = f"chain of {self.depth}" if self.is_chain else f"tree {list(self.parents)}"
        return f"{form}, {drawn}"

    def drafts(self, q: Next, root: int = 0) -> Iterator[tuple[float, DraftTree]]:
        """Every draft of this shape with its probability.

        Deterministic siblings are the likeliest tokens of q, in order. A node that cannot be drawn, since its earlier
        siblings hold all of q, is left out with all that hangs on it.
        """
        return self._grown(q, 1, (0,), DraftTree.bare(root), 1.0)

    def _grown(
        self, q: Next, i: int, places: tuple[int | None, ...], tree: DraftTree, weight: float
    ) -> Iterator[tuple[float, DraftTree]]:
        """Decide node i; `places` says where the nodes before it went in `tree`."""
        if i == len(self.parents):
            yield weight, tree
            return
        node, draw = places[self.parents[i]], self.draws[i]
        assert draw is not None
        law = None if node is None else q(tree.history(node))
        mass = {} if law is None or node is None else _mass(law.tolist(), draw, tree, node)
        if not mass or node is None:
            yield from self._grown(q, i + 1, (*places, None), tree, weight)
            return
        total = sum(mass.values())
        kept = tree.q if draw == CERTAIN else (*tree.q[:node], law, *tree.q[node + 1 :])
        for token, m in mass.items():
            more = DraftTree((*tree.tokens, token), (*tree.parents, node), (*tree.draws, draw), (*kept, None))
            yield from self._grown(q, i + 1, (*places, len(tree)), more, weight * (m / total))


def _mass(q: list[float], draw: Draw, tree: DraftTree, node: int) -> dict[int, float]:
    """The tokens that the next child of `node` may be, each with its mass."""
    earlier = [tree.tokens[child] for child in tree.children[node] if tree.draws[child] == draw]
    if draw == CERTAIN:
        order = sorted(range(len(q)), key=lambda x: -q[x])
        return {order[len(earlier)]: 1.0} if len(earlier) < len(order) else {}
    gone = earlier if draw == WITHOUT else []
    return {x: m for x, m in enumerate(q) if m > 0 and x not in gone}


@dataclass(frozen=True, eq=False)
class Case:
    """One law to be checked: a shape, a vocabulary, the target p and the draft q, both by context."""

    values: str
    shape: Shape
    vocab: int
    p: Next
    q: Next

    def __str__(self) -> str:
        return f"{self.shape}; {self.values} laws of {self.vocab} tokens"

    def drafts(self) -> list[tuple[float, DraftTree]]:
        """All drafts, each with its probability."""
        return list(self.shape.drafts(self.q))

    def rows(self, draft: DraftTree) -> Tensor:
        """The target's laws [N, V]."""
        return torch.stack([self.p(draft.history(node)) for node in range(len(draft))])


def contextual(make: Make, seed: int, vocab: int) -> Next:
    """A law for every context, drawn when it is first asked for, from a generator of its own."""
    held: dict[tuple[int, ...], Tensor] = {}

    def after(tokens: tuple[int, ...]) -> Tensor:
        if tokens not in held:
            row = make(np.random.default_rng([seed, *tokens]), vocab)
            held[tokens] = torch.tensor(row / row.sum(), dtype=torch.float64)
        return held[tokens]

    return after


def nearly(p: Next, seed: int) -> Next:
    """p, but for a millionth."""

    def blurred(tokens: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng([seed, 7, *tokens])
        row = p(tokens) * torch.tensor(1 + 1e-6 * rng.standard_normal(len(p(tokens))))
        return row / row.sum()

    return blurred


VALUES: dict[str, tuple[Make, Make | None]] = {
    "short": (short, short),
    "smooth": (smooth, smooth),
    "skewed": (skewed, skewed),
    "holed": (holes, holes),
    "p-holed": (holes, smooth),
    "q-holed": (smooth, holes),
    "skewed-p": (skewed, smooth),
    "certain-p": (certain, smooth),
    "certain-q": (smooth, certain),
    "certain": (certain, certain),
    "few": (short, few),
    "equal": (smooth, None),
    "nearly equal": (smooth, None),
}
"""The kinds of laws for p and q; None where q follows from p."""


def case(shape: Shape, values: str, vocab: int, seed: int) -> Case:
    """The case of these values; another seed gives other laws of the same kind."""
    make_p, make_q = VALUES[values]
    p = contextual(make_p, 2 * seed, vocab)
    q = contextual(make_q, 2 * seed + 1, vocab) if make_q else nearly(p, seed) if values == "nearly equal" else p
    return Case(values, shape, vocab, p, q)


def chains(vocab: int, gamma: int, draws: Sequence[Draw]) -> Iterator[tuple[Shape, str, int]]:
    """Shapes, kinds of laws and vocabularies for a verifier of chains."""
    for values in ("short", "holed", "certain"):
        yield Shape.chain(), values, min(vocab, 3)
    allowed = [draw for draw in (WITH, CERTAIN, WITHOUT) if draw in draws]
    for draw in allowed:
        for values in ("short", "smooth"):
            yield Shape.chain(draw), values, min(vocab, 3)
    deep = max(1, min(gamma, int(np.log(MOST_DRAFTS) / np.log(vocab) + 1e-9)))
    for draw in allowed:
        full = Shape.chain(*[draw] * deep)
        some = ("smooth", "skewed", "holed") if draw != WITHOUT else ("smooth", "skewed")
        for values in some * (6 if draw == CERTAIN else 1):
            yield full, values, vocab if draw != WITHOUT else min(vocab, 3)
    for draw in allowed:
        for values in VALUES:
            if values not in ("short", "smooth", "skewed", "holed", "few") and draw != WITHOUT:
                yield Shape.chain(draw, draw), values, min(vocab, 3)
    if WITH in allowed and CERTAIN in allowed:
        yield Shape.chain(WITH, CERTAIN), "smooth", 3
        yield Shape.chain(CERTAIN, WITH), "smooth", 3
    for draw in allowed[:2]:
        yield Shape.chain(*[draw] * max(4, min(gamma, 6))), "smooth", 2
        yield Shape.chain(draw), "skewed-p", 11 if draw == WITH else 37
        yield Shape.chain(draw), "few", 67  # wider than the usual top-k of 50 or 64
        yield Shape.chain(*[draw] * 8), "equal" if draw == CERTAIN else "certain-q", 2  # one draft only, but a long one


def trees(vocab: int, draws: Sequence[Draw]) -> Iterator[tuple[Shape, str, int]]:
    """The same for a verifier of trees: siblings, two levels, three levels, in several orders of their nodes."""
    v = min(vocab, 3)
    allowed = [draw for draw in (WITH, WITHOUT, CERTAIN) if draw in draws]
    mixed = [tuple(s) for s in ((CERTAIN, WITH), (WITHOUT, CERTAIN), (CERTAIN, WITH, WITHOUT), (WITH, WITHOUT, WITH))]
    for draw in allowed:
        for values in ("short", "smooth", "holed", "p-holed", "q-holed", "skewed", "certain-p", "certain-q", "equal"):
            yield Shape.tree((0, 0), draw), values, v
    for draw in allowed:
        yield Shape.tree((0, 0, 0), draw), "smooth", min(vocab, 4)  # with fewer, two rejections leave a single token
        yield Shape.tree((0, 1, 1), draw), "smooth", v
        yield Shape.tree((0, 0), draw), "smooth", min(vocab, 5)
    for several in mixed:
        if set(several) <= set(draws):
            yield Shape.tree((0,) * len(several), *several), "smooth", v
    for draw in allowed:
        for parents in ((0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1)):
            yield Shape.tree(parents, draw), "smooth", 2
    for draw in allowed:
        yield Shape.tree((0, 0, 2), draw), "smooth", v
        yield Shape.tree((0, 1, 0), draw), "holed", v
        yield Shape.tree((0, 0, 1), draw), "skewed", v
        yield Shape.tree((0, 0, 1, 2), draw), "smooth", 2
        deep = (0, 0, 2, 2, 3) if draw == WITH else (0, 1, 2, 1, 0)
        yield Shape.tree(deep, draw), "smooth", 2
    if set(allowed) == {WITH, WITHOUT, CERTAIN}:
        yield Shape.tree((0, 0, 1), CERTAIN, WITHOUT, WITH), "smooth", v
        yield Shape.tree((0, 0, 2), WITH, WITHOUT, CERTAIN), "smooth", v
    if CERTAIN in allowed:
        yield Shape.tree((0, 0, 0, 2), CERTAIN), "smooth", 17
