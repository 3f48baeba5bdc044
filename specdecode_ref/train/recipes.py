"""Three drafters to train, each a dictionary of weights and what it guesses from a batch of the target's own text.

Embeddings and LM head are the target's and stay as they are; the head only guesses a reduced vocabulary, so the
largest product of a small draft shrinks with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from specdecode_ref.drafters.eagle import Norm
from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.layouts import save_draft, save_eagle, save_medusa
from specdecode_ref.drafters.layouts.host import Host
from specdecode_ref.models.base import Model
from specdecode_ref.models.config import TransformerConfig
from specdecode_ref.models.linear import Linear, unpack
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.train.corpus import Batch
from specdecode_ref.train.labels import Labels
from specdecode_ref.train.network import Past, Sizes, attend, mlp, rms

QUIET = 0.2
"""A draft's last norm begins at so much of the target's: random streams behind a trained LM head would be loud."""

SHALLOW = 0.6
"""For so much of its training an EAGLE head makes first guesses only: they are cheap, and the others build on them."""


class Guess(NamedTuple):
    """Draft logits [N, D] at one depth (0: the token after the root), and the laws they should be, as `Labels.at`."""

    depth: int
    logits: Tensor
    ids: Tensor
    mass: Tensor


class Recipe(Protocol):
    """A drafter in training. weights: what is trained."""

    weights: dict[str, Tensor]

    def guesses(self, batch: Batch, done: float = 1.0) -> Iterator[Guess]:
        """What it makes of a batch, depth by depth, when that share of the training is done."""
        ...

    def save(self, folder: Path, note: Mapping[str, Any]) -> None:
        """Write the checkpoint that `layouts.load` reads."""
        ...


@dataclass(frozen=True)
class Shared:
    """What every recipe needs of its target.

    table: float32 [V, hidden], its embeddings; head: float32 [D, hidden], the rows of its LM head for the `words` that
    the draft may say; norm: its final norm; first_norm: [hidden], where a draft's own last norm begins.
    """

    target: Model
    config: TransformerConfig
    table: Tensor
    head: Tensor
    norm: Norm
    first_norm: Tensor
    words: Words
    labels: Labels

    @classmethod
    def of(cls, target: Any, words: Tensor) -> Shared:
        """words: int64 [D], ascending. The target is an in-house transformer, or a `transformers` model."""
        host = Host.of(target)
        in_house = isinstance(target, Transformer)
        words = words.to(host.device)

        @torch.no_grad()
        def norm(x: Tensor) -> Tensor:
            return host.norm(x.to(host.dtype)).to(x.dtype)

        return cls(
            target=target,
            config=target.config if in_house else _like(target.text, host),
            table=host.table.float(),
            head=host.rows(words).float(),
            norm=norm,
            first_norm=QUIET * (target.norm.float() if in_house else torch.ones(host.hidden, device=host.device)),
            words=Words(words, host.vocab_size),
            labels=Labels(words, host.vocab_size),
        )

    def layer(self, intermediate: int, layers: int) -> dict[str, Any]:
        """Sizes of a draft's layers as a `config.json` has them: the target's attention, a feed-forward of choice."""
        c = self.config
        return {
            "model_type": "llama",
            "hidden_size": c.hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "rms_norm_eps": c.eps,
            "rope_theta": c.rope.theta,
            "max_position_embeddings": c.context_length,
            "tie_word_embeddings": False,
        }

    @property
    def sizes(self) -> Sizes:
        """The same, as `network` wants them."""
        c = self.config
        turn = replace(c.rope, kind="default").inverse_frequencies(c.head_dim)
        return Sizes(c.heads, c.kv_heads, c.head_dim, c.eps, turn.to(self.table.device))

    def guess(self, depth: int, batch: Batch, x: Tensor, norm: Tensor | None, after: Tensor, wanted: Tensor) -> Guess:
        """The guesses of x [B, M, hidden] where `wanted` [B, M]; column m is to be the law after token `after[m]`."""
        rows, columns = wanted.nonzero(as_tuple=True)
        x = x[rows, columns]
        logits = linear(x if norm is None else rms(x, norm, self.config.eps), self.head)
        return Guess(depth, logits, *self.labels.at(batch, rows, after[columns]))


def _like(text: Any, host: Host) -> TransformerConfig:
    """Sizes for a draft's layers that suit a `transformers` model of any family, whose configuration this is."""
    sizes = {
        "model_type": "llama",
        "vocab_size": host.vocab_size,
        "hidden_size": host.hidden,
        "intermediate_size": host.hidden,
        "num_hidden_layers": host.layers,
        "max_position_embeddings": text.max_position_embeddings,
    }
    same = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    return TransformerConfig.read(sizes | {name: getattr(text, name) for name in same if hasattr(text, name)})


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.02


PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
"""What a layer is made of, in Hugging Face's names."""


def _named(at: str, *weights: Tensor) -> dict[str, Tensor]:
    return {f"{at}{part}.weight": weight for part, weight in zip(PARTS, weights, strict=True)}


def _layer(at: str, shared: Shared, inputs: int, intermediate: int) -> dict[str, Tensor]:
    """Random weights of one layer whose attention reads `inputs` channels."""
    c = shared.config
    q, kv, norm = c.heads * c.head_dim, c.kv_heads * c.head_dim, torch.ones(c.hidden)
    attention = (_random(q, inputs), _random(kv, inputs), _random(kv, inputs), _random(c.hidden, q))
    mlp = (_random(intermediate, c.hidden), _random(intermediate, c.hidden), _random(c.hidden, intermediate))
    return _named(at, *attention, *mlp, norm, norm.clone())


def _first_layer(i: int, target: Model, intermediate: int) -> dict[str, Tensor]:
    """The target's layer i under a draft's names, without the neurons that move the stream least.

    Empty where the draft cannot begin with it: it would be wider, or the target has no such layer (Qwen3's norms its
    queries and keys, which the draft's does not).
    """
    if not isinstance(target, Transformer) or i >= len(target.layers):
        return {}
    layer, c = target.layers[i], target.config
    if intermediate > c.intermediate or layer.q_norm is not None:
        return {}
    inner, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def matrix(product: Linear, inputs: int) -> Tensor:
        return unpack(product, inputs, target.dtype, target.device).float()

    attention = (*matrix(layer.qkv, c.hidden).split([inner, kv, kv]), matrix(layer.output, inner))
    gate, up = matrix(layer.gate_up, c.hidden).chunk(2)
    down = matrix(layer.down, c.intermediate)
    kept = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(intermediate).indices
    norms = (layer.attention_norm.float(), layer.mlp_norm.float())
    return _named(f"model.layers.{i}.", *attention, gate[kept], up[kept], down[:, kept], *norms)


class EagleRecipe:
    """EAGLE-3's head with its training-time test (arXiv 2503.01840, section 3.2): from the second guess on, the head
    reads its own output where the target's feature will not be there yet."""

    def __init__(
        self, shared: Shared, layers: tuple[int, ...], depths: int = 3, intermediate: int = 1536, hidden_layers: int = 1
    ) -> None:
        self.shared, self.layers, self.depths, self.count = shared, layers, depths, hidden_layers
        self.sizes, self.layer = shared.sizes, shared.layer(intermediate, hidden_layers)
        hidden = shared.config.hidden
        self.weights = {"fc.weight": _random(hidden, len(layers) * hidden), "norm.weight": shared.first_norm}
        for i in range(hidden_layers):
            self.weights |= _layer(f"layers.{i}.", shared, hidden if i else 2 * hidden, intermediate)
        self.weights["layers.0.hidden_norm.weight"] = torch.ones(hidden)

    def guesses(self, batch: Batch, done: float = 1.0) -> Iterator[Guess]:
        """Place i of the sequence holds the feature at token i, and at depth d the token at i + 1 + d."""
        w, eps, length = self.weights, self.sizes.eps, batch.tokens.shape[1] - 1
        features = rms(batch.features, None, eps).flatten(2)
        x = linear(features[:, :length], w["fc.weight"])
        tokens = embedding(batch.tokens, self.shared.table)
        pasts = [Past([], []) for _ in range(self.count)]
        start = int(batch.wanted(2).any(0).nonzero()[0])  # before it nothing is guessed: only the first pass reads it
        for depth in range(self.depths if done >= SHALLOW else 1):
            first = 0 if depth == 0 else start
            after = torch.arange(first, length, device=x.device) + 1 + depth
            token = rms(tokens[:, after.clamp_max(length)], w["layers.0.input_layernorm.weight"], eps)
            for i, past in enumerate(pasts):
                at = f"layers.{i}."
                seen = rms(x, w[at + ("input_layernorm.weight" if i else "hidden_norm.weight")], eps)
                seen = seen if i else torch.cat((token, seen), -1)
                x = x + attend(w, at + "self_attn.", self.sizes, seen, depth, past, first)
                x = x + mlp(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"], eps))
            wanted = batch.wanted(2 + depth)[:, first:length]
            yield self.shared.guess(depth, batch, x, w["norm.weight"], after, wanted)
            x = x[:, start:] if depth == 0 else x

    def save(self, folder: Path, note: Mapping[str, Any]) -> None:
        """See `Recipe.save`."""
        save_eagle(
            folder, self.weights, self.shared.target, self.layer, self.layers, words=self.shared.words, note=note
        )


class MedusaRecipe:
    """Medusa's heads, one residual block each (arXiv 2401.10774, section 2.1), trained together on a frozen target."""

    def __init__(self, shared: Shared, heads: int = 4) -> None:
        self.shared, self.heads = shared, heads
        hidden = shared.config.hidden
        self.weights = {}
        for head in range(heads):  # zeros: each head begins as the target's own LM head
            self.weights[f"blocks.{head}.layers.0.weight"] = torch.zeros(hidden, hidden)
            self.weights[f"blocks.{head}.layers.0.bias"] = torch.zeros(hidden)

    def guesses(self, batch: Batch, done: float = 1.0) -> Iterator[Guess]:
        """Head d reads the feature at token i and guesses the law after token i + 1 + d."""
        length = batch.tokens.shape[1] - 1
        thought = self.shared.norm(batch.features[:, :length, 0])
        for head in range(self.heads):
            at = f"blocks.{head}.layers.0."
            x = thought + silu(linear(thought, self.weights[at + "weight"], self.weights[at + "bias"]))
            after = torch.arange(length, device=x.device) + 1 + head
            yield self.shared.guess(head, batch, x, None, after, batch.wanted(2 + head)[:, :length])

    def save(self, folder: Path, note: Mapping[str, Any]) -> None:
        """See `Recipe.save`."""
        save_medusa(folder, self.weights, self.shared.target, words=self.shared.words, note=note)


class DraftRecipe:
    """A small language model of the target's width, embeddings and LM head, distilled from its laws.

    It begins as the target's first layers, which know more of language than a million tokens could teach.
    """

    def __init__(self, shared: Shared, hidden_layers: int = 3, intermediate: int = 1280) -> None:
        self.shared, self.count = shared, hidden_layers
        self.sizes, self.layer = shared.sizes, shared.layer(intermediate, hidden_layers)
        self.weights = {"model.norm.weight": shared.first_norm}
        for i in range(hidden_layers):
            self.weights |= _layer(f"model.layers.{i}.", shared, shared.config.hidden, intermediate)
            self.weights |= _first_layer(i, shared.target, intermediate)

    def guesses(self, batch: Batch, done: float = 1.0) -> Iterator[Guess]:
        """A language model guesses deeper tokens as it guesses the next one, so there is one depth to train."""
        w, eps, length = self.weights, self.sizes.eps, batch.tokens.shape[1] - 1
        x = embedding(batch.tokens[:, :length], self.shared.table)
        for i in range(self.count):
            at = f"model.layers.{i}."
            seen = rms(x, w[at + "input_layernorm.weight"], eps)
            x = x + attend(w, at + "self_attn.", self.sizes, seen, 0, Past([], []))
            x = x + mlp(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"], eps))
        after = torch.arange(length, device=x.device)
        yield self.shared.guess(0, batch, x, w["model.norm.weight"], after, batch.wanted(1)[:, :length])

    def save(self, folder: Path, note: Mapping[str, Any]) -> None:
        """See `Recipe.save`."""
        save_draft(folder, self.weights, self.shared.target, self.layer, words=self.shared.words, note=note)
