"""EAGLE-3 heads: SafeAILab's layout (`midlayer.*`), vLLM's (`layers.0.*`), and `speculators`' configuration of it.

Layer ids name the residual stream *before* layer k, which is after k layers, as here. Without any, the ids are those of
the paper's code: 2, half way, and 3 before the end. Variants that have come since are told apart by the configuration:
`norm_before_residual`, `norm_before_fc`, and EAGLE-3.1's `fc_norm` and `norm_output`.
"""

from __future__ import annotations

from specdecode_ref.drafters.eagle import EagleHead, Fusion, rms_norm
from specdecode_ref.drafters.layouts.checkpoint import CHECK, Checkpoint
from specdecode_ref.errors import ModelError
from specdecode_ref.models.layers import Weights


def read(checkpoint: Checkpoint, name: str) -> EagleHead:
    """The head of a checkpoint. The embedding is the target's where it is absent; so is an LM head over all tokens."""
    c, host = checkpoint.layer_config(), checkpoint.host
    checkpoint.rename({"midlayer.": "layers.0."})
    layers, wide = aux_layers(checkpoint), checkpoint.setting("target_hidden_size") or c.hidden
    if wide != host.hidden:
        checkpoint.refuse(f"{host.hidden} wide", f"width {wide}")
    each, joint = checkpoint.setting("fc_norm", False), checkpoint.setting("norm_before_fc", False)
    norms = [checkpoint.vector(f"fc_norm.{i}.weight", wide) for i in range(len(layers))] if each else []
    fusion = Fusion(
        layers=layers,
        fuse=checkpoint.linear("", {"fc": c.hidden}, len(layers) * wide),
        token_norm=checkpoint.vector("layers.0.input_layernorm.weight", c.hidden),
        norms=tuple(rms_norm(weight, c.eps) for weight in norms),
        joint_norm=rms_norm(checkpoint.vector("input_norm.weight", len(layers) * wide), c.eps) if joint else None,
        from_norm=bool(checkpoint.setting("norm_before_residual", False)),
        final_norm="output" if checkpoint.setting("norm_output", False) else "head",
    )
    words = checkpoint.words()
    weights = Weights(
        table=checkpoint.table("embed_tokens.weight", c.hidden),
        layers=[
            checkpoint.layer(
                f"layers.{i}.", c, c.hidden if i else 2 * c.hidden, "input_layernorm" if i else "hidden_norm"
            )
            for i in range(c.layers)
        ],
        norm=checkpoint.vector("norm.weight", c.hidden),
        head=checkpoint.lm_head("lm_head.weight", c.hidden, words, borrow=words is None),
    )
    checkpoint.finish()
    return EagleHead(c, weights, fusion, name, words)


def aux_layers(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Which of the target's residual streams the head reads."""
    last = checkpoint.host.layers
    ids = checkpoint.setting("eagle_aux_hidden_state_layer_ids") or [2, last // 2, last - 3]
    if not isinstance(ids, list) or not all(type(k) is int for k in ids):
        raise ModelError(f"a list of layers in config.json of {checkpoint.folder}", ids, CHECK)
    if not 0 <= min(ids) <= max(ids) <= last:
        checkpoint.refuse(f"layers up to {last}", f"layers {', '.join(map(str, ids))}")
    return tuple(ids)
