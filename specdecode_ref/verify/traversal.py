"""Traversal verification: a tree is judged from its leaves to its root, and no branch is given up before its time.

Recursive rejection decides at the root first, and a rejected child takes all that hangs on it away. Here every path
from the root carries a weight, as in block verification, w = min(1, w_parent p(x) / q_eff(x)). The first leaf is tested
with its weight. If it fails it is removed, and its parent's law and weight become what the leaf has left of them,

    p' = norm(max(w p - q_eff, 0)),    w' = s / (s + 1 - w),    s = sum_x max(w p(x) - q_eff(x), 0);

the next sibling, with all its branch, is weighed against those. A node without children left is a leaf itself. The
root, whose weight is 1, is never rejected. On a chain this is block verification, decision for decision (Weng et al.,
arXiv 2505.12398, algorithm 2, theorems 3.1 to 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode_ref.sampling import pick, residual
from specdecode_ref.tree import DraftTree, ancestors
from specdecode_ref.types import Kind, Test, Verdict
from specdecode_ref.verify.block import after_rejection, carried
from specdecode_ref.verify.tree import drawn_from

if TYPE_CHECKING:
    from specdecode_ref.verify import Rows


def verify(draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]) -> Verdict:
    """Accept the first node, children before parents, whose coin falls below its weight. See `Verifier`.

    A test's `p_eff` is the weight of the path to its node, and its `q_eff` is 1.
    """
    weight, law = {0: 1.0}, {0: p[0]}
    unseen = [iter(children) for children in draft.children]
    tests: list[Test] = []
    node = 0
    while True:
        child = next(unseen[node], None)
        if child is not None:  # down to the first leaf
            x = draft.tokens[child]
            q_eff = drawn_from(draft, child, law[node])
            weight[child] = carried(weight[node], float(law[node][x]), float(q_eff[x]))
            law[child] = p[child]
            node = child
            continue
        if node == 0:
            break
        u = accept_coins[node]
        tests.append(Test(node, weight[node], 1.0, u, u < weight[node]))
        if tests[-1].accepted:
            break
        q_eff, node = drawn_from(draft, node, law[draft.parents[node]]), draft.parents[node]
        before, owed = weight[node], law[node]
        law[node] = residual(before * owed, q_eff)
        weight[node] = after_rejection(before, owed, q_eff) if node else 1.0

    path = ancestors(draft.parents, node)
    kind: Kind = "residual" if draft.children[node] else "bonus" if node else "target"
    return Verdict(path, pick(law[node], emit_coins[len(path) - 1]), kind, tuple(tests), law[node])
