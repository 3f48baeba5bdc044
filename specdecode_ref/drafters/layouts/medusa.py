"""Medusa heads: FasterDecoding's layout (`0.0.linear.weight`, `0.1.weight`) and vLLM's (`blocks.*`, `lm_heads.*`).

Both may leave the LM heads out, and then guess with the target's.
"""

from __future__ import annotations

import re

from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.layouts.checkpoint import CHECK, Checkpoint
from specdecode_ref.drafters.medusa import MedusaHeads
from specdecode_ref.errors import ModelError
from specdecode_ref.models.linear import Linear, pack

FASTER_DECODING = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.(linear\.)?(weight|bias)")


def read(checkpoint: Checkpoint, name: str) -> MedusaHeads:
    """The heads of a checkpoint: as many as its configuration says, of those that are there."""
    host, config = checkpoint.host, checkpoint.config
    checkpoint.rename({"medusa_head.": "", "medusa_heads.": ""})
    faster = any(map(FASTER_DECODING.fullmatch, checkpoint.names))
    heads = config.get("medusa_num_heads") or config.get("num_heads")
    layers = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
    if type(heads) is not int or type(layers) is not int or min(heads, layers) < 1:
        came = f"{heads} and {layers}"
        raise ModelError(f"numbers of heads and layers in config.json of {checkpoint.folder}", came, CHECK)
    wide, spoken = config.get("hidden_size", host.hidden), config.get("vocab_size", host.vocab_size)
    checkpoint.same_width(wide)
    if spoken != host.vocab_size:
        checkpoint.refuse(f"a vocabulary of {host.vocab_size} tokens", spoken)

    at = "{}.{}.linear" if faster else "blocks.{}.layers.{}"
    blocks = [
        [checkpoint.linear("", {at.format(head, layer): wide}, wide) for layer in range(layers)]
        for head in range(heads)
    ]
    words = _words(checkpoint)
    own = f"{{}}.{layers}.weight" if faster else "lm_heads.{}.weight"
    each = [own.format(head) for head in range(heads)]
    if "lm_head.weight" in checkpoint and not faster:  # beside `0.0.linear` it would be that of a whole model
        lm_heads = [_lm_head(checkpoint, "lm_head.weight", wide, words)]
    elif not any(name in checkpoint for name in each):
        lm_heads = [checkpoint.lm_head("lm_head.weight", wide, words, borrow=True)]
    else:
        wanted = each[:1] if config.get("original_lm_head") else each
        lm_heads = [_lm_head(checkpoint, name, wide, words) for name in wanted]
    return MedusaHeads(blocks, lm_heads, host.norm, host.layers, host.vocab_size, words, name)


def _words(checkpoint: Checkpoint) -> Words | None:
    """vLLM's `token_map`: the target's token for each draft logit, in any order."""
    whole = checkpoint.host.vocab_size
    size = checkpoint.config.get("truncated_vocab_size") or whole
    if size == whole:
        return None
    ids = checkpoint.take("token_map", size)
    if ids.dtype.is_floating_point or not 0 <= int(ids.min()) <= int(ids.max()) < whole or len(ids.unique()) < size:
        came = "ids out of range or twice"
        raise ModelError(f"token ids below {whole}, each once, in token_map of {checkpoint.folder}", came, CHECK)
    return Words(ids.long().to(checkpoint.host.device), whole)


def _lm_head(checkpoint: Checkpoint, name: str, wide: int, words: Words | None) -> Linear:
    """An LM head over the words, or over all tokens and then cut to the words."""
    host = checkpoint.host
    weight = checkpoint.take(name, checkpoint.rows(name), wide)
    if words and len(weight) == host.vocab_size:
        weight = weight[words.ids.cpu()]
    if len(weight) != (len(words.ids) if words else host.vocab_size):
        raise ModelError(f"an LM head over the words of {checkpoint.folder}", f"{name} of {len(weight)} rows", CHECK)
    return pack(weight, None, host.dtype, host.device)
