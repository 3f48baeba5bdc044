"""EAGLE-1 and EAGLE-2 heads: SafeAILab's layout (`fc.*`, `layers.0.*`), and `speculators`' (`fusion_fc.*`).

The head joins the token's embedding and the target's last feature, after the target's final norm, in `fc`; its first
layer attends without a norm, and what it puts out is such a feature again, read by the target's LM head as it is.
"""

from __future__ import annotations

import torch

from specdecode_ref.drafters.eagle import EagleHead, Fusion
from specdecode_ref.drafters.layouts.checkpoint import Checkpoint
from specdecode_ref.errors import ModelError
from specdecode_ref.models.layers import Weights


def read(checkpoint: Checkpoint, name: str) -> EagleHead:
    """The head of a checkpoint; embedding and LM head are the target's where absent, as they mostly are."""
    c, host = checkpoint.layer_config(), checkpoint.host
    if checkpoint.config.get("layernorms"):
        do = "choose a head without them"
        raise ModelError("an EAGLE-1 head without extra norms", f"layernorms in {checkpoint.folder}", do)
    checkpoint.rename({"transformer.": "layers.0.", "fusion_fc.": "fc."})
    checkpoint.same_width(c.hidden)
    fusion = Fusion(
        layers=(host.layers,),
        fuse=checkpoint.linear("", {"fc": c.hidden}, 2 * c.hidden),
        token_norm=None,
        norms=(host.norm,),
        final_norm="none",
    )
    weights = Weights(
        table=checkpoint.table("embed_tokens.weight", c.hidden),
        layers=[checkpoint.layer(f"layers.{i}.", c, c.hidden, "input_layernorm" if i else "") for i in range(c.layers)],
        norm=torch.ones(c.hidden, dtype=host.dtype, device=host.device),
        head=checkpoint.lm_head("lm_head.weight", c.hidden, None, borrow=True),
    )
    checkpoint.finish()
    return EagleHead(c, weights, fusion, name, None)
