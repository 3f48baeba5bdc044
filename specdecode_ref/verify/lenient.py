"""Lenient rejection sampling: LOSSY, the output law is not the target's.

The rule of `chain` with q multiplied by a lenience l below 1 before the comparison, so that a token passes with
probability min(1, p(x) / (l q(x))). More is accepted, and no token comes out more often than p(x) / l: a bound on the
damage, not a guarantee of the law. l = 1 is `chain` (Leviathan et al., arXiv 2211.17192, appendix A.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode_ref.sampling import pick, residual
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Kind, Test, Verdict
from specdecode_ref.verify.tree import drawn_from

if TYPE_CHECKING:
    from specdecode_ref.verify import Rows

LENIENCE = 0.5


def verify(
    draft: DraftTree,
    p: Rows,
    accept_coins: Sequence[float],
    emit_coins: Sequence[float],
    *,
    lenience: float = LENIENCE,
) -> Verdict:
    """Accept the longest prefix the coins allow, then emit one token. See `Verifier`; `q_eff` is l q(x)."""
    path, tests = [0], []
    while draft.children[path[-1]]:
        node = path[-1]
        (child,) = draft.children[node]
        token, u = draft.tokens[child], accept_coins[child]
        q = drawn_from(draft, child, p[node])
        p_x, q_x = float(p[node][token]), lenience * float(q[token])
        tests.append(Test(child, p_x, q_x, u, u * q_x < p_x))
        if not tests[-1].accepted:
            law = residual(p[node], q)
            return Verdict(tuple(path), pick(law, emit_coins[len(path) - 1]), "residual", tuple(tests), law)
        path.append(child)

    law = p[path[-1]]
    kind: Kind = "bonus" if len(path) > 1 else "target"
    return Verdict(tuple(path), pick(law, emit_coins[len(path) - 1]), kind, tuple(tests), law)
