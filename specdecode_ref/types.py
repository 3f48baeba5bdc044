"""The small frozen records that pass between the rooms of this package.

They hold values only: no model, no randomness, no state. The letters are the field's (p target, q draft, u coin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Draw = Literal["with_replacement", "without_replacement", "deterministic"]
"""How a draft token was chosen among its siblings; it decides the law that verification must divide by."""

Kind = Literal["bonus", "residual", "target"]
"""Where a round's last token came from: `p` after an accepted path, the residual after a rejection, or plain `p`."""

Cut = Literal["eos", "stop", "length"]
"""Why a generation ended by itself; one that was stopped from outside is "cancelled"."""


@dataclass(frozen=True, slots=True)
class Test:
    """One decision of a verifier: `node` was drawn from `q_eff`, tested against `p_eff` with the coin `u`.

    `p_eff` and `q_eff` are the probabilities of the node's token at the moment of the test.
    """

    __test__ = False  # not a test case, whatever pytest thinks of the name

    node: int
    p_eff: float
    q_eff: float
    u: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decided: the accepted path (root first), one more token, and every test in order.

    The round emits `len(path)` tokens: those of `path[1:]`, then `token`. `law` [V] is the law `token` was picked from.
    """

    path: tuple[int, ...]
    token: int
    kind: Kind
    tests: tuple[Test, ...]
    law: Tensor = field(compare=False, repr=False)

    @property
    def accepted(self) -> int:
        """How many drafted tokens were accepted."""
        return len(self.path) - 1


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter may look at when a round starts.

    `tokens` are all committed tokens, the last one being the root; `room` is the deepest draft that can still be used
    before the length limit. How deep to draft must be fixed from this alone, before anything is drawn.
    """

    tokens: Sequence[int]
    prompt_length: int
    room: int

    @property
    def root(self) -> int:
        """The last committed token, node 0 of the tree; its keys and values are not cached yet."""
        return self.tokens[-1]

    @property
    def base(self) -> int:
        """How many tokens are committed: the part of a coin's key that strictly grows from round to round."""
        return len(self.tokens)
