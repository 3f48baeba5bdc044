"""The small worlds that the checks live in: table models, a tiny transformer, sampling rules, drafters, tree shapes.

Everything is made in a package, the original or a private copy, so that one description serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from specdecode_ref.fidelity.laws import Next, definition, drafts, emitted, sequences, tv
from specdecode_ref.fidelity.loop import Setup, generated
from specdecode_ref.fidelity.private import Package
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.types import Draw

EXACT = 1e-12
"""The largest total variation that counts as none: rounding in float64."""

RULES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.4},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": ((0, 0.7), (1, -0.9))},
    "bad words": {"bad_words": ((1, 0), (2, 2))},
    "min new tokens": {"min_new_tokens": 2},
}
"""Sampling rules over a vocabulary of 3, in which token 2 ends the text."""

_ALL: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 2,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((0, 0.5),),
    "bad_words": ((1, 1),),
    "min_new_tokens": 1,
}
COMBINED: Mapping[str, Mapping[str, Any]] = {
    "all rules": _ALL,
    "all rules, vllm": {**_ALL, "order": "vllm"},
}

DRAFTERS: Mapping[str, Callable[[Package, Any], Any]] = {
    "chain": lambda package, q: package("drafters.model").ModelDrafter(q, (1, 1)),
    "single": lambda package, q: package("drafters.model").ModelDrafter(q, (1,)),
    "ngram": lambda package, q: package("drafters.ngram").NGram(2, 3, 1),
    "hybrid": lambda package, q: package("drafters.first").First(
        [package("drafters.ngram").NGram(2, 2, 2), package("drafters.model").ModelDrafter(q, (1, 1))]
    ),
    "siblings": lambda package, q: package("drafters.model").ModelDrafter(q, (2,)),
    **{
        f"{shape} {draw.replace('_', ' ')}": lambda package, q, branching=branching, draw=draw: (  # type: ignore[misc]
            package("drafters.model").ModelDrafter(q, branching, draw)
        )
        for shape, branching in (("siblings", (2,)), ("tree", (2, 1)))
        for draw in ("with_replacement", "without_replacement")
    },
}


def setup(
    drafter: str,
    rule: Mapping[str, Any] | None = None,
    *,
    package: Package | None = None,
    verifier: str = "auto",
    seed: int = 0,
    vocab: int = 3,
    new_tokens: int = 3,
) -> Setup:
    """A generation from table models of that seed, in the package; the last token of the vocabulary is EOS."""
    package = package or Package()
    make = package("models.table").TableModel.random
    return Setup(
        make(vocab, order=2, scale=1.0, seed=2 * seed),
        DRAFTERS[drafter](package, make(vocab, order=2, scale=1.0, seed=2 * seed + 1)),
        rule=package("sampling").SamplingRule(**{"eos": (vocab - 1,), **(rule or {})}),
        verifier=verifier,
        new_tokens=new_tokens,
        session=package("decode").Session,
    )


def distance(setup: Setup, *, search: bool = False) -> float:
    """Total variation of the real loop's law from the target's."""
    return tv(generated(setup, search=search).law, setup.target)


Draws = tuple[tuple[Draw, ...], ...]
"""How the children of every node are drawn, depth by depth."""

CHAIN: Draws = (("with_replacement",),) * 2
SIBLINGS: Draws = (("with_replacement",) * 2,)
DISTINCT: Draws = (("without_replacement",) * 2,)


def pair(seed: int, vocab: int, rule: SamplingRule | None = None, scale: float = 1.0) -> tuple[Next, Next]:
    """p and q of that seed: laws after any output, remembered, that depend on the last two tokens and the position."""

    def one(number: int) -> Next:
        model = TableModel.random(vocab, order=2, scale=scale, seed=number)
        return cache(definition(model, (0, 1), rule or SamplingRule()))

    return one(2 * seed), one(2 * seed + 1)


def next_tokens(
    verifier: str,
    draws: Draws,
    *,
    package: Package | None = None,
    seed: int = 0,
    vocab: int = 4,
    rule: SamplingRule | None = None,
    search: bool = False,
) -> float:
    """Total variation of the tokens that a verifier emits in a round from the target's."""
    p, q = pair(seed, vocab, rule)
    judge = (package or Package())("verify").get(verifier)
    law = emitted(judge, p, drafts(q, draws, root=1), search=search)
    return tv(law, sequences(p, len(draws) + 1))


NEARLY = 1e-6
"""What keys and logits of a float64 transformer may differ by: its norms are float32, and products round by shape."""


def transformer(package: Package | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A random model of the Llama family with 3 layers and 11 tokens."""
    hidden, inner, heads, kv, vocab = 16, 24, 4, 2, 11
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    side = kv * hidden // heads
    for layer in range(3):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (side, hidden) for n in "kv"}
        shapes |= {f"{at}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, inner)}
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    return (package or Package())("models.transformer").Transformer.load(config, weights, dtype=dtype)
