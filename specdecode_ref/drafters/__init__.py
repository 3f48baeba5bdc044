"""Drafters: what proposes. `base` is the contract; `build` makes one from the name a user typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from specdecode_ref.drafters import choice, layouts, shipped
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.calibration import Calibration
from specdecode_ref.drafters.eagle import Eagle, EagleHead
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.hybrid import Hybrid
from specdecode_ref.drafters.layouts import DraftModel
from specdecode_ref.drafters.medusa import Medusa, MedusaHeads
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import NAMED, Auto, Dynamic, Optimal, Sampled, Shape, Static, Wanted, chain, parse
from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.models.base import Model
from specdecode_ref.types import Draw

NAMES = ("auto", "none", "ngram", "model", "early-exit", "medusa", "eagle", "hybrid")

SMALL = Dynamic(4, 3, 5, 0.08, 0.55)
"""What a head drafts where nobody says: on CPUs and small batches six rows cost little more than one, and a level of
the draft as much as two rows."""


Calibrate = Callable[[Callable[[Shape], Drafter], Path | None], Calibration]
"""(maker of a drafter, folder of its head) -> what was measured of it."""

D = TypeVar("D", bound=Drafter)


@dataclass(frozen=True)
class _Wish:
    """What `build` was asked for."""

    target: Any
    tree: Wanted | None
    head: Path | None
    draft_model: Callable[[], Model] | None
    exit_layer: int | None
    draw: Draw
    flat: bool
    calibrate: Calibrate | None

    @property
    def gamma(self) -> int | None:
        """The length of the chain that was asked for; None for a tree, or where nothing was."""
        chained = isinstance(self.tree, Sampled) and max(self.tree.branching) == 1
        return len(self.tree.branching) if chained else None  # type: ignore[union-attr]

    def folder(self, kind: str) -> Path | None:
        """The head that was named, or the one shipped for the target."""
        return self.head or shipped.folder(kind, self.target)

    def shaped(
        self,
        make: Callable[[Shape], D],
        default: Shape,
        kind: str | None = None,
        shapes: tuple[type, ...] = (Sampled, Static, Dynamic),
    ) -> D:
        """The drafter with the tree that was asked for. kind: of its head; shapes: what the tree "auto" may be."""
        tree = (chain(4) if self.flat else default) if self.tree is None else self.tree
        if isinstance(tree, Optimal | Auto):
            if self.calibrate is None:
                raise InputError("a calibration for this tree", tree, "pass calibrate=, or name a tree in full")
            tree = choice.resolve(tree, self.calibrate(make, self.folder(kind) if kind else None), shapes)
        if isinstance(tree, Sampled) and self.draw == "with_replacement":
            tree = replace(tree, draw=self.draw)
        return make(tree)


def build(
    name: str,
    target: Model,
    *,
    gamma: int | None = None,
    tree: Wanted | Sequence[int] | str | None = None,
    head: Path | str | None = None,
    draft_model: Callable[[], Model] | None = None,
    exit_layer: int | None = None,
    draw: Draw = "without_replacement",
    flat: bool = False,
    calibrate: Calibrate | None = None,
) -> Drafter | None:
    """The drafter of that name for this target; None for "none", which is plain decoding.

    name:        out of NAMES, or several joined by "+", tried in that order. "auto" is the best that there is for this
                 target without being told of anything: where an EAGLE head is shipped or named, "hybrid", or
                 "ngram+eagle" if the tree is not one for a hybrid; else "ngram".
    gamma, tree: the length of a chain, or the shape of a tree (see `shapes`; children per depth mean a sampled one).
    head:        the folder of a trained head for "medusa", "eagle" and "hybrid", or of a draft model that belongs to
                 this target; the one that is shipped for it unless told.
    draft_model: loads the model of the drafter "model".
    exit_layer:  how many of the target's layers "early-exit" drafts with; four fifths of them unless told.
    draw:        how siblings are drawn where the tree does not say.
    flat:        where no tree is named, draft a chain: the verifier judges nothing else.
    calibrate:   measures a drafter, given its maker; wanted by the trees "optimal" and "auto".

    Raises InputError or UnknownNameError for what cannot be; ModelError for a head that cannot be read or belongs to
    another target.
    """
    if gamma is not None and gamma < 1:
        raise InputError("gamma of 1 or more", gamma, "use the drafter 'none' to draft nothing")
    if gamma is not None and tree is not None:
        raise InputError("gamma or tree", "both", "give the length of a chain or the shape of a tree")
    wanted = chain(gamma) if gamma is not None else parse(tree) if isinstance(tree, str) else tree
    if isinstance(wanted, Sequence):
        wanted = Sampled(tuple(wanted), draw)
    folder = None if head is None else Path(head)
    wish = _Wish(target, wanted, folder, draft_model, exit_layer, draw, flat, calibrate)
    if "+" not in name:
        return _one(name, wish)
    parts = [_lookup(wish) if part == "ngram" else _one(part, wish) for part in name.split("+")]
    drafters = [part for part in parts if part is not None]
    return First(drafters) if drafters else None


def _one(name: str, wish: _Wish) -> Drafter | None:
    if name == "none":
        return None
    if name not in _MAKERS:
        raise UnknownNameError(f"a drafter out of {', '.join(NAMES)}", repr(name), "choose one, or join several with +")
    return _MAKERS[name](wish)


def _auto(wish: _Wish) -> Drafter:
    if wish.folder("eagle") is None:
        return _ngram(wish)
    if wish.flat or not isinstance(wish.tree, Dynamic | Auto | None):
        return First([_lookup(wish), _eagle(wish)])
    return _hybrid(wish)


def _lookup(wish: _Wish) -> NGram:
    return NGram() if wish.gamma is None else NGram(gamma=wish.gamma)


def _ngram(wish: _Wish) -> Drafter:
    if wish.tree is not None and wish.gamma is None:
        raise InputError("a chain for 'ngram'", wish.tree, "use --gamma, or a drafter that guesses with probabilities")
    return _lookup(wish)


def _model(wish: _Wish) -> Drafter:
    if wish.draft_model is None:
        model, words = _head(wish, "draft", DraftModel)
        return wish.shaped(lambda shape: ModelDrafter(model, shape, words=words), chain(4), "draft")
    other = wish.draft_model()
    if other.vocab_size != wish.target.vocab_size:
        raise InputError(
            f"a draft model with the target's vocabulary of {wish.target.vocab_size} tokens",
            f"{other.vocab_size} tokens in '{other.name}'",
            "choose a draft model of the same family",
        )
    return wish.shaped(lambda shape: ModelDrafter(other, shape), chain(4))


def _early_exit(wish: _Wish) -> Drafter:
    model = truncated(wish.target, wish.exit_layer)
    return wish.shaped(lambda shape: ModelDrafter(model, shape, name="early-exit"), chain(4))


def _medusa(wish: _Wish) -> Drafter:
    heads = _head(wish, "medusa", MedusaHeads)
    return wish.shaped(lambda shape: Medusa(heads, shape), Static(NAMED["narrow"]), "medusa")


def _eagle(wish: _Wish) -> Drafter:
    head = _head(wish, "eagle", EagleHead)
    return wish.shaped(lambda shape: Eagle(head, shape), SMALL, "eagle")


def _hybrid(wish: _Wish) -> Drafter:
    if not isinstance(wish.tree, Dynamic | Auto | None):
        raise InputError("a dynamic tree for 'hybrid'", wish.tree, f"use {SMALL} or auto, or the drafter ngram+eagle")
    if wish.flat:
        raise InputError("a verifier of trees for 'hybrid'", "one of chains only", "use the drafter ngram+eagle")
    head = _head(wish, "eagle", EagleHead)
    return Hybrid(NGram(), wish.shaped(lambda shape: Eagle(head, shape), SMALL, "eagle", (Dynamic,)))


_MAKERS: dict[str, Callable[[_Wish], Drafter]] = {
    "auto": _auto,
    "ngram": _ngram,
    "model": _model,
    "early-exit": _early_exit,
    "medusa": _medusa,
    "eagle": _eagle,
    "hybrid": _hybrid,
}


_KINDS = {EagleHead: "an EAGLE head", MedusaHeads: "Medusa heads", DraftModel: "a draft model"}


def _head(wish: _Wish, kind: str, wanted: type) -> Any:
    """The head that was named, or the one shipped for the target."""
    folder = wish.folder(kind)
    if folder is None:
        other = "a model with --draft-model" if kind == "draft" else "use the drafter ngram"
        do = f"name its folder with --head (`specdecode train` makes one), or {other}"
        raise InputError(f"{_KINDS[wanted]} for '{wish.target.name}'", "none shipped", do)
    found = layouts.load(folder, wish.target, name=f"{kind}-{wish.target.name}" if wish.head is None else "")
    if not isinstance(found, wanted):
        raise InputError(f"{_KINDS[wanted]} in {folder}", _KINDS[type(found)], "name another folder or drafter")
    return found


def early_exit(
    target: Any,
    branching: Shape | Sequence[int] = (1, 1, 1, 1),
    layers: int | None = None,
    draw: Draw = "without_replacement",
) -> ModelDrafter:
    """Draft with the target's own first layers and its head: no second model (cf. LayerSkip, arXiv 2404.16710).

    A model that was not trained to exit early guesses well only near its end, where exiting saves little time.
    """
    return ModelDrafter(truncated(target, layers), branching, draw, "early-exit")


def truncated(target: Any, layers: int | None = None) -> Model:
    """The target's first `layers` layers and its head; four fifths of them unless told."""
    if not hasattr(target, "truncated"):
        raise InputError("a target whose layers can be cut for 'early-exit'", target.name, "use another drafter")
    whole = len(target.layers)
    depth = whole * 4 // 5 if layers is None else layers
    if not 1 <= depth < whole:
        raise InputError(f"an exit layer from 1 to {whole - 1}", depth, "choose one in that range")
    cut: Model = target.truncated(depth)
    return cut
