"""What is asked of a package, original or private copy: its laws, its states, its boundaries.

Each check raises FidelityError and knows nothing of any bug. `LAWS` are exact laws, each as its distance from the
target's; `RUNGS` are the checks that every mutant is sent through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity import boundaries
from specdecode_ref.fidelity.coupling import check_coupled, checked_run
from specdecode_ref.fidelity.laws import definition, drafts, emitted, sequences, tv
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


def next_tokens(
    verifier: str,
    draws: tuple[tuple[Draw, ...], ...],
    *,
    package: Package | None = None,
    seed: int = 0,
    vocab: int = 4,
    search: bool = False,
) -> float:
    """Total variation of the tokens that a verifier emits in a round from the target's."""
    package = package or Package()
    p, q = (
        definition(TableModel.random(vocab, order=2, scale=1.0, seed=s), (0, 1), SamplingRule())
        for s in (2 * seed, 2 * seed + 1)
    )
    law = emitted(package("verify").get(verifier), p, drafts(q, draws, root=1), search=search)
    return tv(law, sequences(p, len(draws) + 1))


CHAIN: tuple[tuple[Draw, ...], ...] = (("with_replacement",),) * 2
SIBLINGS: tuple[tuple[Draw, ...], ...] = (("with_replacement",) * 2,)
DISTINCT: tuple[tuple[Draw, ...], ...] = (("without_replacement",) * 2,)

LAWS: Mapping[str, Callable[[Package, int], float]] = {
    "next tokens, chain": lambda package, seed: next_tokens("chain", CHAIN, package=package, seed=seed, search=True),
    "next tokens, tree": lambda package, seed: next_tokens("tree", SIBLINGS, package=package, seed=seed, search=True),
    **{
        name: lambda package, seed, name=name: distance(  # type: ignore[misc]
            setup(name, package=package, seed=seed, new_tokens=4 if name == "single" else 3), search=True
        )
        for name in DRAFTERS
    },
    "chain, frequency penalty": lambda package, seed: distance(
        setup("chain", RULES["frequency"], package=package, seed=seed), search=True
    ),
}
"""Total variation by (package, seed of the table models), exact for wrong programs too."""


def verifiers(package: Package) -> None:
    """Every rejection rule emits the target's law, on chains and on siblings of either draw."""
    for verifier, draws in (("chain", CHAIN), ("tree", SIBLINGS), ("tree", DISTINCT)):
        found = next_tokens(verifier, draws, package=package, search=True)
        _demand(found, f"the target's law from '{verifier}'")


def generations(package: Package) -> None:
    """The real loop has the target's law: chain, n-gram, trees; with EOS, a length limit, and penalties."""
    for drafter, rule, new_tokens in (
        ("ngram", "plain", 3),
        ("chain", "frequency", 3),
        ("chain", "plain", 3),
        ("siblings with replacement", "plain", 2),
        ("siblings without replacement", "plain", 2),
    ):
        case = setup(drafter, RULES[rule], package=package, new_tokens=new_tokens)
        _demand(distance(case, search=True), f"the target's law of a generation ({drafter}, {rule})")


def _demand(distance: float, expected: str) -> None:
    if distance > EXACT:
        raise FidelityError(f"{expected}, to {EXACT:g}", f"a total variation of {distance:.3g}", "look at its cells")


def states(package: Package) -> None:
    """Same coins, same tokens, same state: chain and trees, on a table model and on a small transformer."""
    make, session = package("models.table").TableModel.random, package("decode").Session
    rule = package("sampling").SamplingRule(eos=(4,), frequency_penalty=0.8)
    target, draft = make(5, seed=0), make(5, seed=0, scale=1.2)
    prompts = [(0, 1, 2, 0, 1), (3,), (1, 2), (2, 3, 2, 3, 2)]
    for seed, name in enumerate(DRAFTERS):
        drafter = DRAFTERS[name](package, draft)
        check_coupled(target, drafter, prompts, session=session, rule=rule, seed=seed, max_new_tokens=24)
    small = transformer(package)
    for drafter in (
        package("drafters").early_exit(small, (1, 1, 1), 2),
        package("drafters").early_exit(small, (3, 2), 2),
    ):
        checked_run(session(small, [(1, 2, 3), (4,)], drafter, max_new_tokens=16, rule=rule), NEARLY)


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


def all_boundaries(package: Package) -> None:
    """Every fixture of `boundaries`."""
    for fixture in boundaries.FIXTURES.values():
        fixture(package)


RUNGS: Mapping[str, Callable[[Package], None]] = {
    "verifiers": verifiers,
    "generations": generations,
    "states": states,
    "boundaries": all_boundaries,
}
