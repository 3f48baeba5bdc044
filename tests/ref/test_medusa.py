"""Medusa's drafter: which head guesses which level, what it remembers between rounds, and that it loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.decode import autoregressive, speculative
from specdecode_ref.drafters.eagle import rms_norm
from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.medusa import Medusa, MedusaHeads
from specdecode_ref.drafters.shapes import Dynamic, Sampled, Shape, Static, parse
from specdecode_ref.fidelity import setups
from specdecode_ref.fidelity.laws import tv
from specdecode_ref.fidelity.loop import Setup, generated
from specdecode_ref.models.base import Output
from specdecode_ref.models.linear import pack
from specdecode_ref.models.table import TableModel
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.sampling import SamplingRule, law
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict

V, H, HEADS, LAYERS = 23, 16, 3, 2
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
RULE = SamplingRule()
PROMPT = [3, 1, 4, 1, 5]


def product(*shape: int) -> Any:
    return pack(torch.randn(*shape, dtype=torch.float64) * 0.5, None, torch.float64, CPU)


def make_target() -> Transformer:
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (V, H), "model.norm": (H,)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{name}_proj": (H, H) for name in "qkvo"}
        shapes |= {at + "mlp.gate_proj": (24, H), at + "mlp.up_proj": (24, H), at + "mlp.down_proj": (H, 24)}
        shapes |= {at + "input_layernorm": (H,), at + "post_attention_layernorm": (H,)}
    weights = {f"{n}.weight": torch.randn(shape, dtype=torch.float64) * 0.6 for n, shape in shapes.items()}
    return Transformer.load(CONFIG, weights, torch.float64)


def make_heads(words: Words | None = None, lm_heads: int = 1) -> MedusaHeads:
    torch.manual_seed(6)
    blocks = [[product(H, H)] for _ in range(HEADS)]
    width = len(words.ids) if words else V
    return MedusaHeads(blocks, [product(width, H) for _ in range(lm_heads)], lambda x: 2 * x, LAYERS, V, words)


def proposed(drafter: Medusa, features: Sequence[Tensor], room: int = 9, seed: int = 0) -> DraftTree:
    proposer = drafter.start(PROMPT, RULE, features)
    return proposer.propose(Context(PROMPT, len(PROMPT), room), Coins(seed))


FEATURES = (torch.linspace(-2, 2, 4 * H, dtype=torch.float64).view(4, H).sin(),)


@pytest.mark.parametrize("lm_heads", [1, HEADS])
def test_the_heads_read_the_normed_feature_each_for_itself(lm_heads: int) -> None:
    heads, feature = make_heads(lm_heads=lm_heads), FEATURES[0][-1]
    for i, row in enumerate(heads.logits(feature)):
        x = 2 * feature
        x = x + torch.nn.functional.silu(heads.blocks[i][0](x))
        torch.testing.assert_close(row, heads.lm_heads[i % lm_heads](x))
    assert len(heads) == HEADS


def test_a_level_is_guessed_by_its_head() -> None:
    """By rank: all nodes of a level choose from the same row, that of the head of their depth."""
    heads = make_heads()
    best = heads.logits(FEATURES[0][-1]).topk(3).indices.tolist()
    tree = proposed(Medusa(heads, Static(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0)))), FEATURES)
    levels: dict[int, int] = {}
    for node in range(1, len(tree)):
        depth, siblings = tree.depths[node], tree.children[tree.parents[node]]
        assert tree.tokens[node] == best[depth - 1][siblings.index(node)]
        levels[depth] = levels.get(depth, 0) + 1
    assert levels == {1: 2, 2: 3, 3: 2} and set(tree.draws[1:]) == {"deterministic"}


def test_what_is_drawn_is_drawn_from_the_head_s_law() -> None:
    heads = make_heads()
    logits = heads.logits(FEATURES[0][-1])
    tree = proposed(Medusa(heads, Sampled((2, 2, 1))), FEATURES)
    for node, q in enumerate(tree.q):
        if depth_left := tree.depths[node] < 3:
            history = [*PROMPT, *tree.history(node)]
            assert torch.equal(q, law(logits[tree.depths[node]], RULE, history, len(PROMPT)))  # type: ignore[arg-type]
        assert depth_left == (q is not None)


@pytest.mark.parametrize("shape", [Sampled((1,) * 6), Dynamic(6, 2, 20), parse("static:0.00.000.0000.00000")])
@pytest.mark.parametrize("room", [0, 1, 2, 3, 9])
def test_the_tree_ends_where_the_heads_or_the_room_do(shape: Any, room: int) -> None:
    assert proposed(Medusa(make_heads(), shape), FEATURES, room).depth == min(room, HEADS)


def test_words_are_the_target_s_tokens() -> None:
    words = Words(torch.tensor([20, 2, 7, 11]), V)
    heads = make_heads(words)
    best = words.ids[heads.logits(FEATURES[0][-1]).argmax(-1)].tolist()
    assert list(proposed(Medusa(heads, parse("static:0.00.000")), FEATURES).tokens[1:]) == best  # type: ignore[arg-type]
    drawn = [proposed(Medusa(heads, Sampled((4, 4))), FEATURES, seed=seed) for seed in range(60)]
    assert {token for tree in drawn for token in tree.tokens[1:]} == set(words.ids.tolist())
    assert Medusa(heads).vocab_size == V


def test_it_reads_the_last_feature_of_a_path_whoever_drafted_it() -> None:
    drafter = Medusa(make_heads(), parse("static:0.1.00"))  # type: ignore[arg-type]
    proposer = drafter.start(PROMPT, RULE, FEATURES)
    proposer.propose(Context(PROMPT, len(PROMPT), 9), Coins(0))
    path = torch.randn(3, H, dtype=torch.float64)
    proposer.observe(Verdict((0, 7, 9), 2, "target", (), torch.zeros(V)), (path,))
    longer = [*PROMPT, 8, 8, 2]
    tree = proposer.propose(Context(longer, len(PROMPT), 9), Coins(0))
    assert tree.tokens[0] == 2 and tree.tokens[1] == int(drafter.heads.logits(path[-1])[0].argmax())


def test_without_a_feature_it_waits() -> None:
    """A prompt of one token has none before its root; the first round brings one."""
    proposer = Medusa(make_heads()).start([4], RULE, (torch.zeros(0, H, dtype=torch.float64),))
    assert len(proposer.propose(Context([4], 1, 9), Coins(0))) == 1
    proposer.observe(Verdict((0,), 2, "target", (), torch.zeros(V)), (torch.ones(1, H, dtype=torch.float64),))
    assert len(proposer.propose(Context([4, 2], 1, 9), Coins(0))) > 1
    assert len(Medusa(make_heads()).start([4], RULE).propose(Context([4], 1, 9), Coins(0))) == 1


def test_the_trace_s_header_names_the_tree_and_the_head() -> None:
    drafter = Medusa(make_heads())
    assert drafter.name == "medusa" and drafter.features == (LAYERS,)
    assert drafter.settings == {"tree": "static:narrow", "head": "medusa"}


SHAPES: list[Shape] = [Sampled((1, 1, 1)), Sampled((3, 2), "with_replacement"), Sampled((2, 2, 1)), Dynamic(3, 2, 5)]


@pytest.mark.parametrize("shape", [*SHAPES, parse("static:wide")], ids=str)
@pytest.mark.parametrize("prompt", [PROMPT, [4]], ids=["prompt", "one-token"])
def test_greedy_text_is_that_of_plain_decoding(shape: Any, prompt: list[int]) -> None:
    """With heads that are sometimes right: the target's own norm and LM head, and blocks that do little."""
    target = make_target()
    norm = rms_norm(target.norm, target.config.eps)
    weak = pack(torch.zeros(H, H, dtype=torch.float64), None, torch.float64, CPU)
    heads = MedusaHeads([[weak]] * 3, [target.head], norm, LAYERS, V)
    greedy = replace(RULE, temperature=0.0)
    plain = autoregressive(target, prompt, rule=greedy, max_new_tokens=40)
    made = speculative(target, Medusa(heads, shape), prompt, rule=greedy, max_new_tokens=40)
    assert made.tokens == plain.tokens
    assert len(made.trace.rounds) < len(plain.trace.rounds), "no guess was ever accepted"


class Thinking(TableModel):
    """A table whose feature of a token is the logits after it, in every layer."""

    def forward(self, tokens: Any, parents: Any, cache: Any, features: Sequence[int] = ()) -> Output:
        logits = super().forward(tokens, parents, cache).logits
        return Output(logits, (logits,) * len(features))

    def prefill(self, prompts: Any, cache: Any, features: Sequence[int] = ()) -> list[tuple[Tensor, ...]]:
        (prompt,) = prompts
        kept = self.forward(torch.tensor(prompts), [range(-1, len(prompt) - 1)], cache, features).features
        cache.commit([range(len(prompt))])
        return [tuple(feature[0] for feature in kept)]


EXACT: list[tuple[Any, str]] = [
    (Sampled((1, 1)), "plain"),
    (Sampled((2,), "with_replacement"), "cool"),
    (Sampled((2,)), "cool"),
    (Sampled((2, 1)), "top-k"),
    (Dynamic(2, 2, 3), "plain"),
    (parse("static:0.1.00"), "cool"),
]


@pytest.mark.parametrize(("shape", "rule"), EXACT, ids=str)
def test_the_law_of_a_whole_generation_is_the_target_s(shape: Any, rule: str) -> None:
    """Exact: every outcome of every coin, over the real loop."""
    torch.manual_seed(1)
    target = Thinking.random(3, order=2, scale=1.0, seed=4)
    heads = MedusaHeads([[product(3, 3)] for _ in range(2)], [product(3, 3)], lambda x: x, LAYERS, 3)
    made = SamplingRule(eos=(2,), **setups.RULES[rule])
    exact = generated(case := Setup(target, Medusa(heads, shape), rule=made, new_tokens=3))
    assert tv(exact.law, case.target) < setups.EXACT
    assert exact.accepted > 0.1
