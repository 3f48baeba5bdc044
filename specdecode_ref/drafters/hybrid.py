"""A lookup and a head in one tree: what the text repeats costs nothing to guess, and the head guesses the rest.

Every round starts with a lookup. Where lookups of its kind have lately been right so often that a head would hardly add
anything, the chain that was found is the draft, and the head rests. Otherwise the chain goes into the head's own tree
as a hint: it competes for the tree's places with the probability that such lookups deserve.

All of this is decided by the tokens so far, and everything in the tree is chosen and not drawn, so it is lossless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.growth import Hint
from specdecode_ref.drafters.ngram import Lookup, NGram
from specdecode_ref.drafters.shapes import Dynamic, Shape
from specdecode_ref.errors import InputError
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict

PRIOR = {1: 0.2, 2: 0.4, 3: 0.6, 4: 0.75}
"""How often a lookup's token is right, by the length of the n-gram that led to it, before a text has shown its own."""

PRIOR_WEIGHT = 4
"""As if so many tokens had been seen."""


class Guesser(Drafter, Protocol):
    """A drafter that grows trees of a shape and takes a hint: EAGLE's head, Medusa's heads, a draft model."""

    shape: Shape


class Hybrid:
    """lookup: finds repetitions; head: guesses everywhere, in a dynamic tree.

    alone: a lookup whose tokens are right at least this often takes the round by itself.
    """

    def __init__(self, lookup: NGram, head: Guesser, alone: float = 0.8) -> None:
        if not isinstance(head.shape, Dynamic):
            raise InputError("a dynamic tree for a hybrid", head.shape, "use --tree dynamic:4,3,6 or auto")
        self.lookup, self.head, self.alone = lookup, head, alone
        self.name = "hybrid"
        self.features, self.vocab_size = head.features, head.vocab_size

    @property
    def shape(self) -> Shape:
        """The head's, which is the whole tree's."""
        return self.head.shape

    @property
    def settings(self) -> Mapping[str, Any]:
        """For the trace's header."""
        return {self.lookup.name: dict(self.lookup.settings), self.head.name: dict(self.head.settings)}

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> HybridProposer:
        """See `Drafter.start`."""
        return HybridProposer(self, self.lookup.start(prompt, rule), self.head.start(prompt, rule, features))


class HybridProposer:
    """One sequence: its index of n-grams, its head, and how often lookups of each length have been right in it."""

    def __init__(self, drafter: Hybrid, lookup: Lookup, head: Any) -> None:
        self._drafter, self._lookup, self._head = drafter, lookup, head
        self._right = {n: PRIOR_WEIGHT * share for n, share in PRIOR.items()}
        self._seen = dict.fromkeys(PRIOR, float(PRIOR_WEIGHT))
        self._last: tuple[int, int, Sequence[int]] = (0, 0, ())

    def propose(self, context: Context, coins: Coins) -> DraftTree:
        """See `Proposer.propose`."""
        self._learn(context.tokens)
        length, found = self._lookup.find(context.tokens)
        self._last = (context.base, length, found)
        if not found:
            return self._head.propose(context, coins)
        share = self.share(length)
        if share >= self._drafter.alone:
            nodes = min(self._drafter.shape.nodes, context.room)
            return DraftTree.chain(context.root, tuple(found[:nodes]))
        return self._head.propose(context, coins, Hint(found, [math.log(share)] * len(found)))

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """See `Proposer.observe`."""
        self._head.observe(verdict, features)

    def share(self, length: int) -> float:
        """How often a token found by an n-gram of that length has been right."""
        n = min(length, max(PRIOR))
        return self._right[n] / self._seen[n]

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compare the last lookup with what the text has become."""
        base, length, found = self._last
        n = min(length, max(PRIOR))
        for guess, token in zip(found, tokens[base:], strict=False):
            self._seen[n] += 1
            self._right[n] += guess == token
            if guess != token:
                break
