"""Any other causal language model of `transformers` behind the same contract, if it takes a 4-D attention mask.

Our cache holds the keys and values; `transformers` writes them through `_Planes`. What cannot be verified in a tree is
refused: by its configuration where that says so, and by a short trial of every model when it is wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from specdecode_ref.cache import Cache, Placement
from specdecode_ref.errors import ModelError
from specdecode_ref.models.base import Output
from specdecode_ref.models.transformer import in_chunks, remember, within

ATTENTION = {"full_attention", "sliding_attention"}
"""The layer types whose whole memory is keys and values, one slot a token."""

TRIAL_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
"""How far the trial's two ways may differ, root mean square over the logits' spread; 0.2 in half precision. A branch
that sees its sibling is off by the order of 1."""

DO = "choose a transformer with full or sliding attention"


class HuggingFaceModel:
    """A `transformers` model as a `models.base.Model`. Raises ModelError when it cannot be verified in a tree."""

    def __init__(self, model: Any, name: str = "") -> None:
        self.model = model.eval()
        self.name = name or type(model).__name__
        self.text = model.config.get_text_config()
        self.kinds = _refuse_or_kinds(model, self.text)
        self.dtype, self.device = model.dtype, model.device
        self.context_length = int(getattr(self.text, "max_position_embeddings", 1 << 20))
        takes = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in takes else "past_key_values"
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.last_layer = _last_layer(model, self.text.num_hidden_layers)
        self.shapes, self.vocab_size = self._trial()

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, device: torch.device, name: str = "") -> HuggingFaceModel:
        """Load a local folder: safetensors only, and none of the checkpoint's own code."""
        quiet = not transformers.logging.is_progress_bar_enabled()
        transformers.logging.disable_progress_bar()
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # its checks of a configuration raise whatever they stumble over
            why = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise ModelError(f"a causal language model in {folder}", why, "check its files") from error
        finally:
            if not quiet:
                transformers.logging.enable_progress_bar()
        return cls(model.to(device), name)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Keys and values of each layer, [B, H_kv, S, D], and a plane [B, S] of positions for the sliding layers."""
        size = capacity + 1
        planes = [
            torch.zeros(batch, heads, size, dim, dtype=self.dtype, device=self.device)
            for pair in self.shapes
            for heads, dim in pair
        ]
        planes.append(torch.zeros(batch, size, dtype=torch.int64, device=self.device))
        return Cache(planes, [2] * (len(planes) - 1) + [1])

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> Output:
        """See `Model.forward`."""
        return self._run(tokens, parents, cache, features)

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: Cache, features: Sequence[int] = ()
    ) -> list[tuple[Tensor, ...]]:
        """See `Model.prefill`."""

        def step(tokens: Tensor, parents: list[range]) -> tuple[Tensor, ...]:
            return self._run(tokens, parents, cache, features, **self.last_only).features

        return in_chunks(step, prompts, cache)

    def _run(
        self, tokens: Tensor, parents: Sequence[Sequence[int]], cache: Cache, features: Sequence[int], **more: Any
    ) -> Output:
        where = cache.append(parents)
        positions = where.positions.to(self.device)
        cache.planes[-1].scatter_(1, where.slots.to(self.device), positions)
        last = self.text.num_hidden_layers
        final: list[Tensor] = []
        hook = self.last_layer.register_forward_hook(lambda _module, _args, out: final.append(_first(out)))
        try:
            out = self.model(
                input_ids=tokens.to(self.device),
                attention_mask=self._mask(where, positions, cache),
                position_ids=positions,
                use_cache=True,
                output_hidden_states=any(k < last for k in features),
                **{self.cache_argument: _Planes(cache, where)},
                **more,
            )
        finally:
            hook.remove()
        return Output(out.logits, tuple(final[0] if k == last else out.hidden_states[k] for k in features))

    def _mask(self, where: Placement, positions: Tensor, cache: Cache) -> Any:
        """One mask [B, 1, N, S], or one for each layer type where a model mixes them."""
        mask = where.mask.to(self.device)
        made = {}
        for kind in self.kinds:
            seen = mask
            if kind == "sliding_attention":
                seen = within(self.text.sliding_window, mask, positions, cache.planes[-1])
            blank = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
            made[kind] = blank.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None]
        return made if len(made) > 1 else made[self.kinds[0]]

    @torch.no_grad()
    def _trial(self) -> tuple[list[tuple[tuple[int, int], tuple[int, int]]], int]:
        """Run a fork in a tree and its second branch in plain text; they must agree.

        This also tells the shape of every layer's keys and values, and how many logits there are.
        """
        tokens = torch.arange(3, 9)[None].to(self.device)
        record = _Record()
        try:
            plain = self.model(
                input_ids=tokens[:, [0, 1, 3, 5]], use_cache=True, **{self.cache_argument: record}
            ).logits
            self.shapes = record.shapes()
            tree = self._run(tokens, [[-1, 0, 1, 1, 2, 3]], self.new_cache(1, 6), ()).logits[:, [0, 1, 3, 5]]
        except (
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
            IndexError,
            KeyError,
            NotImplementedError,
        ) as error:
            came = f"one that fails on it ({type(error).__name__}: {str(error)[:120]})"
            raise ModelError("a model that takes a 4-D attention mask", came, DO) from error
        after_fork = slice(2, None)  # only there could a sibling have been seen
        lost = ((tree - plain)[:, after_fork].float().square().mean().sqrt() / plain.float().std()).item()
        if not lost <= TRIAL_TOLERANCE.get(self.dtype, 0.2):
            came = (
                f"{self.name}, where a branch of a tree differs from the same text by {lost:.2g} of the logits' spread"
            )
            raise ModelError("a model that can be verified in a tree", came, DO)
        return self.shapes, plain.shape[-1]


class _Planes(transformers.Cache):
    """Lets `transformers` write the keys and values of one forward pass into our cache's planes."""

    def __init__(self, cache: Cache, where: Placement) -> None:
        super().__init__(layers=[])
        self.cache, self.where = cache, where

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, N, D] each; return all that is in use, [B, H, S, D]."""
        keys, values = self.cache.planes[2 * layer_idx : 2 * layer_idx + 2]
        return (
            remember(keys, key_states.transpose(1, 2), self.where),
            remember(values, value_states.transpose(1, 2), self.where),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use before this pass; positions are given, so it places nothing."""
        return self.where.mask.shape[-1] - self.where.mask.shape[-2]


class _Record(transformers.DynamicCache):
    """Notes the shape of what each layer stores."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        k, v = key_states.shape, value_states.shape
        self.seen[layer_idx] = (k[1], k[3]), (v[1], v[3])
        return key_states, value_states

    def shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """(heads, dim) of keys and values, layer by layer; a layer that stores nothing gets an empty plane."""
        return [self.seen.get(i, ((0, 0), (0, 0))) for i in range(max(self.seen, default=-1) + 1)]


def _refuse_or_kinds(model: Any, text: Any) -> list[str]:
    """The model's layer types, or ModelError with the reason why its drafts cannot be verified in a tree."""
    name = text.model_type
    kinds = sorted(set(getattr(text, "layer_types", None) or ["full_attention"]))
    strange = [kind for kind in kinds if kind not in ATTENTION]
    takes = inspect.signature(model.forward).parameters
    reasons = {
        "keeps a recurrent state, which cannot branch or step back": getattr(model, "_is_stateful", False),
        f"has layers of type {', '.join(strange)}, whose state cannot branch or step back": bool(strange),
        "is an encoder-decoder": model.config.is_encoder_decoder,
        "attends in both directions": getattr(text, "use_bidirectional_attention", False),
        "takes no positions, so siblings cannot share one": "position_ids" not in takes,
        "takes no attention mask": "attention_mask" not in takes,
        f"runs {text._attn_implementation} attention": text._attn_implementation not in ("eager", "sdpa"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ModelError("a model that can be verified in a tree", f"{name}, which {reason}", DO)
    if getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None) is not None:
        return ["sliding_attention"]  # Mistral slides in every layer, and older configurations name no types
    return kinds


def _last_layer(model: Any, layers: int) -> Any:
    """The last decoder layer: its output is the residual stream before the final norm."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            return module[-1]
    raise ModelError(f"a model with a list of {layers} layers", type(model).__name__, DO)


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]
