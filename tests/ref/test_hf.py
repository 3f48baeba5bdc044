"""The models against `transformers`: a node of a tree gets the logits of the plain text that leads to it.

float64, small random weights, 1e-9. The in-house model is compared on its families, the adapter on those and on three
more. Each run appends in two steps, with rows of unlike length, commits a path with holes, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from specdecode_ref.errors import ModelError
from specdecode_ref.models.base import Model
from specdecode_ref.models.hf import HuggingFaceModel
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.tree import ancestors

transformers.logging.set_verbosity_error()

VOCAB, WINDOW = 61, 5
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
NEOX = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}

IN_HOUSE: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, **SPECIAL),
    "llama-tied-llama3": lambda: transformers.LlamaConfig(
        **SHAPE, **SPECIAL, tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=16
    ),
    "llama-biased-linear": lambda: transformers.LlamaConfig(
        **SHAPE, **SPECIAL, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, **SPECIAL, sliding_window=None),
    "mistral-sliding": lambda: transformers.MistralConfig(**SHAPE, **SPECIAL, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, **SPECIAL),
    "qwen2-sliding": lambda: transformers.Qwen2Config(
        **SHAPE, **SPECIAL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, **SPECIAL, head_dim=16),
    "smollm3": lambda: transformers.SmolLM3Config(**SHAPE, **SPECIAL, no_rope_layer_interval=2),
}
ADAPTED: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE, **SPECIAL, head_dim=16, sliding_window=WINDOW, layer_types=LAYER_TYPES, query_pre_attn_scalar=16
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=128, **SPECIAL
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**NEOX, **SPECIAL),
}
PAIRS = [(family, "transformer") for family in IN_HOUSE] + [(family, "adapter") for family in (*IN_HOUSE, *ADAPTED)]

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [27, 18, 28], [1, 4, 1, 5, 9, 2, 6]]
"""The longest is twice the window, and one row of each tree below is shorter than the others."""


def build(family: str, attention: str = "sdpa") -> Any:
    """A `transformers` model of random float64 weights, large enough that every term of it shows."""
    config = (IN_HOUSE | ADAPTED)[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    for weight in model.parameters():
        weight.data.normal_(0.0 if weight.dim() > 1 else 1.0, 0.3)
    return model


def wrap(peer: Any, kind: str) -> Model:
    if kind == "adapter":
        return HuggingFaceModel(peer)
    return Transformer.load(peer.config.to_dict(), peer.state_dict(), torch.float64)


@torch.no_grad()
def plain(peer: Any, text: list[int]) -> torch.Tensor:
    """What `transformers` says after a text, without any cache: [V]."""
    return peer(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


def pad(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("family", "kind"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_chain_and_tree_equal_plain_text(family: str, kind: str) -> None:
    peer = build(family)
    model = wrap(peer, kind)
    cache = model.new_cache(3, 4)  # too small on purpose: it has to grow
    model.prefill(PROMPTS, cache)
    shapes = [[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 0], [-1, 0, 1, 1, 0]]
    tokens = [[7, 11, 12, 13, 16, 17, 19], [20, 21, 22], [23, 24, 25, 26, 29]]
    got = model.forward(pad(tokens), shapes, cache).logits
    more_shapes, more_tokens = [[3, 7], [1, 2, 3, 4], [-1]], [[30, 31], [32, 33, 34, 36], [37]]
    more = model.forward(pad(more_tokens), more_shapes, cache).logits
    for b, prompt in enumerate(PROMPTS):
        parents, drafted = tuple(shapes[b] + more_shapes[b]), tokens[b] + more_tokens[b]
        for node in range(len(parents)):
            text = prompt + [drafted[i] for i in ancestors(parents, node)]
            first = len(shapes[b])
            close(got[b, node] if node < first else more[b, node - first], plain(peer, text))

    cache.commit([[0, 2, 5, 6], [0, 1, 3, 5], [0]])
    texts = [PROMPTS[0] + [7, 12, 17, 19], PROMPTS[1] + [20, 21, 32, 34], PROMPTS[2] + [23]]
    chain = model.forward(pad([[40, 41], [42, 43], [44]]), [[-1, 0], [-1, 0], [-1]], cache).logits
    close(chain[0, 1], plain(peer, [*texts[0], 40, 41]))
    close(chain[1, 1], plain(peer, [*texts[1], 42, 43]))
    close(chain[2, 0], plain(peer, [*texts[2], 44]))

    cache.rollback()
    cache.select([1])
    alone = model.forward(torch.tensor([[45]]), [[-1]], cache).logits
    close(alone[0, 0], plain(peer, [*texts[1], 45]))


@pytest.mark.parametrize(("family", "kind"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_features_are_the_residual_stream(family: str, kind: str) -> None:
    """k = 0, 1, 2 as `transformers` reports them; k = 3 is before the final norm, so norm and head give the logits."""
    peer = build(family)
    model = wrap(peer, kind)
    text = PROMPTS[0]
    with torch.no_grad():
        expected = peer(input_ids=torch.tensor([text]), output_hidden_states=True)
    cache = model.new_cache(2, 32)
    first, _ = model.prefill([text, text[:4]], cache, features=(2, 0, 1))
    for got, k in zip(first, (2, 0, 1), strict=True):
        close(got, expected.hidden_states[k][0])
    cache = model.new_cache(1, 32)
    out = model.forward(torch.tensor([text]), [range(-1, len(text) - 1)], cache, features=(3,))
    body = peer.base_model
    norm = next(getattr(body, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(body, n))
    with torch.no_grad():
        close(peer.get_output_embeddings()(norm(out.features[0])), expected.logits)


def test_eager_attention_is_taken_too() -> None:
    """Eager attention sums its softmax in float32, so this one agrees with itself only to float32."""
    peer = build("gemma3", attention="eager")
    model = HuggingFaceModel(peer)
    cache = model.new_cache(1, 16)
    model.prefill([PROMPTS[0]], cache)
    got = model.forward(torch.tensor([[7, 8, 9]]), [[-1, 0, 0]], cache).logits[0, 2]
    torch.testing.assert_close(got, plain(peer, [*PROMPTS[0], 7, 9]), rtol=0, atol=1e-4)


def test_shared_embeddings_count_their_logits() -> None:
    """The vocabulary is what the model returns, and the contract's fields are filled."""
    model = HuggingFaceModel(build("gpt2"), "my-gpt2")
    assert (model.name, model.vocab_size, model.context_length, model.dtype) == ("my-gpt2", VOCAB, 128, torch.float64)


MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED = {
    "mamba": (lambda: transformers.MambaConfig(**MAMBA, **SPECIAL), "recurrent state"),
    "rwkv": (lambda: transformers.RwkvConfig(**MAMBA, attention_hidden_size=32, **SPECIAL), "recurrent state"),
    "recurrent-gemma": (lambda: transformers.RecurrentGemmaConfig(**NEOX, **SPECIAL, lru_width=48), "recurrent state"),
    "qwen3-next": (
        lambda: transformers.Qwen3NextConfig(
            **SHAPE,
            **SPECIAL,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            num_experts=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "recurrent state",
    ),
    "bloom": (lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=4), "positions"),
}


@pytest.mark.filterwarnings("ignore")  # some of these warn of slow kernels while they are built
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_branch_is_refused_with_the_reason(family: str) -> None:
    config, reason = REFUSED[family]
    model = transformers.AutoModelForCausalLM.from_config(config())
    with pytest.raises(ModelError, match=reason):
        HuggingFaceModel(model)


def test_a_model_that_ignores_its_mask_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no configuration tells, the trial finds: here attention is causal by slot, whatever the mask says."""
    peer = build("llama")
    forward = peer.forward

    def deaf(attention_mask: torch.Tensor | None = None, **rest: Any) -> Any:
        if attention_mask is not None:
            nodes, slots = attention_mask.shape[-2:]
            causal = torch.ones(nodes, slots, dtype=torch.bool).tril(slots - nodes)
            attention_mask = torch.zeros(attention_mask.shape).double().masked_fill(~causal, float("-inf"))
        return forward(attention_mask=attention_mask, **rest)

    deaf.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(peer, "forward", deaf)
    with pytest.raises(ModelError, match="a branch of a tree differs"):
        HuggingFaceModel(peer)


def test_other_attention_kernels_are_refused() -> None:
    peer = build("llama")
    peer.config._attn_implementation = "flex_attention"
    with pytest.raises(ModelError, match="flex_attention"):
        HuggingFaceModel(peer)
