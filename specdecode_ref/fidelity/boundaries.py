"""The edges of float64 and of the simplex, where a rule that is right on paper goes wrong in code.

Each fixture asks one question of a package's verifiers, and raises FidelityError when the answer is wrong. Coins are
chosen by hand: 0, which every generator may return, and LAST, the largest double below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.private import Package

LAST = 1 - 2.0**-53
"""The largest coin there is."""

REJECTION = ("chain", "tree")


def _law(*mass: float) -> torch.Tensor:
    return torch.tensor(mass, dtype=torch.float64)


def _ask(
    package: Package, verifier: str, p: Sequence[torch.Tensor], q: torch.Tensor | None, x: int, u: float, emit: float
) -> Any:
    """The verdict on a chain of one token x drawn from q (deterministic where q is None); p after root and after x."""
    draft = package("tree").DraftTree.chain(0, (x,), None if q is None else (q,))
    return package("verify").get(verifier)(draft, list(p), [0.5, u], [emit, emit])


def _demand(holds: bool, expected: str, verdict: Any) -> None:
    if not holds:
        raise FidelityError(expected, verdict, "look at the test `u * q < p` and at what is left to emit")


def impossible_is_rejected(package: Package) -> None:
    """p(x) = 0: rejected by every coin, 0 included, and never emitted."""
    p, q = _law(0, 0.25, 0.75), _law(0.5, 0.5, 0)
    for verifier in REJECTION:
        for u in (0.0, LAST):
            for emit in (0.0, LAST):
                v = _ask(package, verifier, [p, p], q, 0, u, emit)
                _demand(v.accepted == 0 and v.token != 0, "a token with p = 0 rejected and not emitted", v)
                v = _ask(package, verifier, [p, p], None, 0, u, emit)
                _demand(v.accepted == 0 and v.token != 0, "a deterministic token with p = 0 rejected", v)


def equal_laws_accept(package: Package) -> None:
    """p == q: accepted by every coin, the last one included."""
    p = _law(0.1, 0.2, 0.7)
    for verifier in REJECTION:
        for x in range(3):
            for u in (0.0, LAST):
                v = _ask(package, verifier, [p, p], p.clone(), x, u, 0.5)
                _demand(v.accepted == 1, "acceptance where p equals q", v)


def never_drawn(package: Package) -> None:
    """q(x) = 0 < p(x): no drafter draws it; a verifier that is asked must accept it, without a division by zero."""
    p, q = _law(0.5, 0.5, 0), _law(0, 0.5, 0.5)
    for u in (0.0, LAST):
        v = _ask(package, "chain", [p, p], q, 0, u, 0.5)
        _demand(v.accepted == 1, "acceptance where q is 0 and p is not", v)


def certainty(package: Package) -> None:
    """One-hot laws: agreement accepts, disagreement emits p's token, whatever the coins."""
    a, b = _law(0, 1, 0), _law(0, 0, 1)
    for verifier in ("match", *REJECTION):
        for u in (0.0, LAST):
            for emit in (0.0, LAST):
                v = _ask(package, verifier, [a, b], a.clone(), 1, u, emit)
                _demand((v.accepted, v.token) == (1, 2), "the certain token accepted, then the next one", v)
                v = _ask(package, verifier, [b, a], a.clone(), 1, u, emit)
                _demand((v.accepted, v.token) == (0, 2), "a rejection, and the target's certain token", v)


def first_and_last_coin(package: Package) -> None:
    """Coin 0 gives the first token with mass, the last coin the last one: zeros at either end are never emitted."""
    p = _law(0, 0.3, 0.7, 0)
    for verifier in ("match", *REJECTION):
        draft = package("tree").DraftTree.bare(0)
        for emit, token in ((0.0, 1), (LAST, 2)):
            v = package("verify").get(verifier)(draft, [p], [0.5], [emit])
            _demand(v.token == token, f"token {token} for the coin {emit!r}", v)


def sums_that_are_not_one(package: Package) -> None:
    """Laws whose float64 sum misses 1 by some bits: the last coin still gives a token with mass."""
    for scale in (1 - 1e-15, 1 + 1e-15, 1 - 2.0**-53):
        p = torch.cat([torch.full((9,), 0.1, dtype=torch.float64), _law(0.1, 0)]) * scale
        for verifier in ("match", *REJECTION):
            draft = package("tree").DraftTree.bare(0)
            v = package("verify").get(verifier)(draft, [p], [0.5], [LAST])
            _demand(v.token == 9, "the last token with mass for the last coin", v)


def nothing_left(package: Package) -> None:
    """A residual of mass 0 or near it: a token that p allows comes out, never token 0 by default."""
    tiny = 1e-31
    cases = [
        (_law(0, 0.5, 0.5 - 2.0**-53), _law(0, 0.5, 0.5)),
        (_law(0, 1 - 2.0**-53, 2.0**-54), _law(0, 1, 0)),
        (_law(0, 1, tiny), _law(0, 1, 0)),
        (_law(0, 0.5, 0.5), _law(0, 0.5 + tiny, 0.5)),
    ]
    for p, q in cases:
        for verifier in REJECTION:
            for emit in (0.0, 0.5, LAST):
                for x in (1, 2):
                    if q[x] > 0:
                        v = _ask(package, verifier, [p, p], q, x, LAST, emit)
                        _demand(float(p[v.token]) > 0, "a token that p allows", v)
    p = _law(0, 0.5, 0.5)
    residual = package("sampling").residual(p, p.clone())
    _demand(torch.equal(residual, p), "p itself where no mass is left", residual)


def not_a_law(package: Package) -> None:
    """NaN in a row, or no mass at all, is refused; it never becomes a token."""
    sampling = package("sampling")
    error = package("errors").NumericalError
    rows = {
        "a NaN law": lambda: sampling.pick(_law(0.5, float("nan"), 0.5), 0.5),
        "an empty law": lambda: sampling.pick(_law(0, 0, 0), 0.5),
        "an infinite law": lambda: sampling.pick(_law(1, float("inf"), 0), 0.5),
        "a NaN logit": lambda: sampling.law(_law(0, float("nan"), 1), sampling.SamplingRule(), [0], 1),
        "a NaN logit, greedy": lambda: sampling.law(
            _law(0, float("nan"), 1), sampling.SamplingRule(temperature=0), [0], 1
        ),
        "logits of -inf only": lambda: sampling.law(_law(*[float("-inf")] * 3), sampling.SamplingRule(), [0], 1),
    }
    nan = _law(float("nan"), 0.5, 0.5)
    for verifier in ("match", *REJECTION):
        rows[f"a NaN target row ({verifier})"] = lambda v=verifier: _ask(  # type: ignore[misc]
            package, v, [nan, nan], _law(0.5, 0.5, 0), 0, 0.5, 0.5
        )
    for what, act in rows.items():
        try:
            came = act()
        except error:
            continue
        raise FidelityError(f"NumericalError for {what}", came, "refuse it where the law is used")


def duplicates_are_tested_apart(package: Package) -> None:
    """Twice the same token with replacement: the second one has its own chance against what the first left."""
    p, q = _law(0.5, 0.5), _law(0.75, 0.25)
    draft = package("tree").DraftTree(
        (0, 0, 0), (-1, 0, 0), (None, "with_replacement", "with_replacement"), (q, None, None)
    )
    v = package("verify").get("tree")(draft, [p, p, p], [0.5, 0.9, 0.0], [0.0, 0.0])
    _demand([t.node for t in v.tests] == [1, 2] and v.token == 1, "two tests, and token 1 out of the residual", v)


def ties_break_first(package: Package) -> None:
    """Temperature 0: of equal maxima the first one wins, as in `argmax`."""
    sampling = package("sampling")
    for logits, token in ((_law(1, 3, 3, 3), 1), (_law(2, 2, 2, 2), 0), (_law(-1, -1, -2, -1), 0)):
        law = sampling.law(logits, sampling.SamplingRule(temperature=0), [0], 1)
        _demand(int(law.argmax()) == token and float(law.max()) == 1, f"all mass on token {token}", law)


FIXTURES: dict[str, Callable[[Package], None]] = {
    f.__name__: f
    for f in (
        impossible_is_rejected,
        equal_laws_accept,
        never_drawn,
        certainty,
        first_and_last_coin,
        sums_that_are_not_one,
        nothing_left,
        not_a_law,
        duplicates_are_tested_apart,
        ties_break_first,
    )
}
