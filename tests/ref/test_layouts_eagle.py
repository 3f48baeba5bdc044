"""Published EAGLE heads, written here in exactly their layouts and read back: the logits are those of a page of torch.

The page knows nothing of caches, packed weights or trees: it computes whole sequences with full causal attention, from
the stored tensors, one layout's rules at a time. A branch of a tree is such a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from specdecode_ref.drafters import layouts
from specdecode_ref.drafters.eagle import EagleHead
from specdecode_ref.models.transformer import Transformer

V, H, INNER, HEADS, KV, DIM, LAYERS, EPS = 53, 24, 40, 4, 2, 6, 7, 1e-5
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
}
IDS = [0, 3, 4, 9, 11, 20, 21, 22, 40, 41, 52]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
Tensors = dict[str, Tensor]


def some(*shape: int) -> Tensor:
    """Random weights that float16 holds."""
    return torch.randn(shape).mul_(0.4).half().double()


def layer(at: str, inputs: int = H, norms: Sequence[str] = ("input_layernorm",), inner: int = INNER) -> Tensors:
    """The tensors of one layer that attends to `inputs` channels."""
    kv = KV * DIM
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (H, inputs), "k_proj": (kv, inputs), "v_proj": (kv, inputs)}
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()} | {"self_attn.o_proj": (H, H)}
    shapes |= {"mlp.gate_proj": (inner, H), "mlp.up_proj": (inner, H), "mlp.down_proj": (H, inner)}
    shapes |= dict.fromkeys((*norms, "post_attention_layernorm"), (H,))
    return {f"{at}{name}.weight": some(*shape) for name, shape in shapes.items()}


def llama(layers: int, tied: bool) -> Tensors:
    """The tensors of a whole Llama."""
    made = {"model.embed_tokens.weight": some(V, H), "model.norm.weight": some(H)}
    for i in range(layers):
        made |= layer(f"model.layers.{i}.")
    return made if tied else made | {"lm_head.weight": some(V, H)}


TARGETS: dict[bool, tuple[Transformer, Tensors]] = {}


def target(tied: bool = True) -> tuple[Transformer, Tensors]:
    """A target in float64 and its tensors, made once."""
    if tied not in TARGETS:
        generator = torch.random.get_rng_state()
        torch.manual_seed(7)
        tensors = llama(LAYERS, tied)
        config = SIZES | {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied, "rms_norm_eps": 3e-4}
        TARGETS[tied] = Transformer.load(config, tensors, torch.float64, name="host"), tensors
        torch.random.set_rng_state(generator)
    return TARGETS[tied]


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """A checkpoint in float16, whole numbers as they are."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {n: (t.half() if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


# The page of torch.


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    h = x.float()  # as these models are run, whatever the dtype
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)).double() * weight


def attended(t: Tensors, at: str, x: Tensor, keys: Tensor, sees: Tensor, positions: Tensor) -> Tensor:
    """Attention of x [N, in] over `keys` [S, in], whose positions are those of the last dimension of `sees` [N, S]."""

    def heads(name: str, inputs: Tensor, where: Tensor, turned: bool) -> Tensor:
        y = (inputs @ t[f"{at}self_attn.{name}.weight"].T).view(len(inputs), -1, DIM)
        if turned:
            angle = where[:, None].float() * 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)
            cos, sin = (f(torch.cat((angle, angle), -1))[:, None].double() for f in (torch.cos, torch.sin))
            y = y * cos + torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), -1) * sin
        return y.repeat_interleave(HEADS // y.shape[1], 1).transpose(0, 1)

    q = heads("q_proj", x, positions[-len(x) :], True)
    k, v = heads("k_proj", keys, positions, True), heads("v_proj", keys, positions, False)
    scores = (q @ k.mT / DIM**0.5).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), H) @ t[f"{at}self_attn.o_proj.weight"].T


def block(t: Tensors, at: str, x: Tensor, seen: Tensor) -> Tensor:
    """One layer over a whole sequence: x [N, H] is the residual stream, `seen` what attention reads."""
    n = len(x)
    x = x + attended(t, at, seen, seen, torch.ones(n, n, dtype=torch.bool).tril(), torch.arange(n))
    h = rms(x, t[f"{at}post_attention_layernorm.weight"])
    gate, up = (h @ t[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (silu(gate) * up) @ t[f"{at}mlp.down_proj.weight"].T


Step = Callable[[Tensor, Tensor], Tensor]
"""tokens [N], what stands beside them [N, H] -> the head's output [N, H], over a whole sequence."""


def eagle3(t: Tensors, table: Tensor, first: str = "layers.0.", layers: int = 1, *, before: bool = False) -> Step:
    """EAGLE-3's network: [normed token | normed feature] into the first layer, then ordinary ones."""

    def step(tokens: Tensor, beside: Tensor) -> Tensor:
        normed = rms(beside, t[f"{first}hidden_norm.weight"])
        seen = torch.cat((rms(table[tokens], t[f"{first}input_layernorm.weight"]), normed), -1)
        x = block(t, first, normed if before else beside, seen)
        for i in range(1, layers):
            x = block(t, f"layers.{i}.", x, rms(x, t[f"layers.{i}.input_layernorm.weight"]))
        return x

    return step


def eagle1(t: Tensors, table: Tensor) -> Step:
    """EAGLE-1's network: joined in `fc`, the first layer without a norm of its own."""

    def step(tokens: Tensor, beside: Tensor) -> Tensor:
        x = torch.cat((table[tokens], beside), -1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(H))
        return block(t, "layers.0.", x, x)

    return step


def streams(of: Transformer, tokens: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, ...]:
    return of.prefill([tokens], of.new_cache(1, len(tokens)), layers)[0]


def check(head: EagleHead, step: Step, fused: Tensor, logits: Callable[[Tensor], Tensor], after: Any = None) -> None:
    """Compare the head's logits along a chain and over a tree with the page's, deeper guesses on its own outputs.

    fused: what the page puts beside the tokens 1 .. N - 1. after: what becomes of an output before it is read again.
    """
    after = after or (lambda x: x)
    cache = head.new_cache(1, 4)
    features = streams(target()[0] if head.name != "untied" else target(False)[0], TOKENS[:-1], head.fusion.layers)
    torch.testing.assert_close(head.fused(features), fused, **CLOSE)
    got = head.read(TOKENS[1:], head.fused(features), range(-1, len(fused) - 1), cache)
    cache.commit([range(len(fused))])
    whole = step(torch.tensor(TOKENS[1:]), fused)
    torch.testing.assert_close(head.logits(got), logits(whole), **CLOSE)

    tree = {0: (-1, 30), 1: (-1, 31), 2: (0, 32), 3: (1, 33), 4: (0, 34), 5: (3, 35)}  # node: parent, token
    outputs: dict[int, Tensor] = {-1: got[-1]}
    for level in ([0, 1], [2, 3, 4], [5]):
        parents = [tree[i][0] for i in level]
        x = head.read([tree[i][1] for i in level], torch.stack([outputs[p] for p in parents]), parents, cache)
        outputs |= dict(zip(level, x, strict=True))
    for leaf in (2, 4, 5):
        path = [leaf]
        while tree[path[0]][0] >= 0:
            path.insert(0, tree[path[0]][0])
        tokens, beside = TOKENS[1:], fused
        for node in path:
            tokens = [*tokens, tree[node][1]]
            beside = torch.cat((beside, after(step(torch.tensor(tokens[:-1]), beside)[-1:])))
        expected = logits(step(torch.tensor(tokens), beside))[-1]
        torch.testing.assert_close(head.logits(outputs[leaf][None])[0], expected, **CLOSE)


def d2t(ids: Sequence[int] = IDS) -> Tensors:
    offsets = torch.tensor(ids) - torch.arange(len(ids))
    return {"d2t": offsets, "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)}


def eagle3_tensors(first: str, width: int = len(IDS), aux: int = 3, layers: int = 1) -> Tensors:
    made = layer(first, 2 * H, ("input_layernorm", "hidden_norm"))
    for i in range(1, layers):
        made |= layer(f"layers.{i}.")
    return made | {"fc.weight": some(H, aux * H), "norm.weight": some(H), "lm_head.weight": some(width, H)}


SAFE: dict[str, Any] = SIZES | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)}


def speculators(sizes: Mapping[str, Any] = SIZES, **more: Any) -> dict[str, Any]:
    """A configuration as the `speculators` library writes it."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(IDS),
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "host"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": dict(sizes),
        **more,
    }


class TestEagle3:
    def test_safeailab(self, tmp_path: Path) -> None:
        """`midlayer`, no layer ids: 2, half way and 3 before the end."""
        host, stored = target()
        t = eagle3_tensors("midlayer.") | d2t()
        head = layouts.load(write(tmp_path, SAFE, t), host)
        assert isinstance(head, EagleHead) and head.fusion.layers == (2, 3, 4) and head.name == tmp_path.name
        assert head.words is not None and head.words.ids.tolist() == IDS and head.words.size == V
        fused = torch.cat(streams(host, TOKENS[:-1], (2, 3, 4)), -1) @ t["fc.weight"].T
        step = eagle3(t, stored["model.embed_tokens.weight"], "midlayer.")
        check(head, step, fused, lambda x: rms(x, t["norm.weight"]) @ t["lm_head.weight"].T)

    @pytest.mark.parametrize("before", [False, True])
    def test_speculators(self, tmp_path: Path, before: bool) -> None:
        """Two layers, an embedding of its own, layer ids, and the residual stream from before or behind the norm."""
        t = eagle3_tensors("layers.0.", aux=2, layers=2) | d2t() | {"embed_tokens.weight": some(V, H)}
        more = {"eagle_aux_hidden_state_layer_ids": [1, LAYERS], "norm_before_residual": before}
        head = layouts.load(write(tmp_path, speculators(SIZES | {"num_hidden_layers": 2}, **more), t), target()[0])
        assert isinstance(head, EagleHead) and head.fusion.layers == (1, LAYERS)
        fused = torch.cat(streams(target()[0], TOKENS[:-1], (1, LAYERS)), -1) @ t["fc.weight"].T
        step = eagle3(t, t["embed_tokens.weight"], layers=2, before=before)
        check(head, step, fused, lambda x: rms(x, t["norm.weight"]) @ t["lm_head.weight"].T)

    def test_eagle_3_1(self, tmp_path: Path) -> None:
        """Each feature normed, and deeper guesses read the normed output."""
        t = eagle3_tensors("layers.0.") | d2t() | {f"fc_norm.{i}.weight": some(H) for i in range(3)}
        more: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 3, 5], "fc_norm": True, "norm_output": True}
        head = layouts.load(write(tmp_path, speculators(**more), t), target()[0])
        assert isinstance(head, EagleHead)
        features = streams(target()[0], TOKENS[:-1], (0, 3, 5))
        normed = [rms(f, t[f"fc_norm.{i}.weight"]) for i, f in enumerate(features)]
        step = eagle3(t, target()[1]["model.embed_tokens.weight"])
        output = lambda x: rms(x, t["norm.weight"])  # noqa: E731
        check(head, step, torch.cat(normed, -1) @ t["fc.weight"].T, lambda x: output(x) @ t["lm_head.weight"].T, output)

    def test_one_norm_over_all_features(self, tmp_path: Path) -> None:
        """gpt-oss style, with the settings under `eagle_config` as some publish them."""
        t = eagle3_tensors("midlayer.") | d2t() | {"input_norm.weight": some(3 * H)}
        inner = {"eagle_aux_hidden_state_layer_ids": [1, 2, 6], "norm_before_fc": True, "use_aux_hidden_state": True}
        head = layouts.load(write(tmp_path, SAFE | {"eagle_config": inner}, t), target()[0])
        assert isinstance(head, EagleHead)
        joined = rms(torch.cat(streams(target()[0], TOKENS[:-1], (1, 2, 6)), -1), t["input_norm.weight"])
        step = eagle3(t, target()[1]["model.embed_tokens.weight"], "midlayer.")
        check(head, step, joined @ t["fc.weight"].T, lambda x: rms(x, t["norm.weight"]) @ t["lm_head.weight"].T)

    def test_all_tokens_and_the_target_s_lm_head(self, tmp_path: Path) -> None:
        t = eagle3_tensors("layers.0.", V)
        del t["lm_head.weight"]
        for tied in (True, False):
            head = layouts.load(write(tmp_path, speculators(draft_vocab_size=V), t), target(tied)[0])
            assert isinstance(head, EagleHead) and head.words is None
            x = some(3, H)
            rows = target(tied)[1]["model.embed_tokens.weight" if tied else "lm_head.weight"]
            torch.testing.assert_close(head.logits(x), rms(x, t["norm.weight"]) @ rows.T, **CLOSE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", ["safeailab", "speculators"])
def test_eagle1(tmp_path: Path, names: str, bias: bool) -> None:
    """Joined with the feature after the target's final norm, and read by the target's LM head as it is."""
    host, stored = target(False)
    t = layer("layers.0.", norms=()) | {"fc.weight": some(H, 2 * H)} | ({"fc.bias": some(H)} if bias else {})
    config: dict[str, Any] = SIZES | {"architectures": ["LlamaForCausalLM"]}
    written = t | {"embed_tokens.weight": stored["model.embed_tokens.weight"]}
    if names == "speculators":
        renames = {"layers.0.": "transformer.", "fc.": "fusion_fc."}
        written = {
            next((n + k.removeprefix(o) for o, n in renames.items() if k.startswith(o)), k): w for k, w in t.items()
        }
        config = {"speculators_model_type": "eagle", "transformer_layer_config": SIZES, "fusion_bias": bias}
    head = layouts.load(write(tmp_path / "untied", config, written), host)
    assert isinstance(head, EagleHead) and head.words is None and head.fusion.layers == (LAYERS,)
    last = rms(streams(host, TOKENS[:-1], (LAYERS,))[0], stored["model.norm.weight"], 3e-4)
    step = eagle1(t, stored["model.embed_tokens.weight"])
    check(head, step, last, lambda x: x @ stored["lm_head.weight"].T)


def test_a_target_of_transformers_lends_the_same(tmp_path: Path) -> None:
    """The adapter's embeddings, final norm and LM head are found where the library keeps them."""
    transformers = pytest.importorskip("transformers")
    from specdecode_ref.models.hf import HuggingFaceModel

    stored = target(False)[1]
    config = SIZES | {"num_hidden_layers": LAYERS, "tie_word_embeddings": False, "rms_norm_eps": 3e-4}
    of_library = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, pad_token_id=0)).double()
    of_library.load_state_dict(stored)
    adapted = HuggingFaceModel(of_library)
    t = layer("layers.0.", norms=()) | {"fc.weight": some(H, 2 * H)}
    folder = write(tmp_path, SIZES, t)
    heads = [layouts.load(folder, host) for host in (target(False)[0], adapted)]
    got = []
    for head, host in zip(heads, (target(False)[0], adapted), strict=True):
        assert isinstance(head, EagleHead)
        features = streams(host, TOKENS[:-1], head.fusion.layers)  # type: ignore[arg-type]
        cache = head.new_cache(1, 9)
        got.append(head.logits(head.read(TOKENS[1:], head.fused(features), range(-1, len(TOKENS) - 2), cache)))
    torch.testing.assert_close(got[0], got[1], rtol=0, atol=1e-5)
    words = speculators() | {"specdecode_ref": {"shares": ["lm_head"]}}
    reduced = eagle3_tensors("layers.0.") | d2t()
    del reduced["lm_head.weight"]
    lent = [layouts.load(write(tmp_path, words, reduced), host) for host in (target(False)[0], adapted)]
    x = some(2, H)
    assert isinstance(lent[0], EagleHead) and isinstance(lent[1], EagleHead)
    torch.testing.assert_close(lent[0].logits(x), lent[1].logits(x), **CLOSE)
    torch.testing.assert_close(
        lent[0].logits(x), rms(x, reduced["norm.weight"]) @ stored["lm_head.weight"][IDS].T, **CLOSE
    )
