"""Sample and match: draw the target's token as plain decoding would, and see whether the draft holds it.

The draft law plays no part, so this accepts less often than rejection sampling when the temperature is above 0. In
return the output is token for token that of plain decoding with the same emit coins, which makes it the yardstick of
the coupling tests; at temperature 0 it is what "greedy verification" means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode_ref.sampling import pick
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Kind, Test, Verdict

if TYPE_CHECKING:
    from specdecode_ref.verify import Rows


def verify(draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]) -> Verdict:
    """Follow the draft while it holds the token that was drawn anyway. See `Verifier` for the arguments.

    A test's `u` is the emit coin that drew the token; `accept_coins` are not read.
    """
    path, tests = [0], []
    while True:
        node, u = path[-1], emit_coins[len(path) - 1]
        token = pick(p[node], u)
        found = None
        for child in draft.children[node]:
            x = draft.tokens[child]
            q = draft.q[node]
            q_x = 1.0 if draft.draws[child] == "deterministic" or q is None else float(q[x])
            tests.append(Test(child, float(p[node][x]), q_x, u, x == token))
            if x == token:
                found = child
                break
        if found is None:
            kind: Kind = "bonus" if len(path) > 1 and not draft.children[node] else "target"
            return Verdict(tuple(path), token, kind, tuple(tests), p[node])
        path.append(found)
