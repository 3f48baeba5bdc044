"""Block verification: a chain is judged as a whole, from its end, instead of token by token.

A token that p likes more than q does leaves weight over for the ones after it, which token-wise rejection throws away.
Here a prefix of i drafted tokens carries the weight

    w_0 = 1,    w_i = min(1, w_{i-1} p(x_i) / q(x_i)),                                                   (eq. 4)

and is accepted, the longest first, with probability

    h_i = s_i / (s_i + 1 - w_i),    s_i = sum_x max(w_i p(x) - q(x), 0),    and h_gamma = w_gamma.       (eq. 5)

The token after an accepted prefix comes from norm(max(w_i p - q, 0)), and from p after the whole chain. No rule that
keeps the law accepts more in expectation (Sun et al., arXiv 2403.10444, algorithm 2, theorems 1 and 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode_ref.sampling import pick, residual
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Kind, Test, Verdict
from specdecode_ref.verify.tree import drawn_from

if TYPE_CHECKING:
    from torch import Tensor

    from specdecode_ref.verify import Rows


def verify(draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]) -> Verdict:
    """Accept the longest prefix whose coin falls below h_i, then emit one token. See `Verifier` for the arguments.

    Every coin of the chain may be read, beyond the accepted prefix too. A test's `p_eff` is h_i and its `q_eff` is 1.
    """
    gamma = len(draft) - 1
    q = [drawn_from(draft, child, p[child - 1]) for child in range(1, gamma + 1)]
    w = [1.0]
    for i, x in enumerate(draft.tokens[1:]):
        w.append(carried(w[i], float(p[i][x]), float(q[i][x])))

    i, tests = gamma, []
    while i > 0:
        h = w[i] if i == gamma else after_rejection(w[i], p[i], q[i])
        u = accept_coins[i]
        tests.append(Test(i, h, 1.0, u, u < h))
        if u < h:
            break
        i -= 1

    law = p[i] if i == gamma else residual(w[i] * p[i], q[i])
    kind: Kind = "residual" if i < gamma else "bonus" if gamma else "target"
    return Verdict(tuple(range(i + 1)), pick(law, emit_coins[i]), kind, tuple(tests), law)


def carried(weight: float, p_x: float, q_x: float) -> float:
    """The weight of a prefix with one more token: min(1, w p / q). Exactly w where p = q, and 0 where p = 0."""
    owed = weight * p_x
    if owed >= q_x:
        return float(owed > 0)
    return weight * (p_x / q_x)


def after_rejection(weight: float, p: Tensor, q: Tensor) -> float:
    """The weight that a prefix keeps once a token drawn from `q` behind it was rejected: s / (s + 1 - w)."""
    s = float((weight * p - q).clamp_(min=0).sum())
    return s / (s + (1 - weight)) if s > 0 else 0.0  # 1 - w first: s + 1 would lose a small s
