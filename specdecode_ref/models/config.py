"""What a `config.json` says about a model, read once and checked, in the names that `transformer.py` uses.

Everything the in-house model cannot do exactly is refused here, before a weight is read: a model that is nearly right
would still write fluent text, and no test of speculative decoding could tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.errors import ModelError


class NotInHouse(ModelError):
    """A sound configuration of a model that the in-house transformer does not compute: the adapter's to try."""


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""The values of `model_type` that the in-house model computes; the adapter in `hf.py` takes the others."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: `inverse_frequencies` says how fast each pair of channels turns."""

    theta: float
    kind: str
    scaling: Mapping[str, Any]

    def inverse_frequencies(self, dim: int) -> Tensor:
        """float32 [dim / 2], in radians per position (Su et al., 2021; Llama 3.1's smoothing by wavelength)."""
        turn = 1.0 / (self.theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        if self.kind == "default":
            return turn
        factor = self.scaling["factor"]
        if self.kind == "linear":
            return turn / factor
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        old = self.scaling["original_max_position_embeddings"]
        wavelength = 2 * math.pi / turn
        smooth = (old / wavelength - low) / (high - low)
        between = (1 - smooth) * turn / factor + smooth * turn
        turn = torch.where(wavelength > old / low, turn / factor, turn)
        medium = (wavelength >= old / high) & (wavelength <= old / low)
        return torch.where(medium, between, turn)


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model. `windows[l]`: how far back layer l looks (None: everywhere); `rotates[l]`: it has RoPE."""

    family: str
    vocab_size: int
    context_length: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    rope: Rope
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> TransformerConfig:
        """From a `config.json` in Hugging Face's names. Raises ModelError for what this model does not compute."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise NotInHouse(f"a model of type {', '.join(FAMILIES)}", repr(family), "use the Hugging Face adapter")
        try:
            found = cls._read(family, config)
            found.rope.inverse_frequencies(found.head_dim)
        except KeyError as error:
            raise ModelError(f"{error} in config.json", "no such entry", "fetch the model's own config.json") from error
        except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ModelError("numbers that fit together in config.json", error, "fetch the model's own one") from error
        sizes = (found.vocab_size, found.context_length, found.hidden, found.intermediate, found.layers, found.head_dim)
        if min(sizes) < 1 or not 1 <= found.kv_heads <= found.heads or found.heads % found.kv_heads:
            raise ModelError("sizes of 1 or more in config.json, heads a multiple of kv_heads", found, "fetch it again")
        return found

    @classmethod
    def _read(cls, family: str, config: Mapping[str, Any]) -> TransformerConfig:
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise NotInHouse("hidden_act 'silu'", repr(activation), "use the Hugging Face adapter")
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        return cls(
            family=family,
            vocab_size=int(config["vocab_size"]),
            context_length=int(config.get("max_position_embeddings", 2048)),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=_rope(config),
            windows=_windows(family, config, layers),
            rotates=_rotates(family, config, layers),
        )


def _rope(config: Mapping[str, Any]) -> Rope:
    """The newer files keep everything in `rope_parameters`, the older ones in `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise NotInHouse("rope_type default, linear or llama3", repr(kind), "use the Hugging Face adapter")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise NotInHouse("rotary embedding over the whole head", "a partial one", "use the Hugging Face adapter")
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    return Rope(float(theta), kind, scaling)


def _windows(family: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer, Qwen from layer `max_window_layers` on when `use_sliding_window` says so."""
    window = config.get("sliding_window")
    if window is None or family == "llama" or (family != "mistral" and not config.get("use_sliding_window", False)):
        return (None,) * layers
    first = 0 if family == "mistral" else int(config.get("max_window_layers", layers))
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _rotates(family: str, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """SmolLM3 leaves the rotary embedding out of every fourth layer (NoPE)."""
    if family != "smollm3":
        return (True,) * layers
    every = int(config.get("no_rope_layer_interval", 4))
    flags = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    return tuple(map(bool, flags))
