"""Recursive rejection sampling in a tree: siblings get one chance each, in the order they were drawn.

At a node, the first child is tested as in a chain. After a rejection the target law becomes the residual, and the next
sibling is tested against *that*; if all are rejected, the last residual emits the token. The law a sibling was really
drawn from, q_eff, depends on how it was drawn:

- with replacement: q itself (SpecInfer, arXiv 2305.09781, algorithm 2, multi-step speculative sampling);
- without replacement: q without its earlier siblings, renormalised (Sequoia, arXiv 2402.12374, algorithm 2;
  recursive speculative decoding, arXiv 2402.14160);
- deterministic: a point mass, so its test is `u < p_eff(x)` and a rejection removes x from the target law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode_ref.errors import NotApplicableError
from specdecode_ref.sampling import pick, point_mass, residual, without
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Kind, Test, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specdecode_ref.verify import Rows


def verify(draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]) -> Verdict:
    """Walk down from the root along accepted children, then emit one token. See `Verifier` for the arguments."""
    path: list[int] = [0]
    tests: list[Test] = []
    while True:
        child, p_eff = _first_accepted(draft, path[-1], p[path[-1]], accept_coins, tests)
        if child is None:
            break
        path.append(child)

    kind: Kind = "residual" if draft.children[path[-1]] else "bonus" if len(path) > 1 else "target"
    return Verdict(tuple(path), pick(p_eff, emit_coins[len(path) - 1]), kind, tuple(tests), p_eff)


def _first_accepted(
    draft: DraftTree, node: int, p_eff: Tensor, accept_coins: Sequence[float], tests: list[Test]
) -> tuple[int | None, Tensor]:
    """The first child of `node` that passes its test, and the target law as the rejections before it left it."""
    for child in draft.children[node]:
        token, u = draft.tokens[child], accept_coins[child]
        q_eff = drawn_from(draft, child, p_eff)
        p_x, q_x = float(p_eff[token]), float(q_eff[token])
        accepted = u * q_x < p_x
        tests.append(Test(child, p_x, q_x, u, accepted))
        if accepted:
            return child, p_eff
        p_eff = residual(p_eff, q_eff)
    return None, p_eff


def drawn_from(draft: DraftTree, child: int, like: Tensor) -> Tensor:
    """q_eff [V]: the law `child` was drawn from, given its earlier siblings."""
    if draft.draws[child] == "deterministic":
        return point_mass(draft.tokens[child], like)
    parent = draft.parents[child]
    q = draft.q[parent]
    assert q is not None
    if draft.draws[child] == "with_replacement":
        return q
    earlier = [draft.tokens[s] for s in draft.children[parent] if s < child and draft.draws[s] == "without_replacement"]
    q_eff = without(q, earlier)
    if not q_eff[draft.tokens[child]] > 0 or draft.tokens[child] in earlier:
        raise NotApplicableError(
            "siblings drawn without replacement from the support of q",
            f"token {draft.tokens[child]} at node {child}",
            "draw no more siblings than q has tokens, each once",
        )
    return q_eff
