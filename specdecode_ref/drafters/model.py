"""A second, cheaper language model as the drafter, with a key-value cache of its own.

Where its tokens are drawn, they are drawn under the same sampling rule as the target's, and the laws they were drawn
from go into the tree as they are: they are the q that verification divides by. `early_exit` makes a draft model out of
the target's own first layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.growth import Hint, Sketch, Words, grow
from specdecode_ref.drafters.shapes import Sampled, Shape
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Draw, Verdict


class ModelDrafter:
    """Drafts with `model`.

    shape: the tree to grow, or the children of each node, depth by depth: (1, 1, 1, 1) is a chain with gamma = 4,
           (3, 2) a tree of 3 + 6.
    draw:  how siblings are drawn, where `shape` is such a list.
    words: the target's tokens that the model's logits stand for, where it has a reduced vocabulary.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        shape: Shape | Sequence[int] = (1, 1, 1, 1),
        draw: Draw = "without_replacement",
        name: str = "model",
        words: Words | None = None,
    ) -> None:
        self.shape = Sampled(tuple(shape), draw) if isinstance(shape, Sequence) else shape
        self.model, self.name, self.words = model, name, words
        self.vocab_size = words.size if words else model.vocab_size

    @property
    def settings(self) -> Mapping[str, Any]:
        """For the trace's header."""
        return {"tree": str(self.shape), "draft_model": self.model.name}

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> ModelProposer:
        """See `Drafter.start`: prefills the draft model's cache with all of the prompt but its last token."""
        return ModelProposer(self, prompt, rule)


class ModelProposer:
    """One sequence's draft cache. Between rounds it holds a prefix of the committed tokens and nothing else."""

    def __init__(self, drafter: ModelDrafter, prompt: Sequence[int], rule: SamplingRule) -> None:
        self._drafter, self._rule = drafter, rule
        self._pending: dict[int, int] = {}  # node of the tree -> its place among the cache's pending nodes
        self.cache = drafter.model.new_cache(1, len(prompt) + 128)
        if 1 < len(prompt) <= drafter.model.context_length:
            drafter.model.prefill([prompt[:-1]], self.cache)

    def propose(self, context: Context, coins: Coins, hint: Hint | None = None) -> DraftTree:
        """See `Proposer.propose`. One draft forward a depth, all its nodes at once; the deepest need none."""
        # The draft model's own context may be the shorter one; the deepest nodes are never forwarded.
        room = min(context.room, self._drafter.model.context_length + 1 - context.base)
        if room < 1:
            return DraftTree.bare(context.root)
        self._pending = {}
        shape, words = self._drafter.shape, self._drafter.words
        grown = grow(shape, replace(context, room=room), self._rule, coins, self._after, words, hint)
        self._pending = {i: self._pending[node] for i, node in enumerate(grown.origin) if node in self._pending}
        return grown.tree

    def _after(self, sketch: Sketch, level: Sequence[int]) -> Tensor:
        """Draft logits [nodes, D] after the nodes of a level; the first level is the root."""
        if level[0] == 0:
            return self._catch_up(sketch.history(0))
        parents = [self._pending.get(sketch.parents[node], -1) for node in level]
        first = len(self.cache.pending[0])
        self._pending |= {node: first + i for i, node in enumerate(level)}
        return self._forward([sketch.tokens[node] for node in level], parents)

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """Keep the cached part of the accepted path."""
        path = [self._pending[node] for node in verdict.path[1:] if node in self._pending]
        self.cache.commit([path])
        self._pending = {}

    def _catch_up(self, tokens: Sequence[int]) -> Tensor:
        """Commit what is not cached yet, the root included; logits [1, V] after the root.

        Drops the pending nodes of a proposal that was never judged, as when another drafter took the round.
        """
        self.cache.rollback()
        missing = list(tokens[self.cache.lengths[0] :])
        logits = self._forward(missing, list(range(-1, len(missing) - 1)))
        self.cache.commit([range(len(missing))])
        return logits[-1:]

    def _forward(self, tokens: list[int], parents: list[int]) -> Tensor:
        model = self._drafter.model
        return model.forward(torch.tensor([tokens], device=model.device), [parents], self.cache).logits[0]
