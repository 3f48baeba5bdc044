"""Medusa's heads (arXiv 2401.10774, section 2.1): the target's last thought, read K times, guesses K tokens at once.

Head 0 guesses the token after the root, head 1 the one after that, whatever the first may turn out to be: no guess
knows the others. So one look at a feature is enough for a whole tree, and a level of it shares one row of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.eagle import Norm
from specdecode_ref.drafters.growth import Hint, Sketch, Words, grow
from specdecode_ref.drafters.shapes import NAMED, Shape, Static
from specdecode_ref.models.linear import Linear
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree, ancestors
from specdecode_ref.types import Context, Verdict


class MedusaHeads:
    """K heads on the target's last feature.

    blocks:     for each head its residual blocks, W [hidden, hidden] of x + SiLU(W x + b).
    lm_heads:   [hidden] -> [D]: one that all heads share, or one for each.
    norm:       the target's final norm; the features that a drafter is given are those before it.
    layer:      how many layers the target has, which is the name of its last feature.
    vocab_size: the target's V.
    words:      the target's tokens that the D logits stand for, where D is not V.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Linear]],
        lm_heads: Sequence[Linear],
        norm: Norm,
        layer: int,
        vocab_size: int,
        words: Words | None = None,
        name: str = "medusa",
    ) -> None:
        assert len(lm_heads) in (1, len(blocks))
        self.blocks, self.lm_heads, self.norm = blocks, lm_heads, norm
        self.layer, self.vocab_size, self.words, self.name = layer, vocab_size, words, name

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def logits(self, feature: Tensor) -> Tensor:
        """Draft logits [..., K, D] of all heads after features [..., hidden]. A shared LM head is read once for all."""
        thought = self.norm(feature)[..., None, :]
        rows = []
        for blocks in self.blocks:
            x = thought
            for block in blocks:
                x = x + silu(block(x))
            rows.append(x)
        if len(self.lm_heads) == 1:
            return self.lm_heads[0](torch.cat(rows, -2))
        return torch.cat([head(x) for head, x in zip(self.lm_heads, rows, strict=True)], -2)


class Medusa:
    """Drafts with Medusa's heads. shape: the tree to grow; no deeper than there are heads."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads, shape: Shape | None = None) -> None:
        self.heads, self.shape = heads, shape or Static(NAMED["narrow"])
        self.features = (heads.layer,)
        self.vocab_size = heads.vocab_size

    @property
    def settings(self) -> Mapping[str, Any]:
        """For the trace's header."""
        return {"tree": str(self.shape), "head": self.heads.name}

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> MedusaProposer:
        """See `Drafter.start`."""
        return MedusaProposer(self, rule, features)


class MedusaProposer:
    """One sequence's newest feature: that of the token before the root, the last one the target has seen."""

    def __init__(self, drafter: Medusa, rule: SamplingRule, features: Sequence[Tensor]) -> None:
        self._drafter, self._rule = drafter, rule
        self._feature = features[0][-1] if features and len(features[0]) else None

    def propose(self, context: Context, coins: Coins, hint: Hint | None = None) -> DraftTree:
        """See `Proposer.propose`. Without a feature (a prompt of one token) there is nothing to start from."""
        heads = self._drafter.heads
        room = min(context.room, len(heads))
        if room < 1 or self._feature is None:
            return DraftTree.bare(context.root)
        logits = heads.logits(self._feature)

        def after(sketch: Sketch, level: Sequence[int]) -> Tensor:
            depth = len(ancestors(sketch.parents, level[0])) - 1
            return logits[depth].expand(len(level), -1)

        return grow(self._drafter.shape, replace(context, room=room), self._rule, coins, after, heads.words, hint).tree

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """Keep the target's feature of the last accepted token, whoever drafted it."""
        self._feature = features[0][-1]
