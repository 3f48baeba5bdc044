"""How the shipped test vectors are made: hand-made edges first, then random cases that reach every node of a tree.

All numbers are made of integers, so that they are exact doubles and the same on every machine: laws are multiples of
2^-20 that sum to 1, random coins are multiples of 2^-20. A random case is kept when the verdict ends where it was meant
to and no coin is near its breakpoint; what lies on a breakpoint is made by hand, where float64 is exact.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from typing import Any

from specdecode_ref import verify
from specdecode_ref.errors import NotApplicableError, NumericalError
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.vectors import edges, judged
from specdecode_ref.fidelity.vectors.file import (
    FLOAT32,
    FORMAT,
    NOT_A_LAW,
    NOT_APPLICABLE,
    Case,
    Decision,
    Nodes,
    Refusal,
    Verdict,
    law,
)
from specdecode_ref.sampling import pick, residual
from specdecode_ref.tree import ancestors, depths
from specdecode_ref.types import Draw

SEED = 1
ROOMY = 10 * FLOAT32
"""The least margin of a random case."""

_DRAWS: dict[str, Draw] = {"r": "with_replacement", "n": "without_replacement", "d": "deterministic"}
_TRIES = 120


@dataclass(frozen=True)
class Scenario:
    """A kind of draft: the parents of nodes 1 and up, one letter of `_DRAWS` for each, and 2^-bits as the unit."""

    name: str
    words: str
    vocabulary: int
    parents: tuple[int, ...]
    draws: str
    bits: int = 8


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("one", "a chain of one", 5, (0,), "r", 20),
        Scenario("two", "a chain of two", 3, (0, 1), "rr"),
        Scenario("two-outcomes", "a vocabulary of two tokens", 2, (0, 1, 2), "rrr"),
        Scenario("three", "a chain of three over 17 tokens", 17, (0, 1, 2), "rrr", 12),
        Scenario("eight", "a chain of eight", 3, tuple(range(8)), "r" * 8),
        Scenario("wide", "a vocabulary of 64 tokens", 64, (0,), "r", 12),
        Scenario("certain", "a deterministic chain", 5, (0, 1), "dd"),
        Scenario("mixed-chain", "a drawn, a deterministic and a drawn token", 5, (0, 1, 2), "rdr"),
        Scenario("pair", "two siblings with replacement", 5, (0, 0), "rr", 20),
        Scenario("twins", "three siblings out of two tokens, so that some are equal", 2, (0, 0, 0), "rrr"),
        Scenario("trio", "three siblings without replacement", 5, (0, 0, 0), "nnn"),
        Scenario("all-drawn", "siblings without replacement that exhaust the support", 3, (0, 0, 0), "nnn"),
        Scenario("top-three", "three deterministic siblings", 5, (0, 0, 0), "ddd"),
        Scenario("mixed", "siblings drawn in every way", 5, (0, 0, 0, 0), "drnn"),
        Scenario("levels", "two levels without replacement", 5, (0, 0, 1, 1, 2, 2), "nnnnnn"),
        Scenario("uneven", "an uneven tree, branch after branch", 5, (0, 1, 2, 0, 4, 0), "nnrndn"),
        Scenario("branchy", "a tree with replacement, branch after branch", 3, (0, 1, 1, 0, 4), "rrrrr"),
        Scenario("wide-tree", "four siblings over 17 tokens", 17, (0, 0, 0, 0), "nnnn", 12),
    )
}

_ALL_CHAINS = ("one", "two", "two-outcomes", "three", "eight", "wide", "certain", "mixed-chain")
_ALL_TREES = ("pair", "trio", "all-drawn", "top-three", "mixed", "levels", "uneven", "wide-tree")
CHOSEN = {
    "match": ("two", "top-three", "uneven"),
    "chain": _ALL_CHAINS,
    "tree": ("two", *_ALL_TREES, "twins"),
    "block": _ALL_CHAINS,
    "traversal": ("two", "pair", "trio", "all-drawn", "levels", "uneven", "branchy"),
    "kseq": ("pair", "twins", "branchy"),
    "onehot": ("two", "trio", "mixed", "uneven"),
    "typical": ("uneven",),
    "relaxed": ("uneven",),
    "lenient": ("two", "three"),
}
"""The scenarios of each verifier."""

LOSSY: dict[str, tuple[dict[str, int | float], ...]] = {
    "typical": ({"epsilon": 0.09, "delta": 0.3}, {"epsilon": 0.3, "delta": 0.75}),
    "relaxed": ({"top": 2, "delta": 0.6}, {"top": 10, "delta": 0.25}),
    "lenient": ({"lenience": 0.5}, {"lenience": 0.875}),
}
"""The lossy rules and what they are set to."""


def text(seed: int = SEED) -> str:
    """The whole file: one case a line, so that changes can be read."""
    head = {"format": FORMAT, "seed": seed, "float32_margin": FLOAT32}
    lines = ",\n".join(json.dumps(asdict(case), separators=(",", ":"), allow_nan=False) for case in made(seed))
    return f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n'


def made(seed: int = SEED) -> Iterator[Case]:
    """All cases, by verifier."""
    rng = random.Random(seed)
    for name, verifier in verify.VERIFIERS.items():
        for parameters in LOSSY.get(name, ({},)):
            number = count(1)
            blank = _blank(name, verifier.lossless, parameters)
            for edge in edges.edges(name) if parameters == LOSSY.get(name, ({},))[0] else ():
                yield _numbered(_filled(replace(blank, **edge)), number)
            for scenario in CHOSEN[name]:
                for case in _covering(blank, SCENARIOS[scenario], rng):
                    yield _numbered(case, number)


def margin(case: Case, verdict: Any) -> float:
    """The smallest distance of a coin that mattered from where the verdict changes.

    A token of p(x) = 0 is rejected by every coin in any arithmetic, so its test counts for nothing.
    """
    out = 1.0
    coins = [case.emit_coins[len(verdict.path) - 1]]
    picks = [(verdict.law, verdict.token)]
    if case.verifier == "match":  # its only coins are those that draw the target's tokens
        coins = list(case.emit_coins)
        tokens = [*(case.tree.tokens[node] for node in verdict.path[1:]), verdict.token]
        picks = [(law(case.p[node]), token) for node, token in zip(verdict.path, tokens, strict=True)]
    else:
        for test in verdict.tests:
            if test.q_eff > 0 and not _impossible(case, test.node):
                out = min(out, abs(test.u - test.p_eff / test.q_eff))
    for u, (row, token) in zip(coins, picks, strict=False):
        cdf = (row.cumsum(-1) / row.sum()).tolist()
        below = cdf[token - 1] if token else 0.0
        out = min(out, cdf[token] - u, *([u - below] if below > 0 else []))
    return max(out, 0.0)


def _impossible(case: Case, node: int) -> bool:
    path = ancestors(case.tree.parents, node)[1:]
    return any(case.p[case.tree.parents[i]][case.tree.tokens[i]] == 0 for i in path)


def _blank(name: str, lossless: bool, parameters: dict[str, int | float]) -> Case:
    return Case("", name, lossless, parameters, "", Nodes((), (), ()), (), (), (), (), Refusal(""), None)


def _numbered(case: Case, number: Iterator[int]) -> Case:
    parts = [case.verifier, *(f"{value:g}" for value in case.parameters.values())]
    return replace(case, id=f"{'-'.join(parts)}-{next(number):03}")


def _filled(case: Case) -> Case:
    """The case with what it is due, by this package's own verifier."""
    try:
        verdict = judged(case, Package())
    except NotApplicableError:
        return replace(case, expected=Refusal(NOT_APPLICABLE))
    except NumericalError:
        return replace(case, expected=Refusal(NOT_A_LAW))
    tests = tuple(Decision(t.node, _short(t.p_eff), _short(t.q_eff), t.accepted) for t in verdict.tests)
    due = Verdict(verdict.path, verdict.token, verdict.kind, tests)
    return replace(case, expected=due, margin=float(f"{margin(case, verdict):.3g}"))


def _short(x: float) -> float:
    """Nine digits: enough to find a bug by, and the same however a machine adds up."""
    return float(f"{x:.9g}")


def _covering(blank: Case, scenario: Scenario, rng: random.Random) -> Iterator[Case]:
    """One case for every node that the verdict can end at, the first telling one where chance gives one."""
    for goal in range(len(scenario.parents) + 1):
        found: Case | None = None
        for _ in range(_TRIES):
            drawn = _random(blank, scenario, goal, rng)
            case = _filled(drawn) if drawn else None
            if case is None or not isinstance(case.expected, Verdict) or case.expected.path[-1] != goal:
                continue
            if case.margin is None or case.margin < ROOMY:
                continue
            telling = _telling(case)
            if found is None or telling:
                found = replace(case, why=f"{scenario.words}: {_outcome(case.expected)}")
            if telling:
                break
        if found:
            yield found


def _telling(case: Case) -> bool:
    """True unless p itself would have emitted this token too, or, where weights count, norm(max(p - q, 0))."""
    verdict = judged(case, Package())
    if verdict.kind != "residual":
        return True
    node, u = verdict.path[-1], case.emit_coins[len(verdict.path) - 1]
    p, q = law(case.p[node]), case.q[node]
    weighed = case.verifier == "kseq" or (case.verifier in ("block", "traversal") and node > 0)
    others = [residual(p, law(q))] if q is not None and weighed else []
    return all(pick(other, u) != verdict.token for other in [p, *others])


def _outcome(due: Verdict) -> str:
    nodes = ", ".join(map(str, due.path[1:]))
    accepted = f"accepts node{'s' if len(due.path) > 2 else ''} {nodes}" if nodes else "accepts nothing"
    return f"{accepted}, then a {due.kind} token"


def _random(blank: Case, scenario: Scenario, goal: int, rng: random.Random) -> Case | None:
    """A draft as a drafter would draw it, with coins that favour a verdict ending at `goal`; None where q ran out."""
    v, parents = scenario.vocabulary, (-1, *scenario.parents)
    unit = 2**scenario.bits
    p = [_masses(v, unit, rng) for _ in parents]
    q = [_mixed(row, _masses(v, unit, rng), _below(17, rng)) for row in p]
    tokens = [_below(v, rng)]
    for node, letter in enumerate(scenario.draws, 1):
        parent = parents[node]
        earlier = [tokens[s] for s in range(1, node) if parents[s] == parent and scenario.draws[s - 1] == letter]
        source = q[parent] if letter != "d" else [1 + x for x in p[parent]]
        left = [0 if x in earlier and letter != "r" else mass for x, mass in enumerate(source)]
        if not any(left):
            return None
        tokens.append(_drawn(left, rng))
    draws = tuple(_DRAWS[letter] for letter in scenario.draws)
    drawn_at = {parents[node] for node, draw in enumerate(draws, 1) if draw != "deterministic"}
    path = ancestors(parents, goal)
    emit = [_coin(rng) for _ in range(max(depths(parents)) + 1)]
    if blank.verifier == "match":
        for depth, (node, child) in enumerate(pairwise(path)):
            emit[depth] = _coin_of(p[node], tokens[child], rng)
    return replace(
        blank,
        tree=Nodes(tuple(tokens), parents, (None, *draws)),
        q=tuple(tuple(x / unit for x in row) if node in drawn_at else None for node, row in enumerate(q)),
        p=tuple(tuple(x / unit for x in row) for row in p),
        accept_coins=tuple(_low(rng) if node in path else 1 - 2**-20 - _low(rng) for node in range(len(parents))),
        emit_coins=tuple(emit),
    )


def _below(n: int, rng: random.Random) -> int:
    return int(rng.random() * n)


def _coin(rng: random.Random) -> float:
    return _below(2**20, rng) / 2**20


def _low(rng: random.Random) -> float:
    """A coin that is rather small, as a multiple of 2^-20."""
    return _below(_below(2**20, rng) + 1, rng) / 2**20


def _coin_of(masses: Sequence[int], token: int, rng: random.Random) -> float:
    """A coin that draws `token`, where it has mass."""
    before = sum(masses[:token])
    return min(int((before + masses[token] * rng.random()) / sum(masses) * 2**20), 2**20 - 1) / 2**20


def _masses(v: int, unit: int, rng: random.Random) -> list[int]:
    """A random law in units: the gaps between random cuts, some of them nothing."""
    cuts = sorted(_below(unit + 1, rng) for _ in range(v - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, unit], strict=True)]


def _mixed(p: Sequence[int], other: Sequence[int], share: int) -> list[int]:
    """`share` sixteenths of p and the rest of another law; what rounding loses goes to the likeliest token."""
    out = [(share * a + (16 - share) * b) // 16 for a, b in zip(p, other, strict=True)]
    out[out.index(max(out))] += sum(p) - sum(out)
    return out


def _drawn(masses: Sequence[int], rng: random.Random) -> int:
    """A token drawn from a law in units."""
    u = _below(sum(masses), rng)
    return next(x for x in range(len(masses)) if u < sum(masses[: x + 1]))
