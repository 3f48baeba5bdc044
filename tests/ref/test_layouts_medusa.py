"""Published Medusa heads, written here in exactly their layouts and read back: the logits are the paper's formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from specdecode_ref.drafters import layouts
from specdecode_ref.drafters.medusa import MedusaHeads
from tests.ref.test_layouts_eagle import CLOSE, LAYERS, H, Tensors, V, rms, some, target, write


def medusa(t: Tensors, at: str, heads: int, layers: int, lm_heads: Sequence[Tensor], feature: Tensor) -> Tensor:
    """The paper's formula, head by head."""
    rows = []
    for i in range(heads):
        x = rms(feature, target(False)[1]["model.norm.weight"], 3e-4)
        for j in range(layers):
            name = at.format(i, j)
            x = x + silu(t[f"{name}.weight"] @ x + t.get(f"{name}.bias", torch.zeros(H)))
        rows.append(lm_heads[i % len(lm_heads)] @ x)
    return torch.stack(rows)


class TestMedusa:
    @pytest.mark.parametrize("prefix", ["", "medusa_head."])
    @pytest.mark.parametrize("layers", [1, 2])
    def test_faster_decoding(self, tmp_path: Path, prefix: str, layers: int) -> None:
        """With a head more than the configuration names, which it does not use."""
        t = {f"{i}.{j}.linear.weight": some(H, H) for i in range(4) for j in range(layers)}
        t |= {f"{i}.{j}.linear.bias": some(H) for i in range(4) for j in range(layers)}
        t |= {f"{i}.{layers}.weight": some(V, H) for i in range(4)}
        whole = {"lm_head.weight": some(V, H), "model.norm.weight": some(H)} if prefix else {}
        config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "base_model_name_or_path": "host"}
        heads = layouts.load(write(tmp_path, config, {prefix + n: w for n, w in t.items()} | whole), target(False)[0])
        assert isinstance(heads, MedusaHeads) and len(heads) == 3
        assert heads.words is None and heads.layer == LAYERS and heads.vocab_size == V
        lm_heads, feature = [t[f"{i}.{layers}.weight"] for i in range(3)], some(H)
        expected = medusa(t, "{}.{}.linear", 3, layers, lm_heads, feature)
        torch.testing.assert_close(heads.logits(feature), expected, **CLOSE)

    @pytest.mark.parametrize("kind", ["each", "shared", "first", "borrowed", "prefixed"])
    @pytest.mark.parametrize("reduced", [False, True])
    def test_vllm(self, tmp_path: Path, kind: str, reduced: bool) -> None:
        """`blocks` and `lm_heads`, one for each head or one for all; a token map in the order of frequency."""
        ids = [40, 3, 0, 52, 9] if reduced else list(range(V))
        blocks = {f"blocks.{i}.layers.{j}.weight": some(H, H) for i in range(3) for j in range(2)}
        full, cut = some(V, H), [some(len(ids), H) for _ in range(3)]
        own: dict[str, Tensors] = {
            "each": {f"lm_heads.{i}.weight": w for i, w in enumerate(cut)},
            "prefixed": {f"lm_heads.{i}.weight": w for i, w in enumerate(cut)},
            "shared": {"lm_head.weight": full},
            "first": {"lm_heads.0.weight": full},
            "borrowed": {},
        }
        config: dict[str, Any] = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H}
        config |= {"vocab_size": V, "num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": len(ids)}
        config |= {"original_lm_head": kind not in ("each", "prefixed"), "medusa_fc_bias": False}
        stored = blocks | own[kind] | ({"token_map": torch.tensor(ids)} if reduced else {})
        if kind == "prefixed":
            stored = {f"medusa_heads.{name}": weight for name, weight in stored.items()}
        heads = layouts.load(write(tmp_path, config, stored), target(False)[0])
        assert isinstance(heads, MedusaHeads)
        assert (heads.words.ids.tolist() if heads.words else list(range(V))) == ids
        lent = target(False)[1]["lm_head.weight"]
        rows = {"shared": [full[ids]], "first": [full[ids]], "borrowed": [lent[ids]]}.get(kind, cut)
        feature = some(H)
        expected = medusa(blocks, "blocks.{}.layers.{}", 3, 2, rows, feature)
        torch.testing.assert_close(heads.logits(feature), expected, **CLOSE)
