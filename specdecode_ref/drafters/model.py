"""A second, cheaper language model as the drafter: a chain, or a sampled tree, with its own key-value cache.

It draws under the same sampling rule as the target, and the laws it drew from go into the tree as they are: they are
the q that verification divides by. `early_exit` makes a draft model out of the target's own first layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.errors import InputError
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import SamplingRule, law, pick, without
from specdecode_ref.tree import DraftTree, ancestors
from specdecode_ref.types import Context, Draw, Verdict


class ModelDrafter:
    """Drafts with `model`.

    branching: children of each node, depth by depth; (1, 1, 1, 1) is a chain with gamma = 4, (3, 2) a tree of 3 + 6.
    draw:      how siblings are drawn; makes no difference in a chain.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        branching: Sequence[int] = (1, 1, 1, 1),
        draw: Draw = "without_replacement",
        name: str = "model",
    ) -> None:
        if not branching or min(branching) < 1:
            raise InputError("one child or more at every depth of the draft", list(branching), "use numbers from 1 up")
        if draw not in ("with_replacement", "without_replacement"):
            raise InputError("a random draw", draw, "use with_replacement or without_replacement")
        self.model, self.branching, self.draw, self.name = model, tuple(branching), draw, name
        self.vocab_size = model.vocab_size

    @property
    def settings(self) -> Mapping[str, Any]:
        """For the trace's header."""
        shape = {"gamma": len(self.branching)} if max(self.branching) == 1 else {"tree": list(self.branching)}
        return {**shape, "draw": self.draw, "draft_model": self.model.name}

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> ModelProposer:
        """See `Drafter.start`: prefills the draft model's cache with all of the prompt but its last token."""
        return ModelProposer(self, prompt, rule)


class ModelProposer:
    """One sequence's draft cache. Between rounds it holds a prefix of the committed tokens and nothing else."""

    def __init__(self, drafter: ModelDrafter, prompt: Sequence[int], rule: SamplingRule) -> None:
        self._drafter, self._rule, self._prompt_length = drafter, rule, len(prompt)
        self.cache = drafter.model.new_cache(1, len(prompt) + 128)
        if 1 < len(prompt) <= drafter.model.context_length:
            drafter.model.prefill([prompt[:-1]], self.cache)

    def propose(self, context: Context, coins: Coins) -> DraftTree:
        """See `Proposer.propose`. One draft forward a depth, all its nodes at once; the deepest need none."""
        # The draft model's own context may be the shorter one; the deepest nodes are drawn without being forwarded.
        room = min(context.room, self._drafter.model.context_length + 1 - context.base)
        widths = self._drafter.branching[: max(room, 0)]
        if not widths:
            return DraftTree.bare(context.root)
        sketch = _Sketch(context)
        logits = self._catch_up(context.tokens)
        level = [0]
        for depth, width in enumerate(widths):
            if depth > 0:
                logits = self._forward([sketch.tokens[i] for i in level], [sketch.parents[i] - 1 for i in level])
            grown = []
            for node, row in zip(level, logits, strict=True):
                q = law(row, self._rule, sketch.history(node), self._prompt_length)
                grown += sketch.grow(node, q, width, self._drafter.draw, coins)
            level = grown
        return sketch.finish()

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """Keep the cached part of the accepted path. Node i of the tree was pending node i - 1 here."""
        forwarded = len(self.cache.pending[0])
        self.cache.commit([[i - 1 for i in verdict.path[1:] if i <= forwarded]])

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


class _Sketch:
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

    def grow(self, node: int, q: Tensor, width: int, draw: Draw, coins: Coins) -> list[int]:
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

    def finish(self) -> DraftTree:
        """The tree, frozen."""
        return DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self._draws), tuple(self._q))
