"""A small draft model: a Llama in Hugging Face's layout, which may share its embeddings or speak fewer words."""

from __future__ import annotations

from typing import NamedTuple

from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.layouts.checkpoint import Checkpoint
from specdecode_ref.models.layers import Weights
from specdecode_ref.models.linear import pack
from specdecode_ref.models.transformer import Transformer


class DraftModel(NamedTuple):
    """The model, and the target's tokens that its logits stand for where it has a reduced vocabulary (`d2t`)."""

    model: Transformer
    words: Words | None


def read(checkpoint: Checkpoint, name: str) -> DraftModel:
    """The model of a checkpoint. Where it ties its embeddings, the LM head is the table's rows of its words."""
    c, host, words = checkpoint.layer_config(), checkpoint.host, checkpoint.words()
    table = checkpoint.table("model.embed_tokens.weight", c.hidden, borrow=False)
    if c.tied and "lm_head.weight" not in checkpoint and not checkpoint.shares("lm_head"):
        head = pack(table[words.ids] if words else table, None, host.dtype, host.device)
    else:
        head = checkpoint.lm_head("lm_head.weight", c.hidden, words, borrow=False)
    layers = [checkpoint.layer(f"model.layers.{i}.", c, c.hidden) for i in range(c.layers)]
    weights = Weights(table, layers, checkpoint.vector("model.norm.weight", c.hidden), head)
    checkpoint.finish()
    return DraftModel(Transformer(c, weights, name), words)
