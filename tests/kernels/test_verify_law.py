"""The law of the verification kernels: what comes out of a round, weighted by its coins, is the target's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from specdecode_kernels import verify

from specdecode_ref.batched.records import WITH, WITHOUT, Drafts, Rules
from specdecode_ref.fidelity import cube, edges, laws, setups
from specdecode_ref.verify import VERIFIERS
from tests.kernels.rounds import ALMOST_ONE, BAND, EDGE, NAMES, PLAIN, chain_of, run


def cells(name: str, draws: setups.Draws, vocab: int) -> tuple[list[tuple[float, Any, Any]], Any]:
    """All (mass, coins, draft) of one round: every draft, every box of coins in which the reference decides alike.

    A coin is the middle of its cell; the edges come from theory (`fidelity.edges`) and are probed by `fidelity.cube`.
    """
    p, q = setups.pair(0, vocab)
    verifier, out = VERIFIERS[name], []
    for weight, draft in laws.drafts(q, draws, root=1):
        rows = {node: p(draft.history(node)) for node in range(len(draft))}
        theory = edges.theory(name)(draft, {node: row.tolist() for node, row in rows.items()})

        def program(read: cube.Reader, draft: Any = draft, rows: Any = rows) -> cube.Result:
            coins: dict[Any, float] = {}

            def noted(kind: str, index: int) -> float:
                return coins.setdefault((kind, index), read((kind, index)))

            accept = cube.Lazy(len(draft), partial(noted, "accept"))
            emit = cube.Lazy(draft.depth + 1, partial(noted, "emit"))
            verdict = verifier(draft, rows, accept, emit)
            return cube.Result((verdict.path, verdict.token), (verdict, coins))

        def breakpoints(key: Any, detail: Any, theory: Any = theory) -> list[float]:
            return cube.steps(theory, *key, detail[0])

        for box in cube.explore(program, breakpoints):
            out.append((weight * box.volume, (draft, rows, box.result.detail[1]), box.result.outcome))
    return out, p


LAWS: dict[str, tuple[str, setups.Draws, int]] = {
    "chain": ("chain", setups.CHAIN, 3),
    "block": ("block", setups.CHAIN, 2),
    "siblings": ("tree", setups.SIBLINGS, 2),
    "distinct siblings": ("tree", setups.DISTINCT, 3),
}


def law_of(name: str, draws: setups.Draws, vocab: int) -> float:
    """Total variation of what a kernel emits, exactly, from the target's law."""
    boxes, p = cells(name, draws, vocab)
    nodes = len(boxes[0][1][0])
    batch = len(boxes)
    logits, draft = torch.zeros(batch, nodes, vocab), torch.zeros(batch, nodes, vocab)
    tokens, parents = torch.zeros(batch, nodes, dtype=torch.int64), torch.zeros(batch, nodes, dtype=torch.int64)
    kinds = torch.zeros(batch, nodes, dtype=torch.int64)
    coins = torch.zeros(2, batch, nodes, dtype=torch.float64)
    for b, (_, (tree, rows, read), _) in enumerate(boxes):
        tokens[b], parents[b] = torch.tensor(tree.tokens), torch.tensor(tree.parents)
        for node in range(nodes):
            logits[b, node] = rows[node].log()
            if tree.q[node] is not None:
                draft[b, node] = tree.q[node].log()
            kinds[b, node] = WITHOUT if tree.draws[node] == "without_replacement" else WITH
        for (kind, index), u in read.items():
            coins[int(kind == "emit"), b, index] = u
    drafts = Drafts(tokens, parents, kinds, draft)
    out = getattr(verify, f"verify_{name}")(logits, drafts, Rules.of([PLAIN] * batch), coins[0], coins[1])
    out.require_fine()
    law: dict[tuple[int, ...], float] = {}
    for (mass, (tree, _, _), _), path, token in zip(boxes, out.path.tolist(), out.token.tolist(), strict=True):
        emitted = (*(tree.tokens[node] for node in path[1:] if node > 0), token)
        laws.add_completed(law, p, tree.depth + 1, mass, emitted)
    return laws.tv(law, laws.sequences(p, len(draws) + 1))


@pytest.mark.parametrize("which", LAWS)
def test_the_exact_law(which: str) -> None:
    """Every draft and every cell of its coins, weighted: the law of what comes out is the target's."""
    assert law_of(*LAWS[which]) < EDGE


@pytest.mark.long
@pytest.mark.parametrize("name", ["chain", "block"])
def test_the_exact_law_of_five_tokens(name: str) -> None:
    assert law_of(name, setups.CHAIN, 5) < EDGE


@pytest.mark.parametrize("name", NAMES)
def test_edges_are_where_they_should_be(name: str) -> None:
    """Coins just beside each edge: the accept edge of a drawn token to BAND, the picks of p and residual to EDGE."""
    p = torch.tensor([0.1, 0.35, 0.05, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.3, 0.15, 0.25, 0.1, 0.2], dtype=torch.float64)
    ratio = float(p[0] / q[0])
    residual = (p - q).clamp(min=0)
    rounds = []
    for sign in (-1, 1):
        rounds.append((ratio * (1 + sign * BAND), 0.5))
        for law, accept in ((p, 0.0), (residual / residual.sum(), ALMOST_ONE)):
            edge = law.cumsum(0)[:-1]
            rounds += [(accept, float(u) + sign * 2 * EDGE) for u in edge if 0 < u < 1 - 1e-9]
    one = chain_of(p, q, 0, after=p)
    many = [torch.cat([x] * len(rounds)) for x in (one[0], one[1].tokens, one[1].parents, one[1].draws, one[1].logits)]
    coins = torch.tensor(rounds, dtype=torch.float64)
    accept = torch.stack([coins[:, 0]] * 2, 1)
    emit = torch.stack([coins[:, 1]] * 2, 1)
    arguments = (many[0], Drafts(*many[1:]), Rules.of([PLAIN] * len(rounds)), accept, emit)
    out, owed = run(name, arguments)
    assert torch.equal(out.length, owed.length) and torch.equal(out.token, owed.token)
    assert len(set(zip(out.length.tolist(), out.token.tolist(), strict=True))) >= 7
