"""What the papers claim about their rules, checked exactly on enumerated pairs: which accepts more, and by how much."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from specdecode_ref import verify
from specdecode_ref.fidelity.compare import Row, compare
from specdecode_ref.fidelity.cube import verdicts
from specdecode_ref.fidelity.laws import Next, drafts, tv
from specdecode_ref.tree import DraftTree
from specdecode_ref.verify.kseq import smallest_rho
from specdecode_ref.verify.lenient import LENIENCE

WITH, WITHOUT, CERTAIN = "with_replacement", "without_replacement", "deterministic"
EXACT = 1e-12


def pair(seed: int, vocab: int = 3, sharpness: float = 0.5) -> tuple[Next, Next]:
    """Target and draft, both depending on the context."""

    def after(side: int) -> Next:
        @cache
        def law(tokens: tuple[int, ...]) -> torch.Tensor:
            row = np.random.default_rng([seed, side, *tokens]).gamma(sharpness, size=vocab) + 1e-9
            return torch.tensor(row / row.sum(), dtype=torch.float64)

        return law

    return after(0), after(1)


def rows(seed: int, draws: Any, *names: str, vocab: int = 3) -> dict[str, Row]:
    return {row.verifier: row for row in compare(*pair(seed, vocab), draws, names)}


def length(row: Row) -> float:
    assert row.accepted is not None, row.objection
    return row.accepted


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_block_accepts_at_least_as_much_as_chain(seed: int, gamma: int) -> None:
    """Sun et al., theorem 2; with one token to judge there is nothing to gain."""
    found = rows(seed, ((WITH,),) * gamma, "chain", "block")
    assert length(found["block"]) >= length(found["chain"]) - EXACT
    if gamma == 1:
        assert length(found["block"]) == pytest.approx(length(found["chain"]), abs=EXACT)


def test_block_does_gain() -> None:
    gains = [
        length(found["block"]) / length(found["chain"]) - 1
        for found in (rows(seed, ((WITH,),) * 3, "chain", "block") for seed in range(5))
    ]
    assert 0.01 < sum(gains) / len(gains) < 0.2


def greedy(after: Next) -> Next:
    def law(tokens: tuple[int, ...]) -> torch.Tensor:
        row = after(tokens)
        return torch.nn.functional.one_hot(row.argmax(), len(row)).double()

    return law


@pytest.mark.parametrize("seed", range(6))
def test_at_temperature_0_all_rules_are_one(seed: int) -> None:
    """Also the lossy ones: p is a point mass, and its token is all that any of them accepts."""
    p, q = map(greedy, pair(seed))
    found = compare(p, q, ((WITH,), (WITH,)))
    assert all(row.objection is None and row.tv is not None and row.tv < EXACT for row in found)
    assert len({round(length(row), 9) for row in found}) == 1


@pytest.mark.parametrize("seed", range(4))
def test_traversal_is_block_on_chains(seed: int) -> None:
    """Weng et al., theorem 3.3, as laws; `tests/ref/test_verify.py` has it decision for decision."""
    p, q = pair(seed)
    for _, draft in drafts(q, ((WITH,), (WITHOUT,), (CERTAIN,))):
        laws = {node: p(draft.history(node)) for node in range(len(draft))}
        block, traversal = (verdicts(verify.get(name), draft, laws) for name in ("block", "traversal"))
        assert tv(block, traversal) < EXACT


@pytest.mark.parametrize("draw", [WITH, WITHOUT])
@pytest.mark.parametrize("seed", range(3))
def test_traversal_accepts_at_least_as_much_as_recursive_rejection(seed: int, draw: Any) -> None:
    """Not a theorem of the paper for every tree; it holds on these, and with siblings alone both are the same."""
    found = rows(seed, ((draw, draw), (draw,)), "tree", "traversal")
    assert length(found["traversal"]) > length(found["tree"]) - EXACT
    level = rows(seed, ((draw, draw),), "tree", "traversal")
    assert length(level["traversal"]) == pytest.approx(length(level["tree"]), abs=EXACT)


def optimum(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The most that any rule can accept out of k independent candidates: the linear programme of SpecTr, section 4.

    One variable a pair of (candidates, one token among them); what leaves a tuple of candidates is at most its
    probability, what arrives at a token at most p.
    """
    from scipy.optimize import linprog

    vocab = len(p)
    tuples = list(product(range(vocab), repeat=k))
    pairs = [(i, x) for i, drawn in enumerate(tuples) for x in sorted(set(drawn))]
    limits = np.zeros((len(tuples) + vocab, len(pairs)))
    for column, (i, x) in enumerate(pairs):
        limits[i, column] = limits[len(tuples) + x, column] = 1
    bounds = [*(float(torch.prod(q[list(drawn)])) for drawn in tuples), *p.tolist()]
    solved = linprog(-np.ones(len(pairs)), A_ub=limits, b_ub=bounds, bounds=(0, None), method="highs")
    assert solved.status == 0
    return float(-solved.fun)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_kseq_is_within_its_bound_of_the_optimum(seed: int, k: int) -> None:
    """SpecTr, theorem 1: at least 1 - (1 - 1/k)^k of the optimum, and no lossless rule is above it."""
    p, q = pair(seed)
    best = optimum(p(()), q(()), k)
    found = rows(seed, ((WITH,) * k,), "kseq", "tree", "traversal", "onehot", "match")
    assert (1 - (1 - 1 / k) ** k) * best - 1e-9 <= length(found["kseq"]) <= best + 1e-9
    assert all(length(row) <= best + 1e-9 for row in found.values())


def test_the_optimum_of_one_candidate_is_the_overlap() -> None:
    p, q = pair(3)
    assert optimum(p(()), q(()), 1) == pytest.approx(float(torch.minimum(p(()), q(())).sum()), abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_rho_is_the_smallest_that_leaves_a_law(seed: int) -> None:
    p, q = (law(()) for law in pair(seed, 5))
    for k in (1, 2, 5):
        rho = smallest_rho(p, q, k)
        assert 1 <= rho <= k

        def left(rho: float, k: int = k) -> torch.Tensor:
            taken = torch.minimum(p / rho, q)
            beta = float(taken.sum())
            return p - taken * (1 - (1 - beta) ** k) / beta

        assert float(left(rho).min()) > -EXACT
        if rho > 1 + 1e-6:
            assert float(left(rho * (1 - 1e-6)).min()) < 0


@pytest.mark.parametrize("seed", range(2))
def test_onehot_accepts_as_much_as_match_and_no_more_than_tree(seed: int) -> None:
    found = rows(seed, ((WITH, WITH), (WITH,)), "match", "onehot", "tree")
    assert length(found["onehot"]) == pytest.approx(length(found["match"]), abs=EXACT)
    assert length(found["onehot"]) <= length(found["tree"]) + EXACT


@pytest.mark.parametrize("seed", range(6))
def test_lenience_bounds_its_damage(seed: int) -> None:
    """Leviathan et al., appendix A.5: no token comes out more often than p / l. It accepts more than `chain`."""
    p, _ = pair(seed)
    found = rows(seed, ((WITH,),), "chain", "lenient")
    law = found["lenient"].law
    assert law is not None and found["lenient"].tv is not None and found["lenient"].tv > 1e-3
    for x, due in enumerate(p(()).tolist()):
        assert sum(mass for tokens, mass in law.items() if tokens[0] == x) <= due / LENIENCE + EXACT
    assert length(found["lenient"]) > length(found["chain"])


@pytest.mark.parametrize("name", verify.VERIFIERS)
def test_lossless_means_what_it_says(name: str) -> None:
    """The label of every rule, held against its law."""
    tvs = [rows(seed, ((WITH,), (WITH,)), name)[name].tv for seed in range(4)]
    assert all(found is not None for found in tvs)
    assert (max(found or 0.0 for found in tvs) < EXACT) == verify.get(name).lossless


def test_the_example_that_is_taught() -> None:
    """p = (.5, .3, .2), q = (.2, .5, .3): the figures of the documentation."""
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3)))
    found = {row.verifier: length(row) for row in compare(lambda _: p, lambda _: q, ((WITH,), (WITH,)))}
    assert found["chain"] == pytest.approx(0.7 + 0.7**2)
    assert found["block"] == pytest.approx(1.25)
    assert found["match"] == pytest.approx(0.31 + 0.31**2)


def test_a_rule_outside_its_premises_says_so() -> None:
    found = rows(0, ((WITHOUT, WITHOUT),), *verify.VERIFIERS)
    refused = {name for name, row in found.items() if row.objection}
    assert refused == {"chain", "block", "kseq", "lenient"}
    assert all(row.accepted is row.law is row.tv is None for name, row in found.items() if name in refused)


def test_too_many_drafts_are_refused() -> None:
    from specdecode_ref.errors import InputError

    with pytest.raises(InputError, match="4096"):
        rows(0, ((WITH,),) * 5, "chain", vocab=6)


def test_a_lone_child_without_replacement_is_like_one_with() -> None:
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    lone = DraftTree((0, 1), (-1, 0), (None, WITHOUT), (q, None))
    assert verify.get("kseq").objection(lone) is None
    two = DraftTree((0, 1, 0), (-1, 0, 0), (None, WITHOUT, WITHOUT), (q, None, None))
    assert "without_replacement" in (verify.get("kseq").objection(two) or "")
    certain = DraftTree((0, 1), (-1, 0), (None, CERTAIN), (None, None))
    assert "deterministic" in (verify.get("kseq").objection(certain) or "")
