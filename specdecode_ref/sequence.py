"""One sequence while it decodes: its tokens, coins, text and rounds, and when it must end.

`decode` moves a batch of these forward a round at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.base import Proposer
from specdecode_ref.stream import Piece, Stream
from specdecode_ref.trace import CutRound, Round
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Cut, Verdict


class Running:
    """prompt: its token ids. limit: the most tokens, prompt included, that the sequence may have."""

    def __init__(self, prompt: tuple[int, ...], limit: int, coins: Coins, stream: Stream) -> None:
        self.prompt, self.limit, self.coins, self.stream = prompt, limit, coins, stream
        self.tokens = list(prompt)
        self.proposer: Proposer | None = None
        self.rounds: list[Round] = []
        self.text = ""
        self.ns_prefill = self.ns_total = 0

    def propose(self) -> DraftTree:
        """This round's draft, no deeper than the limit allows, which is known before anything is drawn."""
        if self.proposer is None:
            return DraftTree.bare(self.tokens[-1])
        room = self.limit - len(self.tokens) - 1
        return self.proposer.propose(Context(self.tokens, len(self.prompt), room), self.coins)

    def take(self, drafted: Sequence[int], verdict: Verdict, eos: Sequence[int]) -> tuple[CutRound | None, list[Piece]]:
        """Append the round's tokens up to the first one that ends the text; the text that is now certain."""
        emitted = [(drafted[i], "draft") for i in verdict.path[1:]] + [(verdict.token, verdict.kind)]
        pieces: list[Piece] = []
        cut = None
        for kept, (token, tag) in enumerate(emitted, 1):
            self.tokens.append(token)
            pieces += self.stream.push(token, tag)
            if reason := self._end(token, eos):
                cut = CutRound(reason, kept)
                break
        if cut:
            pieces += self.stream.finish()
        self.text += "".join(piece.text for piece in pieces)
        return cut, pieces

    def cancel(self) -> None:
        """End here: what the stream still held is text after all."""
        self.text += "".join(piece.text for piece in self.stream.finish())

    def _end(self, token: int, eos: Sequence[int]) -> Cut | None:
        if token in eos:
            return "eos"
        if self.stream.stopped:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None
