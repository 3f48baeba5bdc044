"""The other oracle: how many drafted tokens each rule accepts, from its own theory.

A rule that tests too strictly and makes up for it afterwards keeps the law and loses its speed; only this sees it.
"""

from __future__ import annotations

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.laws import Next, drafts, judged
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.setups import CHAIN, DISTINCT, EXACT, SIBLINGS, Draws, pair
from specdecode_ref.sampling import without

ONE: Draws = (("with_replacement",),)


def check_acceptance(package: Package) -> None:
    """Raises FidelityError unless each lossless rule accepts as many drafted tokens in expectation as it should."""
    p, q = pair(0, 3)
    ratio = ("chain", "tree", "block", "traversal", "kseq")
    expected = {
        **{(name, ONE): _overlap(p, q, 1, product=False) for name in ratio},
        **{(name, ONE): _overlap(p, q, 1, product=True) for name in ("match", "onehot")},
        **{(name, CHAIN): _overlap(p, q, 2, product=False) for name in ("chain", "tree", "kseq")},
        **{(name, CHAIN): _overlap(p, q, 2, product=True) for name in ("match", "onehot")},
        **{(name, CHAIN): _blocks(p, q, 1.0, ()) for name in ("block", "traversal")},
        ("kseq", SIBLINGS): _two_shares(p, q),
        ("tree", SIBLINGS): _second_chance(p, q, distinct=False),
        ("tree", DISTINCT): _second_chance(p, q, distinct=True),
    }
    for (name, draws), alpha in expected.items():
        rule = package("verify").get(name)
        found = sum(
            mass * (len(path) - 1) for mass, _, path, _ in judged(rule, p, drafts(q, draws, root=1), search=True)
        )
        if not abs(found - alpha) <= EXACT:
            raise FidelityError(f"{alpha} accepted tokens from '{name}'", found, "look at the tests of its verdicts")


def _overlap(p: Next, q: Next, length: int, product: bool, start: tuple[int, ...] = ()) -> float:
    """Accepted tokens of a chain, token by token: of min(p, q), or of p q where the draft's law is not looked at."""
    if len(start) == length:
        return 0.0
    shares = [a * b if product else min(a, b) for a, b in zip(p(start).tolist(), q(start).tolist(), strict=True)]
    return sum(share * (1 + _overlap(p, q, length, product, (*start, x))) for x, share in enumerate(shares))


def _blocks(p: Next, q: Next, weight: float, start: tuple[int, ...]) -> float:
    """Accepted tokens of block verification, the sum of the prefixes' mean weights (arXiv 2403.10444, lemma 4)."""
    total = 0.0
    for x, (a, b) in enumerate(zip(p(start).tolist(), q(start).tolist(), strict=True)):
        w = min(1.0, weight * a / b)
        total += b * (w + (_blocks(p, q, w, (*start, x)) if len(start) == 0 else 0.0))
    return total


def _second_chance(p: Next, q: Next, distinct: bool) -> float:
    """Accepted tokens of two siblings: the overlap, and after a rejection that of the residual with the second's q."""
    first, drawn = p(()), q(())
    left = (first - drawn).clamp(min=0)
    total = float(first.minimum(drawn).sum())
    for x, mass in enumerate((drawn - first).clamp(min=0).tolist()):
        second = without(drawn, [x]) if distinct else drawn
        total += mass * float((left / left.sum()).minimum(second).sum())
    return total


def _two_shares(p: Next, q: Next) -> float:
    """Accepted tokens of two siblings under k-SEQ: rho beta, at the rho where that is 1 - (1 - beta)^2 (theorem 1)."""
    first, drawn = p(()), q(())
    low, high = 1.0, 2.0
    for _ in range(100):
        rho = (low + high) / 2
        beta = float((first / rho).minimum(drawn).sum())
        low, high = (low, rho) if 2 - beta <= rho else (rho, high)
    return rho * beta
