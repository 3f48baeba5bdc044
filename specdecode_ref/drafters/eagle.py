"""EAGLE's head: a transformer of one or two layers that continues the target's own features.

Where a draft model starts from tokens alone, this head also reads what the target thought at the tokens before: the
residual stream of several layers, fused into one vector (EAGLE-3, arXiv 2503.01840, section 3.1). Beside the feature at
position t it is given the token at t + 1, which the target has already chosen, and guesses the one at t + 2. For deeper
guesses its own last output stands in for the feature it does not have yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding

from specdecode_ref.cache import Cache
from specdecode_ref.coins import Coins
from specdecode_ref.drafters.growth import Hint, Sketch, Words, grow
from specdecode_ref.drafters.shapes import Shape, chain
from specdecode_ref.models.config import TransformerConfig
from specdecode_ref.models.layers import Weights
from specdecode_ref.models.linear import Linear
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict

Norm = Callable[[Tensor], Tensor]
"""x [..., size] -> x [..., size], normed over its last dimension."""


@dataclass(frozen=True)
class Fusion:
    """What turns the target's features and a token into the head's input. Published heads differ here and only here.

    layers:     which of the target's residual streams are read (k: after k layers).
    fuse:       [layers * target's hidden] -> [hidden].
    token_norm: the norm of the token's embedding; the first layer attends to it beside the fused feature. None in
                EAGLE-1 (arXiv 2401.15077, section 4.1), where `fuse` joins [token | feature] before that layer.
    norms:      a norm for each feature before they are joined (EAGLE-3.1), or none.
    joint_norm: a norm for the features joined.
    from_norm:  the residual stream starts from the fused feature behind the first layer's norm, not before it.
    final_norm: where the head's last norm stands: before its LM head, on its output (so that deeper guesses read the
                normed stream), or nowhere.
    """

    layers: tuple[int, ...]
    fuse: Linear
    token_norm: Tensor | None
    norms: tuple[Norm, ...] = ()
    joint_norm: Norm | None = None
    from_norm: bool = False
    final_norm: Literal["head", "output", "none"] = "head"


class EagleHead(Transformer):
    """The head's network. The first layer's queries, keys and values read [token | feature], twice the width."""

    def __init__(self, config: TransformerConfig, weights: Weights, fusion: Fusion, name: str, words: Words | None):
        super().__init__(config, weights, name)
        self.fusion, self.words = fusion, words

    def fused(self, features: Sequence[Tensor]) -> Tensor:
        """The target's features, [N, target's hidden] a layer, as what the head reads beside a token, [N, hidden]."""
        fusion = self.fusion
        parts = [f.to(self.dtype) for f in features]
        if fusion.norms:
            parts = [norm(f) for norm, f in zip(fusion.norms, parts, strict=True)]
        joined = torch.cat(parts, -1)
        if fusion.joint_norm:
            joined = fusion.joint_norm(joined)
        return joined if fusion.token_norm is None else fusion.fuse(joined)

    @torch.no_grad()
    def read(self, tokens: Sequence[int], features: Tensor, parents: Sequence[int], cache: Cache) -> Tensor:
        """The head's output [N, hidden] after nodes (token, feature [hidden]) that are appended to the cache."""
        where = cache.append([parents])
        token = embedding(torch.tensor([tokens], device=self.device), self.table).to(self.dtype)
        x, seen = self._enter(token, features[None])
        rotation, attend = self._rotation(where.positions), self._cached(where, cache)
        for i, layer in enumerate(self.layers):
            if i > 0:
                seen = self._rms(x, layer.attention_norm)
            x = x + self._attention(i, layer, seen, rotation, attend)
            x = x + self._mlp(layer, self._rms(x, layer.mlp_norm))
        return (self._rms(x, self.norm) if self.fusion.final_norm == "output" else x)[0]

    def _enter(self, token: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream before the first layer, and what that layer attends to."""
        fusion = self.fusion
        if fusion.token_norm is None:
            x = fusion.fuse(torch.cat((token, feature), -1))
            return x, x
        seen = self._rms(feature, self.layers[0].attention_norm)
        x = seen if fusion.from_norm else feature
        return x, torch.cat((self._rms(token, fusion.token_norm), seen), -1)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Draft logits [N, D] of the head's output [N, hidden]."""
        return self.head(self._rms(x, self.norm) if self.fusion.final_norm == "head" else x)


def rms_norm(weight: Tensor, eps: float) -> Norm:
    """The root-mean-square norm with these weights: layers differ in scale by orders of magnitude, some tokens too."""

    def norm(x: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    return norm


class Eagle:
    """Drafts with an EAGLE head. shape: the tree to grow."""

    name = "eagle"

    def __init__(self, head: EagleHead, shape: Shape | None = None) -> None:
        self.head, self.shape = head, shape or chain(4)
        self.features = head.fusion.layers
        self.vocab_size = head.words.size if head.words else head.vocab_size

    @property
    def settings(self) -> Mapping[str, Any]:
        """For the trace's header."""
        return {"tree": str(self.shape), "head": self.head.name}

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> EagleProposer:
        """See `Drafter.start`."""
        return EagleProposer(self, prompt, rule, features)


class EagleProposer:
    """One sequence's head cache: an entry for every committed token but the first, at the feature before it.

    Guesses are appended behind it while a tree grows and dropped when the next begins: once the target has judged them,
    its true features take their place.
    """

    def __init__(
        self, drafter: Eagle, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()
    ) -> None:
        self._drafter, self._head, self._rule = drafter, drafter.head, rule
        self.cache = self._head.new_cache(1, len(prompt) + 128)
        self._fresh = [self._head.fused(features)] if len(prompt) > 1 else []
        self._streams: dict[int, tuple[Tensor, int]] = {}

    def propose(self, context: Context, coins: Coins, hint: Hint | None = None) -> DraftTree:
        """See `Proposer.propose`. Without a feature (a prompt of one token) there is nothing to start from."""
        room = min(context.room, self._head.context_length + 1 - context.base)
        if room < 1 or not (self._fresh or self._streams):
            return DraftTree.bare(context.root)
        self._catch_up(context.tokens)
        shape, words = self._drafter.shape, self._head.words
        return grow(shape, replace(context, room=room), self._rule, coins, self._after, words, hint).tree

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        """Keep the target's features of the path, whoever drafted it."""
        self._fresh.append(self._head.fused(features))

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Read the tokens whose true features have come since the last draft."""
        self.cache.rollback()
        if self._fresh:
            features = torch.cat(self._fresh)
            first = self.cache.lengths[0]
            x = self._head.read(tokens[first + 1 :], features, range(-1, len(features) - 1), self.cache)
            self.cache.commit([range(len(features))])
            self._fresh = []
            self._root = x[-1]
        self._streams = {0: (self._root, -1)}

    def _after(self, sketch: Sketch, level: Sequence[int]) -> Tensor:
        """Draft logits [nodes, D] after the nodes of a level; each takes its parent's stream for its feature."""
        if level[0] == 0:
            return self._head.logits(self._root[None])
        streams, places = zip(*(self._streams[sketch.parents[node]] for node in level), strict=True)
        first = len(self.cache.pending[0])
        x = self._head.read([sketch.tokens[node] for node in level], torch.stack(streams), places, self.cache)
        self._streams |= {node: (x[i], first + i) for i, node in enumerate(level)}
        return self._head.logits(x)
