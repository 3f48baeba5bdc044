"""Verifiers: pure rules from (draft, p, coins) to a verdict, and what they refuse."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdecode_ref import verify
from specdecode_ref.errors import NotApplicableError, NumericalError, UnknownNameError
from specdecode_ref.sampling import pick, without
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw, Verdict

ALMOST_ONE = 1 - 2.0**-53
V = 6


def rows(*laws: Sequence[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in laws]


def random_law(rng: random.Random, zeros: float = 0.3) -> Tensor:
    """A law with some tokens that never come, sometimes with one token only."""
    mass = [rng.expovariate(1) ** 3 * (rng.random() > zeros) for _ in range(V)]
    mass[rng.randrange(V)] += 1e-3
    return torch.tensor(mass, dtype=torch.float64) / sum(mass)


def random_chain(rng: random.Random, gamma: int) -> tuple[DraftTree, list[Tensor], list[float], list[float]]:
    """A chain with every kind of draw, whose p is sometimes q, and its coins, sometimes the smallest or largest."""
    p = [random_law(rng) for _ in range(gamma + 1)]
    tokens, draws, q = [rng.randrange(V)], [None], []
    for node in range(gamma):
        draw: Draw = rng.choice(("with_replacement", "without_replacement", "deterministic"))
        law = p[node] if rng.random() < 0.3 else random_law(rng)
        tokens.append(pick(law, rng.random()) if draw != "deterministic" else rng.randrange(V))
        draws.append(draw)  # type: ignore[arg-type]
        q.append(None if draw == "deterministic" else law)
    tree = DraftTree(tuple(tokens), tuple(range(-1, gamma)), tuple(draws), (*q, None))
    coins = [rng.choice([0.0, ALMOST_ONE, rng.random(), rng.random()]) for _ in range(2 * gamma + 2)]
    return tree, p, coins[: gamma + 1], coins[gamma + 1 :]


@pytest.mark.parametrize(("one", "other"), [("chain", "tree"), ("block", "traversal")])
@pytest.mark.parametrize("seed", range(300))
def test_the_rule_for_trees_on_a_chain(seed: int, one: str, other: str) -> None:
    """Decision for decision: recursive rejection is token-wise, traversal is block verification."""
    rng = random.Random(seed)
    arguments = random_chain(rng, rng.choice([0, 1, 2, 3, 8]))
    a, b = verify.get(one)(*arguments), verify.get(other)(*arguments)
    assert a == b
    assert torch.equal(a.law, b.law)


@pytest.mark.parametrize("name", ["chain", "tree", "match"])
def test_a_verdict_says_what_it_did(name: str) -> None:
    rng = random.Random(name)
    for _ in range(300):
        draft, p, accept, emit = random_chain(rng, rng.choice([0, 1, 4]))
        before = [row.clone() for row in p]
        verdict = verify.get(name)(draft, p, accept, emit)
        assert all(torch.equal(a, b) for a, b in zip(p, before, strict=True))
        assert verdict.path == tuple(range(verdict.accepted + 1))
        assert tuple(t.node for t in verdict.tests if t.accepted) == verdict.path[1:]
        assert verdict.token == pick(verdict.law, emit[verdict.accepted])
        assert float(verdict.law.sum()) == pytest.approx(1, abs=1e-12)
        assert p[verdict.path[-1]][verdict.token] > 0, "only tokens of p are emitted"
        for test in verdict.tests:
            assert test.node == 1 or p[test.node - 1][draft.tokens[test.node]] == test.p_eff
            if name != "match":
                assert test.accepted == (test.u * test.q_eff < test.p_eff)
                assert test.u == accept[test.node]
        whole = verdict.accepted == draft.depth
        if name != "match":
            assert verdict.kind == ("residual" if not whole else "bonus" if draft.depth else "target")


def test_a_chain_by_hand() -> None:
    p = rows([0.5, 0.3, 0.2], [0.1, 0.8, 0.1])
    q = rows([0.2, 0.5, 0.3])[0]
    chain = DraftTree.chain(0, (1,), (q,))
    accepted = verify.get("chain")(chain, p, [0, 0.59], [0, 0.5])
    assert (accepted.path, accepted.token, accepted.kind) == ((0, 1), 1, "bonus")
    rejected = verify.get("chain")(chain, p, [0, 0.61], [0.99, 0])
    assert (rejected.path, rejected.token, rejected.kind) == ((0,), 0, "residual")
    assert rejected.law.tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", ["chain", "tree", "block", "traversal", "onehot", "typical", "relaxed", "lenient"])
@pytest.mark.parametrize("draw", ["with_replacement", "deterministic"])
def test_what_the_target_never_says_is_never_accepted(name: str, draw: Draw) -> None:
    p = rows([0.0, 1.0], [0.5, 0.5])
    q = rows([1.0, 0.0])[0] if draw == "with_replacement" else None
    draft = DraftTree((0, 0), (-1, 0), (None, draw), (q, None))
    for u in (0.0, 5e-324, 0.5, ALMOST_ONE):
        verdict = verify.get(name)(draft, p, [0, u], [0.5, 0.5])
        assert (verdict.path, verdict.token) == ((0,), 1)


@pytest.mark.parametrize("name", ["chain", "tree", "block", "traversal", "kseq", "lenient"])
def test_equal_laws_always_accept(name: str) -> None:
    rng = random.Random(5)
    for _ in range(200):
        p = [random_law(rng), random_law(rng)]
        token = pick(p[0], rng.random())
        draft = DraftTree.chain(0, (token,), (p[0].clone(),))
        assert verify.get(name)(draft, p, [0, ALMOST_ONE], [0.5, 0.5]).accepted == 1


def test_rounding_that_leaves_no_residual_emits_from_p() -> None:
    p = torch.tensor([0.3, 0.7], dtype=torch.float64)
    q = torch.tensor([0.3 + 2.0**-54, 0.7], dtype=torch.float64)
    assert q[0] > p[0]
    for name in ("chain", "tree", "block", "traversal"):
        verdict = verify.get(name)(DraftTree.chain(0, (0,), (q,)), [p, p], [0, ALMOST_ONE], [0.9, 0])
        assert verdict.kind == "residual" and torch.equal(verdict.law, p) and verdict.token == 1


def test_rows_are_asked_for_only_where_the_walk_comes() -> None:
    class Asked:
        def __init__(self) -> None:
            self.nodes: set[int] = set()

        def __getitem__(self, node: int) -> Tensor:
            self.nodes.add(node)
            return torch.tensor([0.0, 1.0], dtype=torch.float64)

    draft = DraftTree((0, 1, 0, 1, 1), (-1, 0, 1, 1, 2), (None, *["deterministic"] * 4), (None,) * 5)
    asked = Asked()
    assert verify.get("tree")(draft, asked, [0.5] * 5, [0.5] * 4).path == (0, 1, 3)
    assert asked.nodes == {0, 1, 3}


def first_token_law(draft: DraftTree, p: list[Tensor]) -> Tensor:
    """The law of the first emitted token over the accept coins, from the tests that `tree` itself records."""
    verdict = verify.get("tree")(draft, p, [ALMOST_ONE] * len(draft), [0.5] * (draft.depth + 1))
    out, left = torch.zeros(len(p[0]), dtype=torch.float64), 1.0
    for test in verdict.tests:
        passes = min(1.0, test.p_eff / test.q_eff)
        out[draft.tokens[test.node]] += left * passes
        left *= 1 - passes
        if test.accepted:
            return out
    return out + left * verdict.law


@pytest.mark.parametrize("draw", ["with_replacement", "without_replacement"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_sampled_siblings_leave_the_law_of_the_target(draw: Draw, k: int) -> None:
    """Exact: over all draws of k siblings from four tokens, with the probability of each."""
    rng = random.Random(k)
    for _ in range(10):
        p, q = (torch.tensor([rng.expovariate(1) for _ in range(4)], dtype=torch.float64) for _ in range(2))
        p, q = p / p.sum(), q / q.sum()
        total, mass = torch.zeros(4, dtype=torch.float64), 0.0
        for tokens in itertools.product(range(4), repeat=k):
            weight = 1.0
            for i, token in enumerate(tokens):
                law = without(q, tokens[:i]) if draw == "without_replacement" else q
                weight *= float(law[token]) if draw == "with_replacement" or token not in tokens[:i] else 0.0
            if weight:
                draft = DraftTree((0, *tokens), (-1, *[0] * k), (None, *[draw] * k), (q, *[None] * k))
                total += weight * first_token_law(draft, [p] * (k + 1))
                mass += weight
        assert mass == pytest.approx(1, abs=1e-12)
        assert float((total - p).abs().max()) < 1e-12


def test_chosen_siblings_leave_the_law_of_the_target() -> None:
    rng = random.Random(9)
    for _ in range(50):
        p = random_law(rng)
        tokens = [rng.randrange(V) for _ in range(4)]  # the same one may be chosen twice
        draft = DraftTree((0, *tokens), (-1, *[0] * 4), (None, *["deterministic"] * 4), (None,) * 5)
        assert float((first_token_law(draft, [p] * 5) - p).abs().max()) < 1e-12


def test_siblings_are_tested_in_draw_order_against_what_is_left() -> None:
    q = rows([0.5, 0.25, 0.25])[0]
    p = rows([0.1, 0.2, 0.7])[0]
    draft = DraftTree((0, 0, 1), (-1, 0, 0), (None, *["without_replacement"] * 2), (q, None, None))
    verdict = verify.get("tree")(draft, [p] * 3, [0, ALMOST_ONE, ALMOST_ONE], [0.5, 0.5])
    first, second = verdict.tests
    assert (first.node, first.p_eff, first.q_eff) == (1, 0.1, 0.5)
    assert (second.node, second.p_eff, second.q_eff) == (2, 0.0, 0.5), "residual (0, 0, 1), q without its first token"
    assert verdict.token == 2


def test_match_is_plain_decoding() -> None:
    """Whatever the draft, the emitted tokens are the picks from p along the emitted path."""
    rng = random.Random(3)
    for _ in range(200):
        size = rng.randint(1, 9)
        parents = (-1, *(rng.randrange(i) for i in range(1, size)))
        tokens = tuple(rng.randrange(3) for _ in range(size))
        draft = DraftTree(tokens, parents, (None, *["deterministic"] * (size - 1)), (None,) * size)
        p = [random_law(rng)[:3] + 0.01 for _ in range(size)]
        emit = [rng.random() for _ in range(draft.depth + 1)]
        verdict: Verdict = verify.get("match")(draft, p, [], emit)
        emitted = [*(tokens[i] for i in verdict.path[1:]), verdict.token]
        assert emitted == [pick(p[node], emit[depth]) for depth, node in enumerate(verdict.path)]
        assert verdict.token not in [tokens[c] for c in draft.children[verdict.path[-1]]]
        assert verdict.kind == ("target" if draft.children[verdict.path[-1]] or verdict.path == (0,) else "bonus")


TREE = DraftTree((0, 1, 2), (-1, 0, 0), (None, *["deterministic"] * 2), (None,) * 3)


def test_a_chain_rule_refuses_a_tree() -> None:
    with pytest.raises(NotApplicableError, match="judges chains only"):
        verify.get("chain")(TREE, rows(*[[0.25] * 4] * 3), [0.5] * 3, [0.5] * 2)
    assert verify.get("tree").objection(TREE) is None


def test_a_draw_of_another_kind_is_refused() -> None:
    strange = DraftTree((0, 1), (-1, 0), (None, "guessed"), (rows([0.5, 0.5])[0], None))  # type: ignore[arg-type]
    unsaid = DraftTree((0, 1), (-1, 0), (None, None), (rows([0.5, 0.5])[0], None))
    for draft in (strange, unsaid):
        for name in verify.VERIFIERS:
            with pytest.raises(NotApplicableError):
                verify.get(name)(draft, rows([0.5, 0.5], [0.5, 0.5]), [0, 0], [0, 0])


@pytest.mark.parametrize("tokens, q", [((1, 1), [0.5, 0.5, 0]), ((0, 2), [0.5, 0.5, 0]), ((0, 1), [1.0, 0, 0])])
def test_siblings_that_cannot_be_drawn_without_replacement_are_refused(tokens: tuple[int, ...], q: list[float]) -> None:
    draft = DraftTree((0, *tokens), (-1, 0, 0), (None, *["without_replacement"] * 2), (rows(q)[0], None, None))
    with pytest.raises(NotApplicableError, match="without replacement"):
        verify.get("tree")(
            draft, rows(*[[0.0, 0.0, 1.0] if tokens != (0, 2) else [0, 1.0, 0]] * 3), [0.9] * 3, [0.5] * 2
        )


def test_an_unknown_verifier_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"expected a verifier out of .*chain.*; got 'greedy'"):
        verify.get("greedy")


@pytest.mark.parametrize("name", ["chain", "tree", "block", "traversal", "kseq"])
def test_nan_in_q_is_refused_when_it_would_be_emitted_from(name: str) -> None:
    nan = float("nan")
    draft = DraftTree.chain(0, (1,), (torch.tensor([nan, 0.5, 0.5], dtype=torch.float64),))
    p = rows([0.4, 0.2, 0.4], [0.2, 0.3, 0.5])
    with pytest.raises(NumericalError, match="NaN"):
        verify.get(name)(draft, p, [0, ALMOST_ONE], [0.5, 0.5])


def test_every_verifier_says_what_it_is() -> None:
    for name, verifier in verify.VERIFIERS.items():
        assert verifier.name == name and verifier.source
        assert verifier.shapes <= {"chain", "tree"} and verifier.draws <= verify.ALL_DRAWS
