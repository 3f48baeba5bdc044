"""Several drafters, one after another: the first that has something to propose takes the round.

The choice is made before anything random is drawn (a drafter with nothing to say returns a bare tree without drawing),
so it cannot bias the output law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.base import Drafter, Proposer
from specdecode_ref.errors import InputError
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict


class First:
    """`First([ngram, model])` looks the text up and asks the model where that finds nothing."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise InputError("at least one drafter", "none", "name one, or draft nothing with None")
        self.drafters = tuple(drafters)
        self.name = "+".join(d.name for d in self.drafters)
        self.features = tuple(f for d in self.drafters for f in d.features)
        self.vocab_size = next((d.vocab_size for d in self.drafters if d.vocab_size is not None), None)

    @property
    def settings(self) -> Mapping[str, Any]:
        """For the trace's header."""
        return {d.name: dict(d.settings) for d in self.drafters}

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> FirstProposer:
        """See `Drafter.start`."""
        shares = self._shares(features)
        return FirstProposer(
            [d.start(prompt, rule, f) for d, f in zip(self.drafters, shares, strict=True)], self._shares
        )

    def _shares(self, features: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Each drafter's own part of the features."""
        left = list(features)
        return [[left.pop(0) for _ in d.features] for d in self.drafters]


class FirstProposer:
    """The proposers of one sequence. All hear of every verdict: those that read features need all of them."""

    def __init__(
        self, proposers: Sequence[Proposer], shares: Callable[[Sequence[Tensor]], list[Sequence[Tensor]]]
    ) -> None:
        self._proposers, self._shares = proposers, shares

    def propose(self, context: Context, coins: Coins) -> DraftTree:
        """See `Proposer.propose`."""
        tree = DraftTree.bare(context.root)
        for proposer in self._proposers:
            tree = proposer.propose(context, coins)
            if len(tree) > 1:
                break
        return tree

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """See `Proposer.observe`."""
        for proposer, share in zip(self._proposers, self._shares(features), strict=True):
            proposer.observe(verdict, share)
