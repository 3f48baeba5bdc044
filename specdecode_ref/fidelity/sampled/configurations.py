"""What rung R2 samples: a drafter, a draft tree, a verifier and a sampling rule, on mined or random tables.

Each configuration knows its exact law and acceptance, and what the known bugs make of it. `covering` holds every two of
these choices that go together. The sampling is in `sampled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import Any

import torch

from specdecode_ref import verify
from specdecode_ref.coins import Coins
from specdecode_ref.fidelity import mutants
from specdecode_ref.fidelity.betting import known_laws, model_drafts, played
from specdecode_ref.fidelity.laws import Law, definition, tv
from specdecode_ref.fidelity.loop import Exact, Setup, generated
from specdecode_ref.fidelity.pairs import PROMPT, Pair, stored
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.sampled.light import LightTable
from specdecode_ref.fidelity.suite import COMBINED
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Draw

RANKED = ("static", "dynamic")
"""Drafts of the draft model's likeliest tokens: nothing in them is drawn."""

KINDS = ("model", "ngram", "ngram, then model", *RANKED)
SHAPES: Mapping[str, tuple[int, ...]] = {"single": (1,), "chain": (1, 1), "siblings": (2,), "tree": (2, 1)}
DRAWS: tuple[Draw, ...] = ("with_replacement", "without_replacement")
RULES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "top-p": {"temperature": 1.7, "top_p": 0.97, "eos": (2,)},
    **{name: {**rule, "temperature": 2.0, "eos": (2,)} for name, rule in COMBINED.items()},
}
TABLES = ("mined", "random")
ELSEWHERE = ("drafters/", "decode.py", "sequence.py")
"""Files outside the verifiers whose bugs may change the law."""


@dataclass(frozen=True)
class Configuration:
    """What is sampled; the names are keys of the tables above."""

    kind: str
    shape: str
    draw: Draw
    verifier: str
    rule: str
    tables: str = "mined"
    """"mined": the pair that was mined for this shape; "random"; or a mined pair by name."""

    def __str__(self) -> str:
        draw = self.draw.replace("_", " ")
        return " | ".join((self.kind, self.shape, draw, self.verifier, self.rule, self.tables))

    @property
    def draws(self) -> tuple[tuple[Draw, ...], ...]:
        """How the draft model's children are drawn, depth by depth."""
        return tuple((self.draw,) * width for width in SHAPES[self.shape])

    @property
    def length(self) -> int:
        """Tokens of output: all of a draft and one more."""
        return len(SHAPES[self.shape]) + 1

    @property
    def pair(self) -> Pair:
        """The mined pair it runs on, unless its tables are random."""
        if self.tables in stored():
            return stored()[self.tables]
        if self.shape in ("single", "chain"):
            return stored()[self.shape]
        return stored()["siblings" if self.draw == "with_replacement" else "distinct siblings"]

    @cached_property
    def models(self) -> tuple[TableModel, TableModel]:
        """Target and draft."""
        if self.tables == "random":
            target, draft = (TableModel.random(3, order=2, scale=0.7, seed=seed) for seed in (2, 3))
            return TableModel(target.table), TableModel(draft.table)
        return self.pair.models

    @property
    def prompt(self) -> tuple[int, ...]:
        """Without a prompt to prefill, a generation takes half the time; n-grams need something to look up."""
        return PROMPT if self.kind == "model" else (0, 1, 2, 1, 0)

    def setup(self, package: Package | None = None) -> Setup:
        """The generation, in the original package or a private copy."""
        package = package or Package()
        target, draft = (package("models.table").TableModel(model.table) for model in self.models)
        model = package("drafters.model").ModelDrafter(LightTable(draft), self.grown(package), self.draw)
        ngram = package("drafters.ngram").NGram(gamma=self.length - 1, longest=2, shortest=1)
        drafter = {
            "model": model,
            "ngram": ngram,
            "ngram, then model": package("drafters.first").First([ngram, model]),
            **dict.fromkeys(RANKED, model),
        }[self.kind]
        rule = package("sampling").SamplingRule(**RULES[self.rule])
        return Setup(
            target,
            drafter,
            prompt=self.prompt,
            rule=rule,
            verifier=self.verifier,
            new_tokens=self.length,
            session=package("decode").Session,
        )

    def grown(self, package: Package) -> Any:
        """What the draft model grows: children drawn depth by depth, or a tree by rank with the same places."""
        branching = SHAPES[self.shape]
        if self.kind == "static":
            levels = [product(*(range(width) for width in branching[:depth])) for depth in range(1, len(branching) + 1)]
            return package("drafters.shapes").Static(tuple(path for level in levels for path in level))
        if self.kind == "dynamic":
            nodes = sum(prod(branching[:depth]) for depth in range(1, len(branching) + 1))
            return package("drafters.shapes").Dynamic(len(branching), max(branching), nodes)
        return branching

    @cached_property
    def exact(self) -> Exact:
        """What theory says: the law, and the expected number of accepted tokens."""
        setup = self.setup()
        exact = played(verify.get(self.rule_of), setup.after, self.propose, self.length, setup.rule.eos)
        return Exact(setup.target, exact.rounds, exact.accepted)

    def propose(self, output: tuple[int, ...]) -> Iterable[tuple[float, DraftTree]]:
        """The drafts after some output, with their probabilities."""
        if self.kind != "model":
            context = Context([*self.prompt, *output], len(self.prompt), self.length - len(output) - 1)
            drafter = self.setup().drafter
            first = getattr(drafter, "drafters", (drafter,))[0].start(self.prompt, SamplingRule())
            found = first.propose(context, Coins(0))
            if self.kind != "ngram, then model" or len(found) > 1:
                return [(1.0, found)]
        return model_drafts(self._q, self.draws, self.length)(output)

    @cached_property
    def _q(self) -> Any:
        return definition(self.models[1], self.prompt, SamplingRule(**RULES[self.rule]))

    @cached_property
    def known(self) -> Mapping[str, Law]:
        """The laws of the verifiers' known bugs, exactly; a few seconds. None where not all of a draft is drawn."""
        if self.kind != "model":
            return {}
        setup = self.setup()
        return known_laws(
            setup.after, self._q, self.draws, verifier=self.rule_of, length=self.length, eos=setup.rule.eos
        )

    @cached_property
    def known_elsewhere(self) -> Mapping[str, Law]:
        """The laws of known bugs in drafters and loop, out of the real loop; a second each. For drafts of one step."""
        out: dict[str, Law] = {}
        for name, mutant in mutants.catalogue().items():
            if mutant.lossless or not mutant.file.startswith(ELSEWHERE) or len(self.draws) > 1:
                continue
            try:
                with mutant.plant() as package:
                    law = generated(self.setup(package), search=True).law
            except Exception:  # a bug that crashes here has no law
                continue
            if tv(law, self.exact.law) > 1e-9:
                out[name] = law
        return out

    @property
    def rule_of(self) -> str:
        """The verifier that judges; "auto" is what the decoder makes of it."""
        return ("tree" if max(SHAPES[self.shape]) > 1 else "chain") if self.verifier == "auto" else self.verifier

    @property
    def possible(self) -> bool:
        """Whether the verifier takes these drafts."""
        if self.kind == "ngram" and self.shape != "chain":
            return False
        rule = verify.get(self.rule_of)
        if self.kind in RANKED:
            return rule.objection(_example(["deterministic"] * max(SHAPES[self.shape]))) is None
        width = max(SHAPES[self.shape])
        drafts = [] if self.kind == "ngram" else [_example(self.draws[0][:width])]
        if self.kind != "model":
            drafts.append(DraftTree.chain(0, (0,)))
        return all(rule.objection(draft) is None for draft in drafts)


def _example(draws: Sequence[Draw]) -> DraftTree:
    """Siblings drawn like that, as a verifier sees them before it looks at tokens."""
    n = len(draws)
    return DraftTree((0, *range(n)), (-1, *[0] * n), (None, *draws), (torch.ones(n) / n, *[None] * n))


def covering() -> tuple[Configuration, ...]:
    """Configurations that hold every possible pair of choices, found greedily: of equals the first."""
    lossless = [name for name, rule in verify.VERIFIERS.items() if rule.lossless]
    space = [Configuration(*row) for row in product(KINDS, SHAPES, DRAWS, lossless, RULES, TABLES)]
    space = [configuration for configuration in space if configuration.possible]
    missing = set().union(*map(pairs_in, space))
    chosen = []
    while missing:
        best = max(space, key=lambda c: len(pairs_in(c) & missing))
        chosen.append(best)
        missing -= pairs_in(best)
    return tuple(chosen)


def pairs_in(c: Configuration) -> set[Any]:
    """Its pairs of choices. How siblings are drawn is no choice where nothing is drawn, nor in a chain."""
    choices = {name: getattr(c, name) for name in ("kind", "shape", "verifier", "rule", "tables")}
    if c.kind not in ("ngram", *RANKED) and c.shape != "chain":
        choices["draw"] = c.draw
    return set(combinations(choices.items(), 2))
