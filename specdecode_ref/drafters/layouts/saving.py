"""Write a trained head the way vLLM reads it: `config.json` and float16 safetensors, both or neither.

What is the target's own may be left out, which keeps a head of a large vocabulary small; our part of the configuration
says so, and `load` puts it back. For vLLM, include the embeddings or LM head in `weights` where the words are reduced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.layouts.checkpoint import OURS, target_sizes
from specdecode_ref.drafters.layouts.host import Host
from specdecode_ref.errors import ModelError
from specdecode_ref.models.base import Model
from specdecode_ref.models.config import TransformerConfig
from specdecode_ref.whole_file import whole_file


def save_eagle(
    folder: Path | str,
    weights: Mapping[str, Tensor],
    target: Model,
    layer: Mapping[str, Any],
    aux_layers: Sequence[int],
    *,
    normed: bool = True,
    words: Words | None = None,
    gamma: int = 4,
    note: Mapping[str, Any] | None = None,
) -> None:
    """An EAGLE-3 head in the layout of `speculators`.

    weights:    in that layout's names (`fc.weight`, `layers.0.hidden_norm.weight`, ...), without d2t and t2d.
    layer:      the sizes of the head's layers in Hugging Face's names, as in a Llama's `config.json`.
    aux_layers: which of the target's residual streams it reads (k: after k layers).
    normed:     each feature is normed before they are joined (`fc_norm`), with weights of one unless there are some.
    gamma:      how many tokens to draft where nobody says.
    note:       more to keep in our part of the configuration, such as where the head comes from.

    Raises ModelError when the sizes are not those of a layer, or the folder cannot be written.
    """
    host = Host.of(target)
    sizes = _sizes(layer, host)
    norms = {f"fc_norm.{i}.weight": torch.ones(host.hidden) for i in range(len(aux_layers) if normed else 0)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": gamma, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": host.name, "architectures": []},
        },
        "transformer_layer_config": sizes,
        "draft_vocab_size": len(words.ids) if words else host.vocab_size,
        "target_hidden_size": host.hidden,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        "fc_norm": normed,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
    }
    shares = _shares(weights, "embed_tokens", "lm_head")
    _write(folder, config, {**norms, **weights, **_maps(words)}, host, shares, note)


def save_medusa(
    folder: Path | str,
    weights: Mapping[str, Tensor],
    target: Model,
    *,
    words: Words | None = None,
    note: Mapping[str, Any] | None = None,
) -> None:
    """Medusa heads in vLLM's layout.

    weights: `blocks.N.layers.M.weight` and `.bias`, and `lm_head.weight` (shared) or `lm_heads.N.weight`, or neither.

    Raises ModelError when the folder cannot be written.
    """
    host = Host.of(target)
    places = [name.split(".") for name in weights if name.startswith("blocks.")]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": host.hidden,
        "vocab_size": host.vocab_size,
        "truncated_vocab_size": len(words.ids) if words else host.vocab_size,
        "num_heads": 1 + max(int(place[1]) for place in places),
        "num_hidden_layers": 1 + max(int(place[3]) for place in places),
        "medusa_fc_bias": any(name.endswith(".bias") for name in weights),
        "original_lm_head": "lm_heads.1.weight" not in weights,
    }
    shares = [] if any("lm_head" in name for name in weights) else ["lm_head"]
    chosen = {"token_map": words.ids} if words else {}
    _write(folder, config, {**weights, **chosen}, host, shares, note)


def save_draft(
    folder: Path | str,
    weights: Mapping[str, Tensor],
    target: Model,
    layer: Mapping[str, Any],
    *,
    words: Words | None = None,
    note: Mapping[str, Any] | None = None,
) -> None:
    """A small draft model in Hugging Face's layout.

    weights: in a Llama's names (`model.layers.0.self_attn.q_proj.weight`, ...), the embeddings and LM head optional.
    layer:   its sizes in Hugging Face's names.

    Raises ModelError when the sizes are not those of a model, or the folder cannot be written.
    """
    host = Host.of(target)
    config = {"architectures": ["LlamaForCausalLM"], **_sizes(layer, host)}
    if words:
        config["draft_vocab_size"] = len(words.ids)
    shares = _shares(weights, "model.embed_tokens", "lm_head")
    if config.get("tie_word_embeddings") and "model.embed_tokens.weight" in weights:
        shares = []  # the LM head is the model's own table
    _write(folder, config, {**weights, **_maps(words)}, host, shares, note)


def _sizes(layer: Mapping[str, Any], host: Host) -> dict[str, Any]:
    """The layers' part of a configuration, once it has been read as `load` will read it."""
    sizes = {"model_type": "llama", "hidden_act": "silu", **layer, "vocab_size": host.vocab_size}
    TransformerConfig.read(sizes)
    return sizes


def _shares(weights: Mapping[str, Tensor], *names: str) -> list[str]:
    """Which of the embeddings and the LM head are not among the weights."""
    return [name.rpartition(".")[2] for name in names if f"{name}.weight" not in weights]


def _maps(words: Words | None) -> dict[str, Tensor]:
    """A reduced vocabulary as EAGLE-3's two maps: how far each token is above its draft token, and which are in."""
    if words is None:
        return {}
    ids = words.ids.cpu()
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(words.size, dtype=torch.bool).index_fill_(0, ids, True),
    }


def _write(
    folder: Path | str,
    config: dict[str, Any],
    weights: Mapping[str, Tensor],
    host: Host,
    shares: list[str],
    note: Mapping[str, Any] | None,
) -> None:
    """Both files are written before either takes its name, so a full disk leaves what was there before."""
    from safetensors.torch import save

    config |= {"torch_dtype": "float16", OURS: {"shares": shares, "target": target_sizes(host), **(note or {})}}
    tensors = {
        name: (weight.detach().half() if weight.is_floating_point() else weight).cpu().contiguous()
        for name, weight in weights.items()
    }
    folder = Path(folder)
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / "config.json") as sizes, whole_file(folder / "model.safetensors") as packed:
            packed.write_bytes(save(tensors, {"format": "pt"}))
            sizes.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if new:
            with suppress(OSError):
                folder.rmdir()
        reason = error.strerror or type(error).__name__
        raise ModelError(f"a folder that can be written, {folder}", reason, "make room or choose another") from error
