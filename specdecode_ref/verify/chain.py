"""Rejection sampling along a chain: the rule of the two papers that started the field.

Each drafted token x, drawn from q, is accepted with probability min(1, p(x) / q(x)). The first rejection emits from
norm(max(p - q, 0)) and ends the round; if all are accepted, one more token comes from p. Either way every emitted token
has the law p, whatever q is (Leviathan et al., arXiv 2211.17192, algorithm 1 and appendix A.1; Chen et al., arXiv
2302.01318, algorithm 2 and theorem 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode_ref.sampling import pick, point_mass, residual
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Kind, Test, Verdict

if TYPE_CHECKING:
    from specdecode_ref.verify import Rows


def verify(draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]) -> Verdict:
    """Accept the longest prefix the coins allow, then emit one token. See `Verifier` for the arguments.

    A deterministic draft is a draft from a point mass. The test is `u * q < p`: no division, p = 0 is never accepted,
    and p == q always is, as u < 1.
    """
    path, tests = [0], []
    while draft.children[path[-1]]:
        node = path[-1]
        (child,) = draft.children[node]
        token, u = draft.tokens[child], accept_coins[child]
        q = draft.q[node] if draft.draws[child] != "deterministic" else point_mass(token, p[node])
        assert q is not None
        p_x, q_x = float(p[node][token]), float(q[token])
        accepted = u * q_x < p_x
        tests.append(Test(child, p_x, q_x, u, accepted))
        if not accepted:
            law = residual(p[node], q)
            return Verdict(tuple(path), pick(law, emit_coins[len(path) - 1]), "residual", tuple(tests), law)
        path.append(child)

    law = p[path[-1]]
    kind: Kind = "bonus" if len(path) > 1 else "target"
    return Verdict(tuple(path), pick(law, emit_coins[len(path) - 1]), kind, tuple(tests), law)
