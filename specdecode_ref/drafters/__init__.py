"""Drafters: what proposes. `base` is the contract; `build` makes one from the name a user typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.models.base import Model
from specdecode_ref.types import Draw

NAMES = ("none", "ngram", "model", "early-exit")


def build(
    name: str,
    target: Model,
    *,
    gamma: int | None = None,
    tree: Sequence[int] | None = None,
    draft_model: Callable[[], Model] | None = None,
    exit_layer: int | None = None,
    draw: Draw = "without_replacement",
) -> Drafter | None:
    """The drafter of that name for this target; None for "none", which is plain decoding.

    name:        "ngram", "model", "early-exit", or several joined by "+", tried in that order.
    gamma, tree: the length of a chain, or children per node at each depth. A tree needs a drafter that samples.
    draft_model: loads the model of the drafter "model".
    exit_layer:  how many of the target's layers "early-exit" drafts with; four fifths of them unless told.
    draw:        how siblings of a sampled tree are drawn.
    """
    if gamma is not None and gamma < 1:
        raise InputError("gamma of 1 or more", gamma, "use the drafter 'none' to draft nothing")
    if gamma is not None and tree is not None:
        raise InputError("gamma or tree", "both", "give the length of a chain or the shape of a tree")
    if "+" in name:
        parts = [
            build(
                part,
                target,
                gamma=gamma,
                tree=None if part == "ngram" else tree,
                draft_model=draft_model,
                exit_layer=exit_layer,
                draw=draw,
            )
            for part in name.split("+")
        ]
        drafters = [part for part in parts if part is not None]
        return First(drafters) if drafters else None
    if name == "none":
        return None
    if name == "ngram":
        if tree is not None:
            raise InputError(
                "a drafter that samples for a tree",
                "ngram",
                "use --gamma, or the drafter model or early-exit",
            )
        return NGram(**({} if gamma is None else {"gamma": gamma}))
    branching = tuple(tree) if tree is not None else (1,) * (gamma or 4)
    if name == "early-exit":
        return early_exit(target, branching, exit_layer, draw)
    if name == "model":
        if draft_model is None:
            raise InputError("a draft model for the drafter 'model'", "none", "name one with --draft-model")
        model = draft_model()
        if model.vocab_size != target.vocab_size:
            raise InputError(
                f"a draft model with the target's vocabulary of {target.vocab_size} tokens",
                f"{model.vocab_size} tokens in '{model.name}'",
                "choose a draft model of the same family",
            )
        return ModelDrafter(model, branching, draw)
    raise UnknownNameError(f"a drafter out of {', '.join(NAMES)}", repr(name), "choose one, or join several with +")


def early_exit(
    target: Any,
    branching: Sequence[int] = (1, 1, 1, 1),
    layers: int | None = None,
    draw: Draw = "without_replacement",
) -> ModelDrafter:
    """Draft with the target's own first layers and its head: no second model (cf. LayerSkip, arXiv 2404.16710).

    A model that was not trained to exit early guesses well only near its end, where exiting saves little time.
    """
    if not hasattr(target, "truncated"):
        raise InputError("a target whose layers can be cut for 'early-exit'", target.name, "use another drafter")
    whole = len(target.layers)
    depth = whole * 4 // 5 if layers is None else layers
    if not 1 <= depth < whole:
        raise InputError(f"an exit layer from 1 to {whole - 1}", depth, "choose one in that range")
    return ModelDrafter(target.truncated(depth), branching, draw, "early-exit")
