"""What a head is told was right, and how often it guessed it.

The label of a guess is the target's own law at that place, not the token that happened to be drawn: sixteen numbers
say more than one (distillation; Zhou et al., DistillSpec, arXiv 2310.08461).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdecode_ref.train.corpus import Batch

RANKS = 8
"""How many of a guess's best tokens are compared with the target's choice."""


class Labels:
    """A target's laws in a draft vocabulary. words: int64 [D], ascending, the target's tokens that the draft knows."""

    def __init__(self, words: Tensor, vocab_size: int) -> None:
        self._place = torch.full((vocab_size,), -1, device=words.device)
        self._place[words] = torch.arange(len(words), device=words.device)

    def at(self, batch: Batch, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The laws after tokens (row, column) [N]: draft ids [N, TOP], and probabilities, 0 for unknown words."""
        ids = self._place[batch.top_ids[rows, columns]]
        return ids, torch.where(ids >= 0, batch.top_logs[rows, columns].exp(), 0.0)


def loss(logits: Tensor, ids: Tensor, mass: Tensor) -> Tensor:
    """Cross-entropy [N] of draft logits [N, D] against laws given by `ids` and `mass` [N, TOP]."""
    return -(logits.log_softmax(-1).gather(1, ids.clamp_min(0)) * mass).sum(-1)


@dataclass
class Tally:
    """Guesses counted by depth: how many there were, and at which rank the target's own choice stood."""

    counts: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, depth: int, logits: Tensor, ids: Tensor) -> None:
        """Compare the best draft tokens of logits [N, D] with the target's first choices ids[:, 0]."""
        best = logits.topk(RANKS).indices
        hits = (best == ids[:, :1]).sum(0).cpu()
        row = torch.cat([torch.tensor([len(ids)]), hits]).double()
        self.counts[depth] = self.counts.get(depth, torch.zeros(RANKS + 1, dtype=torch.float64)) + row

    def acceptance(self) -> list[list[float]]:
        """By depth, the share of guesses whose rank 0, 1, ... was what the target chooses at temperature 0."""
        return [(self.counts[d][1:] / self.counts[d][0].clamp_min(1)).tolist() for d in sorted(self.counts)]

    @property
    def first(self) -> list[float]:
        """By depth, how often the best guess was right."""
        return [ranks[0] for ranks in self.acceptance()]

    def chain_tau(self) -> float:
        """Tokens a round of a greedy chain, were its guesses independent: 1 + a1 + a1 a2 + ..."""
        tau = product = 1.0
        for share in self.first:
            product *= share
            tau += product
        return tau
