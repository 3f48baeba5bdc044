"""Typical acceptance, the rule of Medusa: LOSSY, the output law is not the target's.

A drafted token is accepted where p finds it likely enough, without a coin:

    p(x) > min(epsilon, delta exp(-H(p))),    H the entropy of p in nats.

The longest path that passes wins, the first of equals, and one more token comes from p. A confident target must be
nearly matched, an unsure one lets more through: text of the same feel, from another law. At temperature 0 it is exact,
since p is then a point mass (Cai et al., Medusa, arXiv 2401.10774, section 2.3.1; epsilon and delta are its code's
posterior_threshold and posterior_alpha).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from specdecode_ref.sampling import pick
from specdecode_ref.tree import DraftTree, ancestors
from specdecode_ref.types import Kind, Test, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specdecode_ref.verify import Rows


def verify(
    draft: DraftTree,
    p: Rows,
    accept_coins: Sequence[float],
    emit_coins: Sequence[float],
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """Accept the longest path of tokens above the threshold, then emit one token. See `Verifier` for the arguments."""
    return longest_above(
        draft, p, emit_coins, lambda law: min(epsilon, delta * float(torch.exp(torch.xlogy(law, law).sum())))
    )


def longest_above(
    draft: DraftTree, p: Rows, emit_coins: Sequence[float], threshold: Callable[[Tensor], float]
) -> Verdict:
    """The longest path whose tokens all have p(x) above `threshold(p)`; a test's `u` is that threshold, its q_eff 1."""
    passed, tests = {0}, []
    for child in range(1, len(draft)):
        node = draft.parents[child]
        if node in passed:
            least, p_x = threshold(p[node]), float(p[node][draft.tokens[child]])
            tests.append(Test(child, p_x, 1.0, least, least < p_x))
            if tests[-1].accepted:
                passed.add(child)
    last = max(sorted(passed), key=lambda node: draft.depths[node])
    path = ancestors(draft.parents, last)
    kind: Kind = "bonus" if last and not draft.children[last] else "target"
    return Verdict(path, pick(p[last], emit_coins[len(path) - 1]), kind, tuple(tests), p[last])
