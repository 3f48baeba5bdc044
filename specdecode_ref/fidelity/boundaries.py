"""The edges of float64 and of the simplex, where a rule that is right on paper goes wrong in code.

Each fixture asks one question of a package's verifiers, and raises FidelityError when the answer is wrong. Coins are
chosen by hand: 0, which every generator may return, and LAST, the largest double below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import torch

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.private import Package
from specdecode_ref.sampling import pick

LAST = 1 - 2.0**-53
"""The largest coin there is."""

COINS = (0.0, 0.5, LAST)

BY_RATIO = ("chain", "tree", "block", "traversal", "kseq")
"""The rules that look at q: where q is p they accept."""


def _lossless(package: Package, draft: Any) -> list[str]:
    """The rules that must keep the law of this draft."""
    rules = package("verify").VERIFIERS.items()
    return [name for name, rule in rules if rule.lossless and rule.objection(draft) is None]


def _law(*mass: float) -> torch.Tensor:
    return torch.tensor(mass, dtype=torch.float64)


def _ask(
    package: Package, verifier: str, p: Sequence[torch.Tensor], q: torch.Tensor | None, x: int, u: float, emit: float
) -> Any:
    """The verdict on a chain of one token x drawn from q (deterministic where q is None); p after root and after x."""
    draft = _chain(package, (x,), q)
    return package("verify").get(verifier)(draft, list(p), [0.5, u], [emit, emit])


def _chain(package: Package, tokens: tuple[int, ...], q: torch.Tensor | None) -> Any:
    """A chain of tokens, all drawn from q or all deterministic."""
    laws = None if q is None else tuple(q.clone() for _ in tokens)
    return package("tree").DraftTree.chain(0, tokens, laws)


def _demand(holds: bool, expected: str, verdict: Any) -> None:
    if not holds:
        raise FidelityError(expected, verdict, "look at the test `u * q < p` and at what is left to emit")


def impossible_is_rejected(package: Package) -> None:
    """p(x) = 0: rejected by every coin, 0 included, and never emitted."""
    p, q = _law(0, 0.25, 0.75), _law(0.5, 0.5, 0)
    for drawn_from in (q, None):
        for verifier in _lossless(package, _chain(package, (0,), drawn_from)):
            for u, emit in product(COINS, COINS):
                v = _ask(package, verifier, [p, p], drawn_from, 0, u, emit)
                _demand(v.accepted == 0 and v.token != 0, f"a token with p = 0 rejected by '{verifier}'", v)


def equal_laws_accept(package: Package) -> None:
    """p == q: accepted by every coin, the last one included."""
    p = _law(0.1, 0.2, 0.7)
    for verifier, x, u in product(BY_RATIO, range(3), COINS):
        v = _ask(package, verifier, [p, p], p.clone(), x, u, 0.5)
        _demand(v.accepted == 1, f"acceptance by '{verifier}' where p equals q", v)


def never_drawn(package: Package) -> None:
    """q(x) = 0 < p(x): no drafter draws it; a verifier that is asked must accept it, without a division by zero."""
    p, q = _law(0.5, 0.5, 0), _law(0, 0.5, 0.5)
    for verifier, u in product(BY_RATIO, COINS):
        v = _ask(package, verifier, [p, p], q, 0, u, 0.5)
        _demand(v.accepted == 1, f"acceptance by '{verifier}' where q is 0 and p is not", v)


def certainty(package: Package) -> None:
    """One-hot laws: agreement accepts, disagreement emits p's token, whatever the coins."""
    a, b = _law(0, 1, 0), _law(0, 0, 1)
    for q in (a, None):
        for verifier in _lossless(package, _chain(package, (1,), q)):
            for u, emit in product(COINS, COINS):
                v = _ask(package, verifier, [a, b], q, 1, u, emit)
                _demand((v.accepted, v.token) == (1, 2), "the certain token accepted, then the next one", v)
                v = _ask(package, verifier, [b, a], q, 1, u, emit)
                _demand((v.accepted, v.token) == (0, 2), "a rejection, and the target's certain token", v)


def first_and_last_coin(package: Package) -> None:
    """Coin 0 gives the first token with mass, the last coin the last one: zeros at either end are never emitted."""
    p = _law(0, 0.3, 0.7, 0)
    draft = package("tree").DraftTree.bare(0)
    for verifier in _lossless(package, draft):
        for emit, token in ((0.0, 1), (LAST, 2)):
            v = package("verify").get(verifier)(draft, [p], [0.5], [emit])
            _demand(v.token == token, f"token {token} for the coin {emit!r}", v)


def sums_that_are_not_one(package: Package) -> None:
    """Laws whose float64 sum misses 1 by some bits: the last coin still gives a token with mass."""
    for scale in (1 - 1e-15, 1 + 1e-15, 1 - 2.0**-53):
        p = torch.cat([torch.full((9,), 0.1, dtype=torch.float64), _law(0.1, 0)]) * scale
        draft = package("tree").DraftTree.bare(0)
        for verifier in _lossless(package, draft):
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
        for verifier, emit, x in product((*BY_RATIO, "onehot"), COINS, (1, 2)):
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
    for verifier in _lossless(package, _chain(package, (0,), _law(0.5, 0.5, 0))):
        rows[f"a NaN target row ({verifier})"] = lambda v=verifier: _ask(  # type: ignore[misc]
            package, v, [nan, nan], _law(0.5, 0.5, 0), 0, 0.5, 0.5
        )
    for what, act in rows.items():
        try:
            came = act()
        except error:
            continue
        raise FidelityError(f"NumericalError for {what}", came, "refuse it where the law is used")


def only_possible_tokens(package: Package) -> None:
    """No path and no token that p forbids, whatever the coins: chains, siblings of every kind, two branches."""
    tree, d, w, wo = package("tree").DraftTree, "deterministic", "with_replacement", "without_replacement"
    q, p, one, flat = _law(0.5, 0.25, 0.25), _law(0, 0.5, 0.5), _law(0, 0, 1), _law(0.5, 0.25, 0.25)
    drafts = [
        _chain(package, (0, 1), q),
        _chain(package, (1, 0), None),
        *(tree((0, 0, 1), (-1, 0, 0), (None, draw, draw), (q, None, None)) for draw in (d, w, wo)),
        tree((0, 0, 0), (-1, 0, 0), (None, w, w), (q, None, None)),
        tree((0, 0, 1, 2), (-1, 0, 0, 0), (None, wo, wo, wo), (q, None, None, None)),
        tree((0, 1, 0, 2, 0), (-1, 0, 0, 1, 2), (None, wo, wo, w, w), (q, q, q, None, None)),
        tree((0, 0, 2, 0, 2), (-1, 0, 0, 1, 2), (None, d, d, d, d), (None,) * 5),
    ]
    for draft in drafts:
        for verifier in _lossless(package, draft):
            for root, rest, u, emit in product((p, one, flat), (p, one), COINS, COINS):
                rows = [root, *[rest] * (len(draft) - 1)]
                v = package("verify").get(verifier)(draft, rows, [u] * len(draft), [emit] * (draft.depth + 1))
                steps = [float(rows[draft.parents[i]][draft.tokens[i]]) for i in v.path[1:]]
                sound = all(draft.parents[i] == above for above, i in pairwise(v.path))
                possible = min([*steps, float(rows[v.path[-1]][v.token])]) > 0
                _demand(v.path[0] == 0 and sound and possible, f"a path of tokens that p allows from '{verifier}'", v)


def every_coin_in_its_place(package: Package) -> None:
    """A node is tested with its own accept coin, and the token is drawn with the emit coin of its place."""
    w, p, q = "with_replacement", _law(0.25, 0.25, 0.25, 0.25), _law(0.1, 0.2, 0.3, 0.4)
    fork = package("tree").DraftTree((0, 1, 2, 3), (-1, 0, 1, 1), (None, w, w, w), (q, q, None, None))
    for draft in (fork, _chain(package, (3, 2, 1), q), _chain(package, (), None)):
        for verifier in _lossless(package, draft):
            for u, step in product((0.05, 0.6), (0.01, 0.1)):
                accept, emit = ([u + step * i for i in range(4)], [0.9, 0.4, 0.15, 0.65])
                v = package("verify").get(verifier)(draft, [p] * len(draft), accept, emit[: draft.depth + 1])
                place = len(v.path) - 1
                _demand(v.token == pick(v.law, emit[place]), f"the token of emit coin {place} from '{verifier}'", v)
                own = [t.u == accept[t.node] for t in v.tests if verifier != "match"]
                _demand(all(own), f"every node tested with its own coin by '{verifier}'", v)


def placeholders_are_refused(package: Package) -> None:
    """A token below 0 is no token: as an index it would be one of the last in the vocabulary."""
    for tokens in ((-1,), (1, -1), (-2, 0)):
        for q in (None, _law(0.5, 0.25, 0.25)):
            try:
                draft = _chain(package, tokens, q)
            except package("errors").InputError:
                continue
            raise FidelityError(f"InputError for the tokens {tokens}", draft, "refuse what is no token")


def outside_of_its_premises(package: Package) -> None:
    """A rule says no to a draft that it was not made for, instead of a law that is nobody's."""
    tree, q, p = package("tree").DraftTree, _law(0.5, 0.25, 0.25), _law(0.25, 0.5, 0.25)
    shapes: dict[str, tuple[Any, tuple[str, ...]]] = {
        "a tree": (
            tree((0, 0, 1), (-1, 0, 0), (None, *["with_replacement"] * 2), (q, None, None)),
            ("chain", "block", "lenient"),
        ),
        "distinct siblings": (
            tree((0, 0, 1), (-1, 0, 0), (None, *["without_replacement"] * 2), (q, None, None)),
            ("chain", "block", "lenient", "kseq"),
        ),
        "a certain token": (_chain(package, (1,), None), ("kseq",)),
    }
    for what, (draft, names) in shapes.items():
        for name in names:
            try:
                v = package("verify").get(name)(draft, [p] * len(draft), [LAST] * len(draft), [0.5] * 3)
            except package("errors").NotApplicableError:
                continue
            raise FidelityError(f"NotApplicableError from '{name}' for {what}", v, "state the rule's premises")


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
        only_possible_tokens,
        every_coin_in_its_place,
        placeholders_are_refused,
        outside_of_its_premises,
        duplicates_are_tested_apart,
        ties_break_first,
    )
}
