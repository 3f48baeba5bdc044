"""What a draft head borrows from its target: sizes, the embedding table, the final norm, the LM head.

The in-house transformer has them by name. In a `transformers` model the embeddings are found by its own accessors and
the final norm as the child of the base model that carries one of the usual names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.drafters.eagle import Norm, rms_norm
from specdecode_ref.errors import ModelError
from specdecode_ref.models.base import Model
from specdecode_ref.models.linear import Linear
from specdecode_ref.models.transformer import Transformer

NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
"""What `transformers` calls the norm after the last layer."""


@dataclass(frozen=True)
class Host:
    """What a target lends. table: [V, hidden]; rows: token ids [D] -> those rows of its LM head [D, hidden]."""

    name: str
    hidden: int
    layers: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    table: Tensor
    norm: Norm
    head: Linear
    rows: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, target: Model) -> Host:
        """Raises ModelError for a target that lends nothing."""
        if isinstance(target, Transformer):
            return _in_house(target)
        if hasattr(getattr(target, "model", None), "get_input_embeddings"):
            return _hugging_face(target)
        raise ModelError("a target with layers and embeddings for a draft head", target.name, "choose a transformer")


def _in_house(target: Transformer) -> Host:
    c = target.config

    def rows(ids: Tensor) -> Tensor:
        if c.tied:
            return target.table[ids]
        # The head is packed for products and no longer a matrix; the product with each unit vector is a column of it.
        columns = [
            target.head(unit)[:, ids]
            for unit in torch.eye(c.hidden, dtype=target.dtype, device=target.device).split(64)
        ]
        return torch.cat(columns).T.contiguous()

    return Host(
        name=target.name,
        hidden=c.hidden,
        layers=c.layers,
        vocab_size=c.vocab_size,
        dtype=target.dtype,
        device=target.device,
        table=target.table,
        norm=rms_norm(target.norm, c.eps),
        head=target.head,
        rows=rows,
    )


def _hugging_face(target: Any) -> Host:
    model, text = target.model, target.text
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    norms = [module for name, module in model.base_model.named_children() if name in NORMS]
    if len(norms) != 1 or head is None:
        came = f"{type(model).__name__}, which has {'no LM head' if head is None else 'none of them'}"
        raise ModelError(f"a final norm named {', '.join(NORMS)}, and an LM head", came, "choose another target")
    return Host(
        name=target.name,
        hidden=table.weight.shape[1],
        layers=text.num_hidden_layers,
        vocab_size=target.vocab_size,
        dtype=target.dtype,
        device=target.device,
        table=table.weight.detach(),
        norm=norms[0],
        head=head,
        rows=lambda ids: head.weight.detach()[ids],
    )
