"""Prompt lookup: the draft is whatever followed the last time these tokens stood here.

No model, no training, no cost, and very good where the output repeats its input: summaries, edits, code, JSON. The
longest n-gram wins, and of its occurrences the latest. (Saxena, "Prompt lookup decoding", 2023; vLLM and llama.cpp call
it n-gram speculation.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.errors import InputError
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict


@dataclass(frozen=True)
class NGram:
    """Looks for the last `longest` .. `shortest` tokens earlier in the text and proposes the `gamma` that followed.

    A single token recurs everywhere and says little about what follows, so by default a match needs two.
    """

    gamma: int = 6
    longest: int = 4
    shortest: int = 2
    name: ClassVar[str] = "ngram"
    vocab_size: ClassVar[int | None] = None
    features: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise InputError("gamma of 1 or more", self.gamma, "use the drafter 'none' to draft nothing")
        if not 1 <= self.shortest <= self.longest:
            raise InputError(
                "1 <= shortest <= longest", (self.shortest, self.longest), "choose n-gram lengths in order"
            )

    @property
    def settings(self) -> Mapping[str, Any]:
        """For the trace's header."""
        return {"gamma": self.gamma, "longest": self.longest, "shortest": self.shortest}

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> Lookup:
        """See `Drafter.start`."""
        return Lookup(self)


class Lookup:
    """An index of every n-gram seen so far: where its latest occurrence ends. Grows by the tokens of each round."""

    def __init__(self, settings: NGram) -> None:
        self._settings = settings
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, context: Context, coins: Coins) -> DraftTree:
        """See `Proposer.propose`. The tokens are deterministic; no match gives a bare tree."""
        _, found = self.find(context.tokens)
        return DraftTree.chain(context.root, tuple(found[: max(context.room, 0)]))

    def find(self, tokens: Sequence[int]) -> tuple[int, Sequence[int]]:
        """How long an n-gram was found again, and the tokens that followed it, at most gamma; (0, ()) for none."""
        self._index(tokens)
        for n in range(min(self._settings.longest, len(tokens) - 1), self._settings.shortest - 1, -1):
            end = self._ends.get(tuple(tokens[-n:]))
            if end is not None:
                return n, tokens[end : end + self._settings.gamma]
        return 0, ()

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """Nothing to learn: the committed tokens say it all."""

    def _index(self, tokens: Sequence[int]) -> None:
        """Add every n-gram that ends before the last token: the one that ends there is the question, not an answer."""
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(self._settings.shortest, min(self._settings.longest, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
