"""Published checkpoints, written here in exactly their layouts and read back: the logits are those of a page of torch.

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
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from specdecode_ref.drafters import layouts
from specdecode_ref.drafters.eagle import EagleHead
from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.layouts import DraftModel
from specdecode_ref.drafters.medusa import MedusaHeads
from specdecode_ref.errors import ModelError
from specdecode_ref.models.table import TableModel
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


class TestMedusa:
    @staticmethod
    def expected(t: Tensors, at: str, heads: int, layers: int, lm_heads: Sequence[Tensor], feature: Tensor) -> Tensor:
        """The paper's formula, head by head."""
        rows = []
        for i in range(heads):
            x = rms(feature, target(False)[1]["model.norm.weight"], 3e-4)
            for j in range(layers):
                name = at.format(i, j)
                x = x + silu(t[f"{name}.weight"] @ x + t.get(f"{name}.bias", torch.zeros(H)))
            rows.append(lm_heads[i % len(lm_heads)] @ x)
        return torch.stack(rows)

    @pytest.mark.parametrize("prefix", ["", "medusa_head."])
    @pytest.mark.parametrize("layers", [1, 2])
    def test_faster_decoding(self, tmp_path: Path, prefix: str, layers: int) -> None:
        """With a head more than the configuration names, which it does not use."""
        t = {f"{i}.{j}.linear.weight": some(H, H) for i in range(4) for j in range(layers)}
        t |= {f"{i}.{j}.linear.bias": some(H) for i in range(4) for j in range(layers)}
        t |= {f"{i}.{layers}.weight": some(V, H) for i in range(4)}
        whole = {"lm_head.weight": some(V, H), "model.norm.weight": some(H)} if prefix else {}
        config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "base_model_name_or_path": "host"}
        heads = layouts.load(write(tmp_path, config, {prefix + n: w for n, w in t.items()} | whole), target(False)[0])
        assert isinstance(heads, MedusaHeads) and len(heads) == 3
        assert heads.words is None and heads.layer == LAYERS and heads.vocab_size == V
        lm_heads, feature = [t[f"{i}.{layers}.weight"] for i in range(3)], some(H)
        expected = self.expected(t, "{}.{}.linear", 3, layers, lm_heads, feature)
        torch.testing.assert_close(heads.logits(feature), expected, **CLOSE)

    @pytest.mark.parametrize("kind", ["each", "shared", "first", "borrowed", "prefixed"])
    @pytest.mark.parametrize("reduced", [False, True])
    def test_vllm(self, tmp_path: Path, kind: str, reduced: bool) -> None:
        """`blocks` and `lm_heads`, one for each head or one for all; a token map in the order of frequency."""
        ids = [40, 3, 0, 52, 9] if reduced else list(range(V))
        blocks = {f"blocks.{i}.layers.{j}.weight": some(H, H) for i in range(3) for j in range(2)}
        full, cut = some(V, H), [some(len(ids), H) for _ in range(3)]
        own: dict[str, Tensors] = {
            "each": {f"lm_heads.{i}.weight": w for i, w in enumerate(cut)},
            "prefixed": {f"lm_heads.{i}.weight": w for i, w in enumerate(cut)},
            "shared": {"lm_head.weight": full},
            "first": {"lm_heads.0.weight": full},
            "borrowed": {},
        }
        config: dict[str, Any] = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H}
        config |= {"vocab_size": V, "num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": len(ids)}
        config |= {"original_lm_head": kind not in ("each", "prefixed"), "medusa_fc_bias": False}
        stored = blocks | own[kind] | ({"token_map": torch.tensor(ids)} if reduced else {})
        if kind == "prefixed":
            stored = {f"medusa_heads.{name}": weight for name, weight in stored.items()}
        heads = layouts.load(write(tmp_path, config, stored), target(False)[0])
        assert isinstance(heads, MedusaHeads)
        assert (heads.words.ids.tolist() if heads.words else list(range(V))) == ids
        lent = target(False)[1]["lm_head.weight"]
        rows = {"shared": [full[ids]], "first": [full[ids]], "borrowed": [lent[ids]]}.get(kind, cut)
        feature = some(H)
        expected = self.expected(blocks, "blocks.{}.layers.{}", 3, 2, rows, feature)
        torch.testing.assert_close(heads.logits(feature), expected, **CLOSE)


def plain(t: Tensors, table: Tensor, head: Tensor, tokens: Sequence[int], layers: int) -> Tensor:
    """Logits of a Llama over a whole sequence."""
    x = table[torch.tensor(tokens)]
    for i in range(layers):
        x = block(t, f"model.layers.{i}.", x, rms(x, t[f"model.layers.{i}.input_layernorm.weight"]))
    return rms(x, t["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reduced", [False, True])
def test_draft_model(tmp_path: Path, tied: bool, reduced: bool) -> None:
    """A plain Llama, or one with a reduced vocabulary: its logits stand for fewer tokens, its embedding for all."""
    t = llama(2, tied)
    config = SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    head = t["model.embed_tokens.weight" if tied else "lm_head.weight"]
    if reduced:
        config["draft_vocab_size"], head = len(IDS), head[IDS]
        t |= d2t() | ({} if tied else {"lm_head.weight": head})
    draft = layouts.load(write(tmp_path, config, t), target()[0])
    assert isinstance(draft, DraftModel) and (draft.words is not None) == reduced
    model = draft.model
    got = model.forward(torch.tensor([TOKENS]), [range(-1, len(TOKENS) - 1)], model.new_cache(1, 9)).logits[0]
    expected = plain(t, t["model.embed_tokens.weight"], head, TOKENS, 2)
    torch.testing.assert_close(got, expected, **CLOSE)


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


WORDS = Words(torch.tensor(IDS), V)


class TestSaving:
    """What `save_*` writes is read back as it was, and is what vLLM looks for."""

    @pytest.mark.parametrize("normed", [True, False])
    @pytest.mark.parametrize("words", [WORDS, None])
    def test_eagle(self, tmp_path: Path, normed: bool, words: Words | None) -> None:
        t = eagle3_tensors("layers.0.", layers=2)
        del t["lm_head.weight"]
        sizes = SIZES | {"num_hidden_layers": 2}
        note = {"licence": "Apache-2.0"}
        folder = tmp_path / "new" / "head"
        layouts.save_eagle(folder, t, target()[0], sizes, [1, 4, 6], normed=normed, words=words, note=note)
        config = json.loads((folder / "config.json").read_text())
        assert config["speculators_model_type"] == "eagle3" and config["fc_norm"] is normed
        assert config["transformer_layer_config"]["num_attention_heads"] == HEADS
        assert config["specdecode_ref"]["licence"] == "Apache-2.0"
        assert config["specdecode_ref"]["shares"] == ["embed_tokens", "lm_head"]
        files = load_file(folder / "model.safetensors")
        assert {weight.dtype for name, weight in files.items() if name not in ("d2t", "t2d")} == {torch.float16}
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        head = layouts.load(folder, target()[0])
        assert isinstance(head, EagleHead) and head.fusion.layers == (1, 4, 6) and head.name == "head"
        features = streams(target()[0], TOKENS[:-1], (1, 4, 6))
        ones = torch.ones(H, dtype=torch.float64)
        fused = torch.cat([rms(f, ones) if normed else f for f in features], -1) @ t["fc.weight"].T
        table = target()[1]["model.embed_tokens.weight"]
        rows = table[IDS] if words else table
        check(head, eagle3(t, table, layers=2), fused, lambda x: rms(x, t["norm.weight"]) @ rows.T)

    @pytest.mark.parametrize("words", [WORDS, None])
    def test_medusa(self, tmp_path: Path, words: Words | None) -> None:
        t = {f"blocks.{i}.layers.0.weight": some(H, H) for i in range(4)}
        t |= {f"blocks.{i}.layers.0.bias": some(H) for i in range(4)}
        layouts.save_medusa(tmp_path, t, target(False)[0], words=words)
        config = json.loads((tmp_path / "config.json").read_text())
        wanted = {"num_heads": 4, "num_hidden_layers": 1, "medusa_fc_bias": True, "original_lm_head": True}
        assert wanted.items() <= config.items()
        heads, feature = layouts.load(tmp_path, target(False)[0]), some(H)
        lm_head = target(False)[1]["lm_head.weight"][IDS if words else slice(None)]
        expected = TestMedusa.expected(t, "blocks.{}.layers.{}", 4, 1, [lm_head], feature)
        assert isinstance(heads, MedusaHeads)
        torch.testing.assert_close(heads.logits(feature), expected, **CLOSE)

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("words", [WORDS, None])
    def test_draft(self, tmp_path: Path, words: Words | None, shared: bool) -> None:
        t, table = llama(2, True), target()[1]["model.embed_tokens.weight"]
        sizes = SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": True}
        if shared:
            del t["model.embed_tokens.weight"]
        layouts.save_draft(tmp_path, t, target()[0], sizes, words=words)
        draft = layouts.load(tmp_path, target()[0])
        assert isinstance(draft, DraftModel)
        model = draft.model
        got = model.forward(torch.tensor([TOKENS]), [range(-1, len(TOKENS) - 1)], model.new_cache(1, 9)).logits[0]
        table = table if shared else t["model.embed_tokens.weight"]
        torch.testing.assert_close(got, plain(t, table, table[IDS] if words else table, TOKENS, 2), **CLOSE)

    def test_a_full_disk_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        t = {"blocks.0.layers.0.weight": some(H, H)}
        layouts.save_medusa(tmp_path / "head", t, target()[0])
        before = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
        write_bytes = Path.write_bytes

        def full(path: Path, data: bytes) -> int:
            write_bytes(path, data[:10])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        for folder in ("head", "other"):
            with pytest.raises(ModelError, match="No space left on device; make room"):
                layouts.save_medusa(tmp_path / folder, t | {"blocks.1.layers.0.weight": some(H, H)}, target()[0])
        assert {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()} == before
        assert not (tmp_path / "other").exists()

    def test_a_place_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match="a folder that can be written"):
            layouts.save_medusa(tmp_path / "file", {"blocks.0.layers.0.weight": some(H, H)}, target()[0])


def instead(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    """All of `new` and nothing else."""
    old.clear()
    old.update(new)


def nothing_known(config: dict[str, Any], tensors: Tensors) -> None:
    """Neither file says what this is."""
    instead(config, {})
    instead(tensors, {"x": some(2)})


Change = Callable[[dict[str, Any], Tensors], Any]
"""What is wrong with a checkpoint: changes its configuration and its tensors in place."""

WRONG: dict[str, tuple[Change, str]] = {
    "another width": (lambda c, t: c["transformer_layer_config"].update(hidden_size=48), "a head for 'host'"),
    "another target's width": (lambda c, t: c.update(target_hidden_size=48), "a head for 'host' .24 wide"),
    "another vocabulary": (lambda c, t: c["transformer_layer_config"].update(vocab_size=V + 1), "a vocabulary of 53"),
    "a deeper target": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 8]), "layers up to 7"),
    "a layer below none": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[-1, 2, 3]), "layers up to 7"),
    "layers that are none": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids="all"), "a list of layers"),
    "more features than fc reads": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        "fc.weight of shape .24, 96.",
    ),
    "a saved head of another target": (
        lambda c, t: c.update(specdecode_ref={"target": {"num_hidden_layers": 30}}),
        "num_hidden_layers 7.*got num_hidden_layers 30",
    ),
    "a missing tensor": (lambda c, t: t.pop("fc.weight"), "a weight named fc.weight"),
    "a missing LM head": (lambda c, t: t.pop("lm_head.weight"), "a weight named lm_head.weight"),
    "a wrong shape": (lambda c, t: t.update({"norm.weight": some(H + 1)}), "norm.weight of shape .24."),
    "a norm that is not applied": (
        lambda c, t: t.update({"input_norm.weight": some(3 * H)}),
        "accounts for.*input_norm",
    ),
    "a norm that is not there": (lambda c, t: c.update(fc_norm=True), "a weight named fc_norm.0.weight"),
    "words out of order": (lambda c, t: t.update(d2t(IDS[::-1])), "ascending token ids"),
    "words out of range": (lambda c, t: t.update(d2t=t["d2t"] + 1), "token ids below 53"),
    "words below none": (lambda c, t: t.update(d2t=t["d2t"] - 1), "token ids below 53"),
    "words that are no numbers": (lambda c, t: t.update(d2t=t["d2t"].double()), "whole numbers in d2t"),
    "no words": (lambda c, t: t.pop("d2t"), "a weight named d2t"),
    "more words than it says": (lambda c, t: c.update(draft_vocab_size=12), "d2t of shape .12."),
    "tensors of a Medusa head": (
        lambda c, t: instead(t, {"blocks.0.layers.0.weight": some(H, H)}),
        "tensors of EAGLE-3, as config.json of .* says; got tensors of Medusa",
    ),
    "a configuration of Medusa": (
        lambda c, t: c.update(speculators_model_type="medusa"),
        "tensors of Medusa, as config.json of .* says; got tensors of EAGLE-3",
    ),
    "an unknown kind": (lambda c, t: c.update(speculators_model_type="mlp"), "eagle, eagle3 or medusa"),
    "tensors of nothing known": (nothing_known, "a draft head or a draft model"),
    "sizes that are none": (lambda c, t: c.update(transformer_layer_config=[1]), "sizes of layers"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, wrong: str) -> None:
    change, why = WRONG[wrong]
    config, tensors = json.loads(json.dumps(speculators())), eagle3_tensors("layers.0.") | d2t()
    layouts.load(write(tmp_path, config, tensors), target()[0])
    change(config, tensors)
    with pytest.raises(ModelError, match=why) as caught:
        layouts.load(write(tmp_path, config, tensors), target()[0])
    assert "\n" not in str(caught.value) and str(caught.value).startswith("expected")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c, t: c.update(num_heads=3), "a weight named blocks.2.layers.0.weight"),
        (lambda c, t: c.update(num_heads=0), "numbers of heads and layers"),
        (lambda c, t: c.update(hidden_size=48), "24 wide"),
        (lambda c, t: c.update(vocab_size=99), "a vocabulary of 53 tokens"),
        (lambda c, t: c.update(truncated_vocab_size=V), "an LM head over the words"),
        (lambda c, t: t.update(token_map=torch.tensor([1, 1, 2, 3, 4])), "each once"),
        (lambda c, t: t.update(token_map=torch.tensor([1, 53, 2, 3, 4])), "token ids below 53"),
        (lambda c, t: t.pop("token_map"), "a weight named token_map"),
        (lambda c, t: t.pop("lm_heads.1.weight"), "a weight named lm_heads.1.weight"),
        (lambda c, t: t.update({"lm_heads.1.weight": some(6, H)}), "an LM head over the words"),
        (lambda c, t: t.update({"lm_heads.1.weight": torch.tensor(1.0)}), "one row or more"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused(tmp_path: Path, change: Change, why: str) -> None:
    config: dict[str, Any] = {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": 2}
    config |= {"num_hidden_layers": 1, "truncated_vocab_size": 5}
    tensors = {f"blocks.{i}.layers.0.weight": some(H, H) for i in range(2)}
    tensors |= {f"lm_heads.{i}.weight": some(5, H) for i in range(2)} | {"token_map": torch.tensor([9, 1, 2, 3, 4])}
    layouts.load(write(tmp_path, config, tensors), target()[0])
    change(config, tensors)
    with pytest.raises(ModelError, match=why):
        layouts.load(write(tmp_path, config, tensors), target()[0])


def test_a_draft_model_lacks_no_tensor_that_it_did_not_share(tmp_path: Path) -> None:
    config, tensors = SIZES | {"tie_word_embeddings": False}, llama(1, True)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with pytest.raises(ModelError, match=f"a weight named {name}"):
            layouts.load(write(tmp_path, config, tensors), target()[0])
        tensors = llama(1, False)
        del tensors["model.embed_tokens.weight"]


def test_norms_of_a_later_eagle1_are_refused(tmp_path: Path) -> None:
    config = {"speculators_model_type": "eagle", "transformer_layer_config": SIZES, "layernorms": True}
    t = {"fusion_fc.weight": some(H, 2 * H)}
    with pytest.raises(ModelError, match="without extra norms"):
        layouts.load(write(tmp_path, config, t), target()[0])


@pytest.mark.parametrize("suffix", ["pt", "bin"])
def test_a_pickle_is_not_opened(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    (tmp_path / f"medusa_lm_head.{suffix}").write_bytes(b"not even a pickle")
    with pytest.raises(ModelError, match=r"a pickle, which could run code; convert it .*save_file.*weights_only=True"):
        layouts.load(tmp_path, target()[0])


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", speculators(), eagle3_tensors("layers.0.") | d2t())
    whole = (folder / "model.safetensors").read_bytes()
    for data in (whole[:-100], whole[:20], b""):
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match="a damaged file"):
            layouts.load(folder, target()[0])
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON in"):
        layouts.load(folder, target()[0])
    with pytest.raises(ModelError, match="a folder with config"):
        layouts.load(tmp_path / "nowhere", target()[0])


def test_a_target_without_layers_lends_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a target with layers"):
        layouts.load(write(tmp_path, speculators(), d2t()), TableModel.random(V))
