"""Published draft heads: `load` tells the layouts apart and reads any of them; `save_*` writes those that vLLM reads.

One file a layout. What a checkpoint is shows twice, in its `config.json` and in the names of its tensors, and the two
must agree: a mislabelled head would load and only guess badly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from specdecode_ref.drafters.eagle import EagleHead
from specdecode_ref.drafters.layouts import draft, eagle1, eagle3, medusa
from specdecode_ref.drafters.layouts.checkpoint import Checkpoint
from specdecode_ref.drafters.layouts.draft import DraftModel
from specdecode_ref.drafters.layouts.host import Host
from specdecode_ref.drafters.layouts.saving import save_draft, save_eagle, save_medusa
from specdecode_ref.drafters.medusa import MedusaHeads
from specdecode_ref.errors import ModelError
from specdecode_ref.models.base import Model

__all__ = ["DraftModel", "load", "save_draft", "save_eagle", "save_medusa"]

READERS: dict[str, Callable[[Checkpoint, str], EagleHead | MedusaHeads | DraftModel]] = {
    "Medusa": medusa.read,
    "EAGLE-3": eagle3.read,
    "EAGLE-1": eagle1.read,
    "draft model": draft.read,
}

TENSORS = {
    "Medusa": rf"{medusa.FASTER_DECODING.pattern}|(medusa_heads\.)?blocks\.\d+\..*",
    "EAGLE-3": r"midlayer\..*|layers\.0\.hidden_norm\.weight",
    "EAGLE-1": r"(fusion_)?fc\.weight",
    "draft model": r"model\.layers\..*",
}
"""A name that only this layout has among those that follow it."""


def load(folder: Path | str, target: Model, name: str = "") -> EagleHead | MedusaHeads | DraftModel:
    """The head or draft model in a folder, for this target, in its dtype and on its device.

    name: what traces call it; the folder's own name unless told. What the checkpoint leaves out is the target's.

    Raises ModelError, in one line, for a head of another target, a folder without a readable checkpoint, a pickle, a
    configuration that does not belong to the weights, a missing tensor or one of another shape.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError("a folder with config.json and safetensors", str(folder), "check the path")
    checkpoint = Checkpoint(folder, Host.of(target))
    claimed, found = _claimed(checkpoint), _found(checkpoint)
    if claimed not in (None, found):
        came = f"tensors of {found or 'something else'}"
        raise ModelError(f"tensors of {claimed}, as config.json of {folder} says", came, "fetch the head again")
    if found is None:
        do = "choose a Medusa, EAGLE-1, EAGLE-3 or Llama checkpoint"
        raise ModelError(f"a draft head or a draft model in {folder}", "tensors of something else", do)
    return READERS[found](checkpoint, name or folder.name)


def _claimed(checkpoint: Checkpoint) -> str | None:
    """What `config.json` says; nothing where it is a plain Llama's, as older EAGLE heads have it."""
    config = checkpoint.config
    kinds = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa"}
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in kinds:
        raise ModelError("speculators_model_type eagle, eagle3 or medusa", repr(kind), "choose another head")
    if "medusa_num_heads" in config:
        return "Medusa"
    return kinds.get(kind or str(config.get("model_type")))


def _found(checkpoint: Checkpoint) -> str | None:
    """What the names of the tensors say."""
    for kind, pattern in TENSORS.items():
        if any(re.fullmatch(pattern, name) for name in checkpoint.names):
            return kind
    return None
