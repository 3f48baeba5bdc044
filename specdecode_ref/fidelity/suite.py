"""What is asked of a package, original or private copy: its laws, its states, its coins, its boundaries.

Each check raises FidelityError and knows nothing of any bug. `LAWS` are exact laws, each as its distance from the
target's; `RUNGS` are the checks that every mutant is sent through. Those in `OF_THE_LAW` ask for nothing but the output
law, so every lossless program passes them, however slow its drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from itertools import cycle, product
from typing import Any

import torch

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity import boundaries, keys
from specdecode_ref.fidelity.acceptance import check_acceptance
from specdecode_ref.fidelity.coupling import check_batch, check_coupled, check_every_path, check_plain, checked_run
from specdecode_ref.fidelity.drafting import check_drafters
from specdecode_ref.fidelity.laws import drafts, sequences, tv
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.setups import (
    CHAIN,
    COMBINED,
    DISTINCT,
    DRAFTERS,
    EXACT,
    NEARLY,
    RULES,
    SIBLINGS,
    Draws,
    distance,
    next_tokens,
    pair,
    setup,
    transformer,
)
from specdecode_ref.sampling import SamplingRule, law

SHAPES: Mapping[str, tuple[Draws, int]] = {
    "chain": (CHAIN, 4),
    "certain chain": ((("deterministic",),) * 2, 3),
    "siblings": (SIBLINGS, 3),
    "distinct siblings": (DISTINCT, 4),
    "likeliest siblings": ((("deterministic",) * 2,), 3),
    "siblings of all kinds": ((("deterministic", "with_replacement", "without_replacement"),), 3),
    "a fork below a token": ((("with_replacement",), ("with_replacement",) * 2), 2),
    "two branches": ((("without_replacement",) * 2, ("without_replacement",)), 2),
}
"""Drafts that a rule must keep the law on, each over a vocabulary of that size."""

WITH_ZEROS = ("chain", "siblings of all kinds", "siblings")
"""Those that are also judged where top-k leaves two tokens."""


def _all_lossless(package: Package, seed: int) -> float:
    """The worst of the rules that the package calls lossless, on a drawn chain."""
    rules = [name for name, rule in package("verify").VERIFIERS.items() if rule.lossless]
    return max(next_tokens(name, CHAIN, package=package, seed=seed, vocab=3, search=True) for name in rules)


def _rounds(verifier: str, branching: tuple[int, ...], package: Package, seed: int) -> float:
    p, q = pair(seed, 2)
    return tv(keys.rounds(package, verifier, branching, p, q, 2), sequences(p, 2))


def _generation(drafter: str, rule: str = "plain", **more: Any) -> Callable[[Package, int], float]:
    rules = {**RULES, **COMBINED}
    return lambda package, seed: distance(setup(drafter, rules[rule], package=package, seed=seed, **more), search=True)


LAWS: Mapping[str, Callable[[Package, int], float]] = {
    "next tokens, chain": lambda package, seed: next_tokens("chain", CHAIN, package=package, seed=seed, search=True),
    "next tokens, tree": lambda package, seed: next_tokens("tree", SIBLINGS, package=package, seed=seed, search=True),
    "next tokens, distinct siblings": lambda package, seed: next_tokens(
        "tree", DISTINCT, package=package, seed=seed, search=True
    ),
    "next tokens, all lossless rules": _all_lossless,
    "rounds, block": lambda package, seed: _rounds("block", (1, 1), package, seed),
    "rounds, siblings": lambda package, seed: _rounds("tree", (2,), package, seed),
    **{name: _generation(name, new_tokens=4 if name == "single" else 3) for name in DRAFTERS},
    **{f"single, {rule}": _generation("single", rule) for rule in ("cool", "top-k", "min-p", "frequency")},
    **{f"two tokens, {name}": _generation(name, new_tokens=2) for name in DRAFTERS},
    "chain, block": _generation("chain", "top-p", verifier="block"),
    "chain, all rules": _generation("chain", "all rules"),
    "hybrid, all rules": _generation("hybrid", "all rules, vllm"),
    "tree, all rules": _generation("tree without replacement", "all rules"),
}
"""Total variation by (package, seed of the table models), exact for wrong programs too."""


@cache
def total_variation(package: Package, name: str, seed: int = 0) -> float:
    """How far that law of `LAWS` is from the target's; computed once for each package."""
    return LAWS[name](package, seed)


def verifiers(package: Package) -> None:
    """Every rule that is called lossless emits the target's law on every shape it judges, zeros included."""
    for (name, rule), (shape, (draws, vocab)) in product(package("verify").VERIFIERS.items(), SHAPES.items()):
        _, draft = next(iter(drafts(pair(0, vocab)[1], draws)))
        if not rule.lossless or rule.objection(draft):
            continue
        for top_k in (0, 2) if shape in WITH_ZEROS else (0,):
            sampling = SamplingRule(top_k=top_k)
            found = next_tokens(name, draws, package=package, vocab=vocab, rule=sampling, search=True)
            _demand(found, f"the target's law from '{name}' ({shape}, {top_k=})")


def rules(package: Package) -> None:
    """The law under every mixture of sampling rules is its definition, ties and near misses included."""
    sampling, rng = package("sampling"), random.Random(0)
    for _ in range(300):
        settings: dict[str, Any] = {
            "temperature": rng.choice((0.0, 0.4, 1.0, 2.5)),
            "top_k": rng.choice((0, 1, 3)),
            "top_p": rng.choice((1.0, 0.5, 0.9)),
            "min_p": rng.choice((0.0, 0.2)),
            "repetition_penalty": rng.choice((1.0, 1.5)),
            "presence_penalty": rng.choice((0.0, 0.5)),
            "frequency_penalty": rng.choice((0.0, -0.25, 0.75)),
            "logit_bias": rng.choice(((), ((1, 1.5), (3, -0.5)))),
            "bad_words": rng.choice(((), ((2,),), ((0, 1), (4, 4, 3)))),
            "min_new_tokens": rng.choice((0, 2)),
            "eos": rng.choice(((), (5,), (0, 5))),
            "order": rng.choice(("transformers", "vllm")),
        }
        logits = torch.tensor([rng.randrange(-4, 5) / 2 for _ in range(6)], dtype=torch.float64)
        history, prompt = [rng.randrange(6) for _ in range(rng.randrange(1, 7))], rng.randrange(1, 4)
        prompt = min(prompt, len(history))
        expected = law(logits, SamplingRule(**settings), history, prompt)
        found = sampling.law(logits.clone(), sampling.SamplingRule(**settings), history, prompt)
        if not torch.equal(found, expected):
            raise FidelityError(
                f"{expected.tolist()} under {settings}", found.tolist(), "look at the order of the rules"
            )


GENERATIONS = (
    "ngram",
    "two tokens, single",
    "hybrid, all rules",
    "two tokens, siblings with replacement",
    "two tokens, siblings without replacement",
    "chain, all rules",
    "tree, all rules",
    "chain, block",
    "chain",
)


def generations(package: Package) -> None:
    """The real loop has the target's law: chain, n-gram, trees; with EOS, a length limit, and all sampling rules."""
    for name in GENERATIONS:
        _demand(total_variation(package, name), f"the target's law of a generation ({name})")


def _demand(distance: float, expected: str) -> None:
    if not distance <= EXACT:
        raise FidelityError(f"{expected}, to {EXACT:g}", f"a total variation of {distance:.3g}", "look at its cells")


def states(package: Package) -> None:
    """Same coins, same tokens, same state: chain and trees, on a table model and on a small transformer."""
    make, session = package("models.table").TableModel.random, package("decode").Session
    rule_of = package("sampling").SamplingRule
    target, draft = make(5, seed=0), make(5, seed=0, scale=1.2)
    prompts = [(0, 1, 2, 0, 1), (3,), (1, 2), (2, 3, 2, 3, 2)]
    small = transformer(package)
    check_every_path(target, (0, 1, 2), IRREGULAR)
    check_every_path(small, (1, 2, 3), IRREGULAR, NEARLY)
    rules = cycle([{**RULES, **COMBINED}[name] for name in STATE_RULES])
    for seed, name in enumerate(DRAFTERS):
        drafter, rule = DRAFTERS[name](package, draft), rule_of(**{"eos": (4,), **next(rules)})
        check_coupled(target, drafter, prompts, session=session, rule=rule, seed=seed, max_new_tokens=16)
    for branching in ((1, 1, 1), (3, 2)):
        drafter = package("drafters").early_exit(small, branching, 2)
        checked_run(session(small, [(1, 2, 3), (4,)], drafter, max_new_tokens=16, rule=rule_of(eos=(4,))), NEARLY)


IRREGULAR = (-1, 0, 0, 0, 1, 2, 2, 3, 6, 5, 8)
"""The parents of a tree in which neither depth nor index gives a node's branch away."""

STATE_RULES = (
    "frequency",
    "all rules",
    "min-p",
    "bias",
    "bad words",
    "plain",
    "all rules, vllm",
    "repetition",
    "top-p",
)


def batch(package: Package) -> None:
    """A sequence depends on its prompt, its number and the seed, and not on its neighbours."""
    make, session = package("models.table").TableModel.random, package("decode").Session
    rule, coins = package("sampling").SamplingRule, package("coins").Coins
    target, draft = make(5, seed=0), make(5, seed=0, scale=1.2)
    prompts = [(0, 1, 2, 0, 1), (3,), (1, 2), (2, 3, 2, 3, 2)]
    for number, settings in enumerate({**RULES, **COMBINED}.values()):
        made = rule(**{"eos": (4, 2) if number % 2 else (4,), **settings})
        check_plain(target, prompts, coins, session=session, rule=made, seed=number << 31, limit=12)
    for name, verifier in (
        ("chain", "auto"),
        ("chain", "block"),
        ("tree without replacement", "auto"),
        ("hybrid", "match"),
    ):
        drafter = DRAFTERS[name](package, draft)
        check_batch(target, drafter, prompts, session=session, verifier=verifier, seed=5, max_new_tokens=14)


def coins(package: Package) -> None:
    """Every coin in [0, 1), one for each key, and rounds that share none: also for rules that look ahead."""
    keys.check_range(package)
    keys.check_distinct(package)
    for name in ("rounds, block", "rounds, siblings"):
        _demand(total_variation(package, name), f"the target's law over several rounds ({name})")


def all_boundaries(package: Package) -> None:
    """Every fixture of `boundaries`."""
    for fixture in boundaries.FIXTURES.values():
        fixture(package)


RUNGS: Mapping[str, Callable[[Package], None]] = {
    "boundaries": all_boundaries,
    "verifiers": verifiers,
    "acceptance": check_acceptance,
    "drafters": check_drafters,
    "coins": coins,
    "rules": rules,
    "batch": batch,
    "states": states,
    "generations": generations,
}
"""All checks by name, the quick ones first."""

OF_THE_LAW = ("verifiers", "coins", "generations")
