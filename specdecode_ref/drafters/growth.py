"""How a draft tree grows: a drafter says what might follow each node, a shape says which of it becomes nodes.

Every drafter that guesses with logits (a draft model, Medusa's heads, EAGLE's head) grows its trees here, so what the
verifier is told about a node, drawn or chosen, is decided in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.shapes import Dynamic, Sampled, Shape, Static
from specdecode_ref.sampling import SamplingRule, law, pick, without
from specdecode_ref.tree import DraftTree, ancestors
from specdecode_ref.types import Context, Draw

After = Callable[["Sketch", Sequence[int]], Tensor]
"""(sketch, nodes of one level) -> draft logits [nodes, D] of the token after each. Asked once a level, top down."""


class Hint(NamedTuple):
    """A chain of tokens that something else expects below the root, and the log probability it gives each of them."""

    tokens: Sequence[int]
    logs: Sequence[float]


class Grown(NamedTuple):
    """The tree, and for each of its nodes which one of the sketch it was (a re-ranked tree keeps only some)."""

    tree: DraftTree
    origin: tuple[int, ...]


class Words(NamedTuple):
    """A reduced draft vocabulary. ids: int64 [D], the target's token for each draft logit; size: the target's V."""

    ids: Tensor
    size: int

    def widen(self, row: Tensor) -> Tensor:
        """Logits [D] as logits [V]: what the draft has no word for, it cannot draw."""
        return row.new_full((self.size,), -math.inf).scatter_(0, self.ids, row)


@dataclass(frozen=True)
class Watched(Dynamic):
    """A dynamic tree that tells how sure the draft was, for whoever calibrates a drafter.

    ranks: children of each opened node; more of them than `width` change nothing about which nodes are opened.
    tell:  called with the log probabilities of the paths to all nodes that were kept, the root first.
    """

    ranks: int = 1
    tell: Callable[[list[float]], None] = lambda scores: None


class Sketch:
    """A draft tree while it grows."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.tokens: list[int] = [context.root]
        self.parents: list[int] = [-1]
        self._draws: list[Draw | None] = [None]
        self._q: list[Tensor | None] = [None]

    def history(self, node: int) -> list[int]:
        """All tokens up to and including `node`."""
        return [*self._context.tokens, *(self.tokens[i] for i in ancestors(self.parents, node)[1:])]

    def draw(self, node: int, q: Tensor, width: int, draw: Draw, coins: Coins) -> list[int]:
        """Draw children of `node` from q, each with its own coin; how many depends on q, never on what is drawn."""
        self._q[node] = q
        if draw == "without_replacement":
            width = min(width, int(q.count_nonzero()))
        first = len(self.tokens)
        for child in range(first, first + width):
            q_eff = without(q, self.tokens[first:]) if draw == "without_replacement" else q
            self.tokens.append(pick(q_eff, coins.draft(self._context.base, child)))
            self.parents.append(node)
            self._draws.append(draw)
            self._q.append(None)
        return list(range(first, first + width))

    def put(self, node: int, tokens: Sequence[int]) -> list[int]:
        """Hang chosen tokens below `node`, the likeliest first."""
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self._draws += ["deterministic"] * len(tokens)
        self._q += [None] * len(tokens)
        return list(range(first, first + len(tokens)))

    def finish(self) -> DraftTree:
        """The tree, frozen."""
        return DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self._draws), tuple(self._q))

    def pruned(self, kept: Sequence[int]) -> DraftTree:
        """The tree of some nodes, ascending, the root and the parent of each among them; all were chosen by rank."""
        place = {node: i for i, node in enumerate(kept)}
        return DraftTree(
            tuple(self.tokens[node] for node in kept),
            (-1, *(place[self.parents[node]] for node in kept[1:])),
            tuple(self._draws[node] for node in kept),
            (None,) * len(kept),
        )


def grow(
    shape: Shape,
    context: Context,
    rule: SamplingRule,
    coins: Coins,
    after: After,
    words: Words | None = None,
    hint: Hint | None = None,
) -> Grown:
    """A tree of that shape below `context.root`, no deeper than `context.room`. D is V where there are no `words`.

    hint: competes with the draft's own guesses for the places of a dynamic tree; other shapes have no use for one.
    """
    sketch = Sketch(context)
    if isinstance(shape, Dynamic):
        scores, kept = _dynamic(sketch, shape, context.room, after, words, hint or Hint((), ()))
        if isinstance(shape, Watched):
            shape.tell([scores[node] for node in kept])
        return Grown(sketch.pruned(kept), tuple(kept))
    if isinstance(shape, Static):
        _static(sketch, shape, context.room, after, words)
    else:
        _sampled(sketch, shape, context, rule, coins, after, words)
    return Grown(sketch.finish(), tuple(range(len(sketch.tokens))))


def _sampled(
    sketch: Sketch,
    shape: Sampled,
    context: Context,
    rule: SamplingRule,
    coins: Coins,
    after: After,
    words: Words | None,
) -> None:
    level = [0]
    for width in shape.branching[: max(context.room, 0)]:
        grown = []
        for node, row in zip(level, after(sketch, level), strict=True):
            q = law(words.widen(row) if words else row, rule, sketch.history(node), context.prompt_length)
            grown += sketch.draw(node, q, width, shape.draw, coins)
        level = grown


def _static(sketch: Sketch, shape: Static, room: int, after: After, words: Words | None) -> None:
    at: dict[tuple[int, ...], int] = {(): 0}
    for depth in range(1, room + 1):
        below = [path for path in shape.paths if len(path) == depth and path[:-1] in at]
        if not below:
            return
        parents = list(dict.fromkeys(path[:-1] for path in below))
        logits = after(sketch, [at[parent] for parent in parents])
        widest = min(1 + max(path[-1] for path in below), logits.shape[-1])
        best = _tokens(logits.topk(widest).indices, words)
        for parent, ranked in zip(parents, best, strict=True):
            ranks = [path[-1] for path in below if path[:-1] == parent and path[-1] < widest]
            for rank, node in zip(ranks, sketch.put(at[parent], [ranked[rank] for rank in ranks]), strict=True):
                at[*parent, rank] = node


def _dynamic(
    sketch: Sketch, shape: Dynamic, room: int, after: After, words: Words | None, hint: Hint
) -> tuple[list[float], list[int]]:
    """The score of every node, and the nodes to keep, the root first.

    A node's score is the log probability of its path, so no child beats its parent: the best nodes form a tree, and
    what is not among the best of a level can have none below it, and is not opened.
    """
    scores, level, trail = [0.0], [0], _Trail(hint)
    floor = math.log(shape.floor) if shape.floor else -math.inf
    ranks = shape.ranks if isinstance(shape, Watched) else min(shape.width, shape.nodes)

    def put(node: int, ranked: list[int], logs: list[float]) -> list[int]:
        """Hang guesses below a node, the likeliest first, as far as they are above the floor."""
        ranked, logs = trail.join(node, ranked, logs)
        likely = [scores[node] + log for log in logs if scores[node] + log >= floor]
        scores.extend(likely)
        children = sketch.put(node, ranked[: len(likely)])
        trail.follow(node, children, sketch.tokens)
        return children

    def best() -> list[int]:
        return sorted(range(1, len(scores)), key=lambda node: -scores[node])[: shape.nodes]

    for _ in range(min(shape.depth, room)):
        if not level or sum(math.exp(scores[node]) for node in level) < shape.reach:
            break
        law = after(sketch, level).float().log_softmax(-1)
        values, indices = law.topk(min(ranks, law.shape[-1]))
        guesses = zip(level, _tokens(indices, words), values.tolist(), strict=True)
        grown = [child for node, ranked, logs in guesses for child in put(node, ranked, logs)]
        opened = set(sorted(grown, key=lambda node: -scores[node])[: shape.width])
        level = [node for node in best() if node in opened]
    while trail.depth < room and put(trail.node, [], []):  # the hint goes on where the draft did not look any further
        pass
    return scores, [0, *sorted(best())]


class _Trail:
    """A hint while a tree grows: the node it has come to, that node's depth, and what it expects below."""

    def __init__(self, hint: Hint) -> None:
        self.node = self.depth = 0
        self._steps = list(zip(hint.tokens, hint.logs, strict=True))

    def join(self, node: int, ranked: list[int], logs: list[float]) -> tuple[list[int], list[float]]:
        """The guesses after a node; at the trail's own node the hinted token is among them, in its place."""
        if not self._here(node):
            return ranked, logs
        law = dict(zip(ranked, logs, strict=True))
        token, log = self._steps[self.depth]
        law[token] = max(log, law.get(token, -math.inf))
        ranked = sorted(law, key=lambda one: -law[one])
        return ranked, [law[one] for one in ranked]

    def follow(self, node: int, children: Sequence[int], tokens: Sequence[int]) -> None:
        """Go on to the hinted one of the children that a node got, if it is there."""
        for child in children if self._here(node) else ():
            if tokens[child] == self._steps[self.depth][0]:
                self.node, self.depth = child, self.depth + 1
                return

    def _here(self, node: int) -> bool:
        return node == self.node and self.depth < len(self._steps)


def _tokens(indices: Tensor, words: Words | None) -> list[list[int]]:
    """Indices of draft logits as tokens of the target."""
    return (words.ids[indices] if words else indices).tolist()
