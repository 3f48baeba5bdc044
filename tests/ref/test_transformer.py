"""The in-house transformer by itself: its parts, its cache, and what it refuses.

`test_hf.py` compares it with its peers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_ref.errors import ModelError
from specdecode_ref.models import linear as linear_module
from specdecode_ref.models import transformer as transformer_module
from specdecode_ref.models.config import TransformerConfig
from specdecode_ref.models.linear import pack
from specdecode_ref.models.transformer import Transformer

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 6,
}


def weights(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random weights in Hugging Face's names."""
    h, m = config["hidden_size"], config["intermediate_size"]
    kv = h * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], h),
        "lm_head": (config["vocab_size"], h),
        "model.norm": (h,),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + "self_attn.q_proj": (h, h), at + "self_attn.o_proj": (h, h)}
        shapes |= {at + "self_attn.k_proj": (kv, h), at + "self_attn.v_proj": (kv, h)}
        shapes |= {at + "mlp.gate_proj": (m, h), at + "mlp.up_proj": (m, h), at + "mlp.down_proj": (h, m)}
        shapes |= {at + "input_layernorm": (h,), at + "post_attention_layernorm": (h,)}
    return {name + ".weight": torch.randn(shape).mul_(0.4).to(dtype) for name, shape in shapes.items()}


def model(dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    config = CONFIG | changes
    return Transformer.load(config, weights(config, dtype), dtype)


def held(cache: Any, row: int) -> list[Tensor]:
    """What a row's committed slots hold, plane by plane."""
    return [
        plane[row].narrow(dim - 1, 0, cache.lengths[row])
        for plane, dim in zip(cache.planes, cache.slot_dims, strict=True)
    ]


def test_after_a_commit_the_cache_equals_a_fresh_prefill() -> None:
    m = model()
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7]]
    cache = m.new_cache(2, 8)
    m.prefill(texts, cache)
    m.forward(torch.tensor([[10, 11, 12, 13], [20, 21, 0, 0]]), [[-1, 0, 0, 2], [-1, -1]], cache)
    cache.commit([[0, 2, 3], [1]])
    fresh = m.new_cache(2, 30)
    m.prefill([[*texts[0], 10, 12, 13], [*texts[1], 21]], fresh)
    assert cache.lengths == fresh.lengths == [11, 3]
    for row in (0, 1):
        for got, expected in zip(held(cache, row), held(fresh, row), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_prompt_in_chunks_equals_the_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    prompts = [list(range(1, 24)), list(range(5, 12))]
    whole = m.new_cache(2, 32)
    at_once = m.prefill(prompts, whole, features=(0, 4))
    monkeypatch.setattr(transformer_module, "PREFILL_CHUNK", 5)
    cut = m.new_cache(2, 32)
    in_parts = m.prefill(prompts, cut, features=(0, 4))
    assert cut.lengths == whole.lengths == [23, 7]
    for b, prompt in enumerate(prompts):
        for got, expected in zip(in_parts[b], at_once[b], strict=True):
            assert got.shape == (len(prompt), 24)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 3])
def test_truncated_is_the_first_layers_then_norm_and_head(layers: int) -> None:
    """Its logits are the norm and the head of the whole model's residual stream after that many layers."""
    m = model(model_type="qwen2", use_sliding_window=True, max_window_layers=2)  # so that the layers differ in kind
    tokens, chain = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]]), [range(-1, 8)]
    (stream,) = m.forward(tokens, chain, m.new_cache(1, 9), features=(layers,)).features
    early = m.truncated(layers)
    cache = early.new_cache(1, 9)
    assert cache.planes[0].shape[1] == layers
    assert early.layers[0] is m.layers[0]
    got = early.forward(tokens, chain, cache).logits
    torch.testing.assert_close(got, m.head(m._rms(stream, m.norm)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes_follow_float64(dtype: torch.dtype) -> None:
    """The same bfloat16 weights, run in float64 and in the narrow dtype: close by that dtype's measure."""
    stored = weights(CONFIG, torch.bfloat16)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    tree = [[-1, 0, 1, 1, 2, 3, 3, 0]]

    def logits(d: torch.dtype) -> Tensor:
        m = Transformer.load(CONFIG, stored, d)
        out = m.forward(tokens, tree, m.new_cache(1, 8)).logits
        assert out.dtype == d
        return out.double()

    exact = logits(torch.float64)
    error = (logits(dtype) - exact).abs().max() / exact.std()
    assert error < (1e-5 if dtype == torch.float32 else 0.2)


def test_float16_storage_is_exact_for_a_bfloat16_checkpoint() -> None:
    """Products of the packed weight equal those of the float64 weight to float32's rounding, bias included."""
    weight, bias, x = torch.randn(70, 90).bfloat16(), torch.randn(70), torch.randn(3, 2, 90)
    got = pack(weight, bias, torch.float32, CPU)(x)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("value", [1 + 2.0**-20, 1e6, 2.0**-16 * (1 + 2.0**-9), float("nan")])
def test_a_weight_that_float16_cannot_hold_stays_as_it_is(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number in a late block is enough, and a layer in `dtype` is made instead."""
    weight = torch.zeros(2050, 4)
    assert linear_module._fits_float16(weight)
    weight[2049, 3] = value
    assert linear_module._fits_float16(weight) == (
        value == 2.0**-16 * (1 + 2.0**-9)
    )  # below 2^-14: lost in float32's noise
    monkeypatch.setattr(linear_module, "_fits_float16", lambda _: False)
    x = torch.randn(2, 4)
    torch.testing.assert_close(pack(weight, None, torch.float32, CPU)(x), x @ weight.T, equal_nan=True)


def test_weights_without_float16_kernels_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_multiplies_float16", lambda: False)
    weight, x = torch.randn(6, 4).bfloat16(), torch.randn(2, 4).bfloat16()
    assert torch.equal(pack(weight, None, torch.bfloat16, CPU)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"partial_rotary_factor": 0.5}, "a partial one"),
    ],
    ids=["family", "no-family", "activation", "rope", "partial-rope"],
)
def test_a_configuration_it_does_not_compute_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"got {says}; use the Hugging Face adapter"):
        TransformerConfig.read(CONFIG | change)


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'vocab_size' in config\.json"):
        TransformerConfig.read({k: v for k, v in CONFIG.items() if k != "vocab_size"})


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_missing_weight_is_named(name: str) -> None:
    stored = weights(CONFIG)
    del stored[name]
    with pytest.raises(ModelError, match=f"a weight named {name}; got none"):
        Transformer.load(CONFIG, stored)


def test_a_weight_of_another_shape_is_named() -> None:
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight of shape \[54, 24\]; got \[53, 24\]"):
        Transformer.load(CONFIG | {"vocab_size": 54}, weights(CONFIG) | {"lm_head.weight": torch.zeros(54, 24)})
