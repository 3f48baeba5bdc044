"""A drafter's word, taken literally: the law it recorded is the law that each token was drawn from.

A verifier divides by q, so half of losslessness lies here. The coin of every drafted node is known, and drawing with it
once more from the recorded law must give that very token. The law itself, the shape of the tree and the tokens of a
lookup are compared with their definitions; those decide only how much is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.setups import COMBINED, NEARLY, RULES, transformer
from specdecode_ref.sampling import SamplingRule, law, pick
from specdecode_ref.types import Context

Check = Callable[[Any, Context, Any], None]
"""(tree, context, coins): raises FidelityError where the proposal is not what it should be."""


class Checked:
    """A drafter whose every proposal is checked; it is not told every verdict, as when another one took the round."""

    def __init__(self, drafter: Any, *checks: Check) -> None:
        self._drafter, self._checks = drafter, checks
        self.name, self.features = drafter.name, drafter.features
        self.vocab_size, self.settings = drafter.vocab_size, drafter.settings

    def start(self, prompt: Sequence[int], rule: Any, features: Sequence[Any] = ()) -> Any:
        """See `Drafter.start`."""
        return _CheckedProposer(self._drafter.start(prompt, rule, features), self._checks)


class _CheckedProposer:
    def __init__(self, proposer: Any, checks: Sequence[Check]) -> None:
        self.proposer, self._checks, self._rounds = proposer, checks, 0

    def propose(self, context: Any, coins: Any) -> Any:
        tree = self.proposer.propose(context, coins)
        for check in (drawn_as_recorded, *self._checks):
            check(tree, context, coins)
        return tree

    def observe(self, verdict: Any, features: Sequence[Any]) -> None:
        self._rounds += 1
        if self._rounds % 3:
            self.proposer.observe(verdict, features)


def drawn_as_recorded(tree: Any, context: Context, coins: Any) -> None:
    """Every drawn node is what its own coin gives out of q, without the earlier siblings where it was so drawn."""
    for node in range(1, len(tree)):
        if tree.draws[node] == "deterministic":
            continue
        parent = tree.parents[node]
        q = tree.q[parent].clone()
        if not torch.isclose(q.sum(), torch.ones((), dtype=q.dtype), rtol=0, atol=1e-12):
            raise FidelityError(f"a law that sums to 1 at node {parent}", float(q.sum()), "record q before it is used")
        if tree.draws[node] == "without_replacement":
            q[[tree.tokens[s] for s in tree.children[parent] if s < node]] = 0
        token = pick(q, coins.draft(context.base, node))
        if token != tree.tokens[node]:
            raise FidelityError(
                f"token {token} at node {node}, by its coin and the recorded q",
                tree.tokens[node],
                "record what was used",
            )


def from_model(model: Any, rule: Any, branching: Sequence[int], tolerance: float = 0.0) -> Check:
    """A tree of this branching below the root, with the model's own laws under the sampling rule.

    model: has `logits_after(tokens)`, its definition. tolerance: of a probability.
    """
    plain = SamplingRule(**{name: getattr(rule, name) for name in SamplingRule.__slots__})

    def check(tree: Any, context: Context, coins: Any) -> None:
        level = [0]
        for width in branching[: max(context.room, 0)]:
            below = []
            for node in level:
                history = [*context.tokens, *tree.history(node)]
                expected = law(model.logits_after(history), plain, history, context.prompt_length)
                found = tree.q[node]
                if found is None or not torch.allclose(found, expected, rtol=0, atol=tolerance):
                    raise FidelityError(f"the draft model's law at node {node}", found, "look at the draft's cache")
                children = tree.children[node]
                without = any(tree.draws[child] == "without_replacement" for child in children)
                most = int(expected.count_nonzero()) if without else width
                if len(children) != min(width, most):
                    raise FidelityError(
                        f"{min(width, most)} children at node {node}", len(children), "fix the width first"
                    )
                below += children
            level = below
        if any(tree.children[node] for node in level) or tree.tokens[0] != context.root:
            raise FidelityError(f"a tree below {context.root}, no deeper than {context.room}", tree, "look at `room`")

    return check


def from_lookup(gamma: int, longest: int, shortest: int, otherwise: Check | None = None) -> Check:
    """What followed the latest earlier occurrence of the longest n-gram that ends the text, as a certain chain.

    otherwise: checks the tree where no n-gram is found; nothing is drafted then unless told.
    """

    def check(tree: Any, context: Context, coins: Any) -> None:
        text, expected = list(context.tokens), []
        for n in range(longest, shortest - 1, -1):
            ends = [e for e in range(n, len(text)) if text[e - n : e] == text[len(text) - n :]]
            if ends:
                expected = text[ends[-1] :][: min(gamma, context.room)]
                break
        if otherwise and not expected:
            otherwise(tree, context, coins)
        elif list(tree.tokens) != [context.root, *expected] or set(tree.draws[1:]) - {"deterministic"}:
            raise FidelityError(f"a certain chain of {expected}", tree, "look at the index of n-grams")

    return check


def within(limit: int) -> Check:
    """A tree of which every token can still be used: with the one that is emitted after it, at most `limit` in all."""

    def check(tree: Any, context: Context, coins: Any) -> None:
        if len(context.tokens) + max(tree.depths) + 1 > limit:
            raise FidelityError(f"no draft beyond {limit - 1} tokens", tree, "look at the room of the context")

    return check


def check_drafters(package: Package) -> None:
    """Raises FidelityError where a drafter of the package fails a check of this file, in some short generations."""
    make, session = package("models.table").TableModel.random, package("decode").Session
    model, ngram = package("drafters.model").ModelDrafter, package("drafters.ngram").NGram
    target, draft = make(3, order=2, seed=0), make(3, order=2, seed=1)
    rules = cycle([{**RULES, **COMBINED}[name] for name in ("plain", "all rules", "cool", "top-k", "top-p", "min-p")])
    for branching, draw in (
        ((1, 1, 1), "without_replacement"),
        ((1, 1), "with_replacement"),
        ((3,), "without_replacement"),
        ((2, 2), "with_replacement"),
        ((2, 2, 1), "without_replacement"),
        ((4, 1), "without_replacement"),
    ):
        for settings in (next(rules), next(rules), {"order": "vllm", **RULES["presence"]}):
            rule = package("sampling").SamplingRule(**settings)
            check = from_model(draft, rule, branching)
            lookup = from_lookup(2, 2, 2, check)
            alone, after = model(draft, branching, draw), package("drafters.first").First
            for seed, checked in enumerate(
                (Checked(alone, check, within(12)), Checked(after([ngram(2, 2, 2), alone]), lookup, within(12)))
            ):
                session(target, [(0, 1, 0)], checked, rule=rule, seed=seed, max_new_tokens=9).run()
    for gamma, longest, shortest in ((3, 4, 2), (1, 1, 1), (6, 3, 1)):
        checked = Checked(ngram(gamma, longest, shortest), from_lookup(gamma, longest, shortest))
        session(target, [(0, 1, 0, 0, 1)], checked, max_new_tokens=24).run()
    small = transformer(package)
    early = package("drafters").early_exit(small, (2, 2), 2)
    check = from_model(_Defined(small.truncated(2)), SamplingRule(), (2, 2), NEARLY)
    session(small, [(1, 2, 3)], Checked(early, check), max_new_tokens=10).run()


class _Defined:
    """A model's law by definition: a fresh start for every question."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits_after(self, tokens: list[int]) -> Any:
        cache = self._model.new_cache(1, len(tokens) + 1)
        if len(tokens) > 1:
            self._model.prefill([tokens[:-1]], cache)
        return self._model.forward(torch.tensor([tokens[-1:]]), [[-1]], cache).logits[0, 0]
