"""Draft models, whole Llamas of their own, read from a folder: the logits are those of a page of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdecode_ref.drafters import layouts
from specdecode_ref.drafters.layouts import DraftModel
from tests.ref.test_layouts_eagle import (
    CLOSE,
    IDS,
    SIZES,
    TOKENS,
    Tensors,
    block,
    d2t,
    llama,
    rms,
    target,
    write,
)


def plain(t: Tensors, table: Tensor, head: Tensor, tokens: Sequence[int], layers: int) -> Tensor:
    """Logits of a Llama over a whole sequence."""
    x = table[torch.tensor(tokens)]
    for i in range(layers):
        x = block(t, f"model.layers.{i}.", x, rms(x, t[f"model.layers.{i}.input_layernorm.weight"]))
    return rms(x, t["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reduced", [False, True])
def test_draft_model(tmp_path: Path, tied: bool, reduced: bool) -> None:
    """A plain Llama, or one with a reduced vocabulary: its logits stand for fewer tokens, its embedding for all."""
    t = llama(2, tied)
    config = SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    head = t["model.embed_tokens.weight" if tied else "lm_head.weight"]
    if reduced:
        config["draft_vocab_size"], head = len(IDS), head[IDS]
        t |= d2t() | ({} if tied else {"lm_head.weight": head})
    draft = layouts.load(write(tmp_path, config, t), target()[0])
    assert isinstance(draft, DraftModel) and (draft.words is not None) == reduced
    model = draft.model
    got = model.forward(torch.tensor([TOKENS]), [range(-1, len(TOKENS) - 1)], model.new_cache(1, 9)).logits[0]
    expected = plain(t, t["model.embed_tokens.weight"], head, TOKENS, 2)
    torch.testing.assert_close(got, expected, **CLOSE)
