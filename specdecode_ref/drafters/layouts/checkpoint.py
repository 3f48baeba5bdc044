"""A published checkpoint while it is read: every tensor asked for by name, its shape checked, what is absent borrowed.

Whatever a reader did not ask for is an error too: a norm that nobody applies would not fail, it would only guess badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.layouts.host import Host
from specdecode_ref.errors import ModelError
from specdecode_ref.models.config import TransformerConfig
from specdecode_ref.models.layers import Layer, assemble
from specdecode_ref.models.linear import Linear, pack
from specdecode_ref.models.zoo import SafetensorsFolder, read_json

OURS = "specdecode_ref"
"""The key of `config.json` under which we note what published layouts have no place for (see `saving`)."""

UNREAD = ("t2d", "rotary_emb.inv_freq", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""Endings of tensors that repeat what is known from elsewhere."""

CHECK = "check that config.json belongs to these weights"


class Checkpoint:
    """A folder with `config.json` and safetensors, read for the target `host`.

    Raises ModelError for a folder that has none, or a damaged or pickled one.
    """

    def __init__(self, folder: Path, host: Host) -> None:
        self.folder, self.host = folder, host
        self.config = read_json(folder / "config.json")
        _refuse_pickles(folder)
        self._weights = SafetensorsFolder(folder)
        self._names = {name: name for name in self._weights}
        self._taken: set[str] = set()
        self._check_target()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return list(self._names)

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """From now on, names that start with a key start with its value."""
        for old, new in prefixes.items():
            self._names = {
                new + name.removeprefix(old) if name.startswith(old) else name: stored
                for name, stored in self._names.items()
            }

    def layer_config(self) -> TransformerConfig:
        """The sizes of the head's layers: in `speculators` under a key of their own, elsewhere at the top."""
        config = self.config.get("transformer_layer_config") or self.config.get("model") or self.config
        if not isinstance(config, dict):
            raise ModelError(
                f"sizes of layers in {self.folder / 'config.json'}", type(config).__name__, "fetch it again"
            )
        found = TransformerConfig.read(config)
        if found.vocab_size != self.host.vocab_size:
            self.refuse(f"a vocabulary of {self.host.vocab_size} tokens", found.vocab_size)
        return found

    def setting(self, name: str, default: Any = None) -> Any:
        """An entry of `config.json`, at the top or, as some have it, under `eagle_config`."""
        inner = self.config.get("eagle_config")
        beside = inner.get(name, default) if isinstance(inner, dict) else default
        found = self.config.get(name)
        return beside if found is None else found

    def refuse(self, expected: str, came: object) -> None:
        """Raises the ModelError for a head that was trained for another target."""
        do = "choose a head that was trained for this target"
        raise ModelError(f"a head for '{self.host.name}' ({expected})", f"{came} in {self.folder}", do)

    def shares(self, name: str) -> bool:
        """Whether we saved this head without the tensor because it is the target's own."""
        note = self.config.get(OURS)
        shared = note.get("shares") if isinstance(note, dict) else None
        return isinstance(shared, list) and name in shared

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name and shape, as it is stored."""
        if name not in self._names:
            raise ModelError(f"a weight named {name} in {self.folder}", "none", CHECK)
        self._taken.add(name)
        weight = self._weights[self._names[name]]
        if tuple(weight.shape) != shape:
            raise ModelError(f"{name} of shape {list(shape)} in {self.folder}", list(weight.shape), CHECK)
        return weight

    def rows(self, name: str) -> int:
        """How many rows the tensor of that name has, which must be a matrix or a vector."""
        if name not in self._names:
            raise ModelError(f"a weight named {name} in {self.folder}", "none", CHECK)
        shape = self._weights[self._names[name]].shape
        if not shape:
            raise ModelError(f"{name} of one row or more in {self.folder}", "a single number", CHECK)
        return shape[0]

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weights [size]."""
        return self.take(name, size).to(self.host.device, self.host.dtype, copy=True)

    def linear(self, at: str, outputs: Mapping[str, int], inputs: int) -> Linear:
        """The products `at` + each name, which read the same input, as one; zeros where only some have a bias."""
        weight = torch.cat([self.take(f"{at}{name}.weight", size, inputs) for name, size in outputs.items()])
        biases = {f"{at}{name}.bias": size for name, size in outputs.items()}
        bias = None
        if any(name in self for name in biases):
            bias = torch.cat([self.take(n, size) if n in self else torch.zeros(size) for n, size in biases.items()])
        return pack(weight, bias, self.host.dtype, self.host.device)

    def layer(self, at: str, c: TransformerConfig, inputs: int, norm: str = "input_layernorm") -> Layer:
        """A transformer layer whose attention reads `inputs` channels; an empty `norm` means that it has none."""
        return assemble(at, c, self.vector, self.linear, inputs, norm)

    def words(self) -> Words | None:
        """The reduced vocabulary: `d2t` holds, for each draft token, how far the target's token is above it."""
        size, whole = self.setting("draft_vocab_size") or self.host.vocab_size, self.host.vocab_size
        if "d2t" not in self and size == whole:
            return None
        offsets = self.take("d2t", size)
        if offsets.dtype.is_floating_point or offsets.dtype == torch.bool:
            raise ModelError(f"whole numbers in d2t of {self.folder}", offsets.dtype, "fetch it again")
        ids = offsets.long() + torch.arange(size)
        if ids[0] < 0 or ids[-1] >= whole or not bool((ids.diff() > 0).all()):
            came = "ids out of range or out of order"
            raise ModelError(f"ascending token ids below {whole} in d2t of {self.folder}", came, "fetch it again")
        return Words(ids.to(self.host.device), whole) if size < whole else None

    def table(self, name: str, hidden: int, borrow: bool = True) -> Tensor:
        """The embedding table [V, hidden], as it is stored, or the target's."""
        if name in self or not (borrow or self.shares("embed_tokens")):
            return self.take(name, self.host.vocab_size, hidden).clone().to(self.host.device)
        self.same_width(hidden)
        return self.host.table

    def lm_head(self, name: str, hidden: int, words: Words | None, borrow: bool) -> Linear:
        """[hidden] -> [D]: the head's own, or the rows of the target's that stand for its words."""
        host = self.host
        if name in self or not (borrow or self.shares("lm_head")):
            return pack(
                self.take(name, len(words.ids) if words else host.vocab_size, hidden), None, host.dtype, host.device
            )
        self.same_width(hidden)
        return pack(host.rows(words.ids), None, host.dtype, host.device) if words else host.head

    def same_width(self, hidden: int) -> None:
        """Refuses a head that would read or write the target's vectors and is of another width."""
        if hidden != self.host.hidden:
            self.refuse(f"{self.host.hidden} wide", f"width {hidden}")

    def finish(self) -> None:
        """Raises ModelError if a tensor was not asked for."""
        left = [name for name in self._names if name not in self._taken and not name.endswith(UNREAD)]
        if left:
            came = f"{left[0]} and {len(left) - 1} more" if len(left) > 1 else left[0]
            raise ModelError(f"only tensors that config.json of {self.folder} accounts for", came, CHECK)

    def _check_target(self) -> None:
        """A head that we saved says what its target looked like."""
        note = self.config.get(OURS)
        claimed = note.get("target") if isinstance(note, dict) else None
        if not isinstance(claimed, dict):
            return
        for name, size in target_sizes(self.host).items():
            if claimed.get(name, size) != size:
                self.refuse(f"{name} {size}", f"{name} {claimed[name]}")


def target_sizes(host: Host) -> dict[str, int]:
    """What tells one target from another, in the names of `config.json`."""
    return {"hidden_size": host.hidden, "num_hidden_layers": host.layers, "vocab_size": host.vocab_size}


def _refuse_pickles(folder: Path) -> None:
    """A checkpoint that is only there as a pickle is not opened; say how to turn it into one that is."""
    pickles = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    if pickles and not any(folder.glob("*.safetensors")):
        do = (
            f"""convert it where you trust it: `safetensors.torch.save_file(torch.load("{pickles[0]}", """
            """weights_only=True), "model.safetensors")`"""
        )
        raise ModelError(f"safetensors in {folder}", f"{pickles[0]}, a pickle, which could run code", do)
