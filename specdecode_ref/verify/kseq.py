"""k-SEQ, the sequential rule of SpecTr: k candidates drawn independently, each tested against the same share of p.

At a node with k children drawn from q, each child x is accepted with probability min(1, p(x) / (rho q(x))), in order.
If none is, the token comes from what the k chances have left of p:

    norm(p - min(p / rho, q) (1 - (1 - beta)^k) / beta),    beta = sum_x min(p(x) / rho, q(x)).

That is a law for every rho from the root rho* of 1 - (1 - beta)^k = rho beta on, and rho* accepts the most. A round of
optimal transport accepts at most 1 / (1 - (1 - 1/k)^k) times as often (Sun et al., SpecTr, arXiv 2310.15141, algorithm
3, theorem 1). With k = 1 it is the rule of `chain`. In a tree the rule is applied node by node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specdecode_ref.sampling import pick, residual
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Kind, Test, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specdecode_ref.verify import Rows


def verify(draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]) -> Verdict:
    """Walk down from the root along accepted children, then emit one token. See `Verifier` for the arguments.

    A test's `p_eff` is p(x) / rho, the share of p that one candidate may claim.
    """
    path, tests = [0], []
    while children := draft.children[path[-1]]:
        node = path[-1]
        q = draft.q[node]
        assert q is not None
        share = p[node] / smallest_rho(p[node], q, len(children))
        accepted = None
        for child in children:
            x, u = draft.tokens[child], accept_coins[child]
            p_x, q_x = float(share[x]), float(q[x])
            tests.append(Test(child, p_x, q_x, u, u * q_x < p_x))
            if tests[-1].accepted:
                accepted = child
                break
        if accepted is None:
            taken = torch.minimum(share, q)
            law = residual(p[node], taken * _chances(float(taken.sum()), len(children)))
            return Verdict(tuple(path), pick(law, emit_coins[len(path) - 1]), "residual", tuple(tests), law)
        path.append(accepted)

    law = p[path[-1]]
    kind: Kind = "bonus" if len(path) > 1 else "target"
    return Verdict(tuple(path), pick(law, emit_coins[len(path) - 1]), kind, tuple(tests), law)


def smallest_rho(p: Tensor, q: Tensor, k: int) -> float:
    """rho*, from 1 to k: by bisection, the upper end, so that what is left of p is nowhere negative."""
    low, high = 1.0, float(k)
    while low < (middle := (low + high) / 2) < high:
        beta = float(torch.minimum(p / middle, q).sum())
        low, high = (low, middle) if _chances(beta, k) <= middle else (middle, high)
    return high


def _chances(beta: float, k: int) -> float:
    """(1 - (1 - beta)^k) / beta, which tends to k as beta tends to 0."""
    if beta >= 1:
        return 1 / beta
    return -math.expm1(k * math.log1p(-beta)) / beta if beta > 0 else float(k)
