"""The draft tree: what a drafter proposes and a verifier judges.

Node 0 is the root, the last committed token. Parents stand before their children; a chain is a tree with one child a
node. Nothing derived (depths, child lists, the attention mask) is stored: it follows from `parents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from specdecode_ref.errors import InputError
from specdecode_ref.types import Draw

if TYPE_CHECKING:
    from torch import Tensor


def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of every node [N]; a node whose parent is -1 has depth 0."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return tuple(out)


def children(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For every node, the nodes that hang on it, in index order (which is draw order)."""
    out: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            out[parent].append(node)
    return tuple(map(tuple, out))


def ancestors(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The path from the top down to `node`, itself included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def ancestor_mask(parents: tuple[int, ...]) -> Tensor:
    """Tree attention, bool [N, N]: row i is True at the ancestors of node i and at i (SpecInfer, section 4.2)."""
    import torch

    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@dataclass(frozen=True)
class DraftTree:
    """A proposed tree of N nodes, the root included.

    tokens:  [N]; `tokens[0]` is the last committed token.
    parents: [N]; `parents[0]` is -1, and parents[i] < i.
    draws:   [N]; how each node was drawn among its siblings; None for the root.
    q:       [N]; the law [V] of the token *after* a node as the drafter drew from it. None where nothing was drawn:
             at leaves, and at nodes whose children are all deterministic.

    Siblings are tested in index order, which must be the order they were drawn in. To sort, drop or merge drawn
    siblings would change the output law, so nothing here does.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draws: tuple[Draw | None, ...]
    q: tuple[Tensor | None, ...]

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0 or not n == len(self.parents) == len(self.draws) == len(self.q):
            sizes = (n, len(self.parents), len(self.draws), len(self.q))
            raise InputError("tokens, parents, draws and q of one length, the root first", sizes, "fill all four")
        if self.parents[0] != -1 or any(not 0 <= self.parents[i] < i for i in range(1, n)):
            raise InputError("parents before their children, -1 for the root only", self.parents, "reorder the nodes")
        if min(self.tokens) < 0:
            raise InputError("token ids of 0 or more", self.tokens, "propose fewer nodes instead of placeholders")
        for node in range(1, n):
            if self.draws[node] != "deterministic" and self.q[self.parents[node]] is None:
                raise InputError(f"a law q at node {self.parents[node]}", None, "keep the law that was drawn from")

    @classmethod
    def bare(cls, root: int) -> DraftTree:
        """A tree of the root alone: nothing was drafted, and the round is a step of plain decoding."""
        return cls((root,), (-1,), (None,), (None,))

    @classmethod
    def chain(cls, root: int, tokens: tuple[int, ...], q: tuple[Tensor, ...] | None = None) -> DraftTree:
        """A chain of drafted tokens below the root; deterministic where no laws `q` (one per token) are given."""
        n = len(tokens)
        draw: Draw = "deterministic" if q is None else "with_replacement"
        laws: tuple[Tensor | None, ...] = (None,) * n if q is None else tuple(q)
        return cls((root, *tokens), tuple(range(-1, n)), (None, *([draw] * n)), (*laws, None))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node [N]; the root has depth 0."""
        return depths(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For every node, its children in draw order."""
        return children(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node: the most tokens that can be accepted."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """True when no node has two children."""
        return all(len(c) < 2 for c in self.children)

    def history(self, node: int) -> tuple[int, ...]:
        """The drafted tokens on the path to `node`, the root left out: what a penalty must count beside the context."""
        return tuple(self.tokens[i] for i in ancestors(self.parents, node)[1:])
