"""The contract of a drafter: propose a tree, then hear what became of it.

A drafter never affects the output law, only how many tokens a round emits, as long as the tree it returns holds the
very law each token was drawn from, in the order drawn. A `Drafter` holds what sequences share (weights, settings);
`start` gives a `Proposer`, which holds what belongs to one sequence (a cache, an index).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict


class Proposer(Protocol):
    """Drafts for one sequence."""

    def propose(self, context: Context, coins: Coins) -> DraftTree:
        """A tree whose root is `context.root` and whose depth is at most `context.room`.

        Node i is drawn with `coins.draft(context.base, i)`. How many children a node gets is fixed before any is drawn.
        """
        ...

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """What became of the round; `features` [path, hidden] of the target's layers this drafter asked for.

        The proposal may have been another drafter's, where several take turns.
        """
        ...


class Drafter(Protocol):
    """Makes proposers. `features` is as in `Model.forward`."""

    @property
    def name(self) -> str:
        """What the trace calls it."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """The target's layers it wants to see."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary it drafts in; None where it can only repeat the target's own tokens."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the trace's header records: gamma or the tree in use, and whatever else decides the drafts."""
        ...

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> Proposer:
        """A proposer for a sequence with this prompt; `features` [P - 1, hidden] of all its tokens but the last."""
        ...
