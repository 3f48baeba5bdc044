"""The hand-made test vectors: the edges of the coins, of the laws and of the trees, where an implementation goes wrong.

Every number here is such that the float64 arithmetic of the rules is exact, so a coin may lie on its breakpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nextafter
from typing import Any

from specdecode_ref.fidelity.vectors.file import Nodes
from specdecode_ref.tree import depths
from specdecode_ref.types import Draw

LAST = 1 - 2.0**-53
"""The largest double below 1: the largest coin there is."""

REJECTION = ("chain", "tree", "block", "traversal", "kseq")
"""The rules that are one and the same rule where a single token was drafted."""

CHAINS_ONLY = ("chain", "block", "lenient")
_IID: Draw = "with_replacement"
_WITHOUT: Draw = "without_replacement"
_CERTAIN: Draw = "deterministic"
_HALF_BELOW, _HALF_ABOVE = nextafter(0.5, 0), nextafter(0.5, 1)
_TINY = 2.0**-20

_Row = tuple[float | None, ...]
_Edge = dict[str, Any]


def edges(name: str) -> Iterator[_Edge]:
    """The fields of every edge case that concerns the verifier of that name."""
    yield from _root_only() if name in ("match", "chain", "tree") else list(_root_only())[:2]
    if name in REJECTION:
        yield from _single()
    if name == "chain":
        yield from _finer()
    if name in ("chain", "tree", "block", "traversal"):
        yield from _no_residual()
    if name in ("chain", "tree", "block", "traversal", "onehot"):
        yield from _certain()
    if name in ("tree", "traversal", "onehot"):
        yield from _siblings(name)
    if name == "kseq":
        yield from _candidates()
    if name == "match":
        yield from _matching()
    if name in ("typical", "relaxed"):
        yield from _thresholds(name)
    if name == "lenient":
        yield from _leniently()
    yield from _refusals(name)


def _case(
    why: str,
    tokens: Sequence[int],
    p: Sequence[_Row],
    q: Sequence[_Row | None],
    accept: Sequence[float],
    emit: Sequence[float],
    draws: Sequence[Draw] | None = None,
    parents: Sequence[int] | None = None,
) -> _Edge:
    """A chain drawn from `q`, unless `draws` and `parents` say otherwise; the root is token 0."""
    n = len(tokens)
    above = (-1, *(range(n) if parents is None else parents))
    drawn: tuple[Draw | None, ...] = (None, *(draws or [_IID] * n))
    return {
        "why": why,
        "tree": Nodes((0, *tokens), above, drawn),
        "p": tuple(p),
        "q": (*q, *[None] * (n + 1 - len(q))),
        "accept_coins": (0.5, *accept),
        "emit_coins": tuple(emit)[: max(depths(above)) + 1],
    }


def _root_only() -> Iterator[_Edge]:
    p = (0.0, 0.25, 0.5, 0.25, 0.0)
    yield _case("root only, u = 0: the first token with mass, not token 0", (), [p], [], [], [0.0])
    yield _case("root only, the largest coin: the last token with mass, not the last token", (), [p], [], [], [LAST])
    yield _case("root only, u on an edge of the cdf: the token behind the edge", (), [p], [], [], [0.25])
    yield _case("root only, u just below an edge: the token before it", (), [p], [], [], [nextafter(0.25, 0)])
    yield _case("root only, u in the middle", (), [p], [], [], [0.875])


def _one(
    why: str,
    x: int,
    u: float,
    emit: float,
    p: _Row = (0.0, 0.25, 0.75),
    q: _Row = (0.5, 0.5, 0.0),
    after: _Row = (0.25, 0.25, 0.5),
) -> _Edge:
    """One token x drawn from q, tested with u."""
    return _case(why, (x,), [p, after], [q], [u], [emit, emit])


_FIRST, _SECOND, _THIRD = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def _single() -> Iterator[_Edge]:
    """What every rejection rule must get right on one token, and on two."""
    p: _Row = (0.0, 0.25, 0.75)
    yield _one("p(x) = 0 and u = 0: still rejected", 0, 0.0, 0.5)
    yield _one("u exactly at p / q: rejected", 1, 0.5, 0.5)
    yield _one("u one step below p / q: accepted", 1, _HALF_BELOW, 0.625)
    yield _one("u = 0 and p(x) > 0: accepted", 1, 0.0, 0.625)
    yield _one("q(x) = 0 < p(x), which nobody draws: accepted by the largest coin, no division by 0", 2, LAST, 0.125)
    yield _one("p == q and the largest coin: accepted", 1, LAST, 0.375, q=p)
    yield _one("p(x) > q(x): accepted by the largest coin", 2, LAST, 0.875, q=(0.25, 0.25, 0.5))
    yield _one("one-hot p == q, the largest coin: accepted", 1, LAST, 0.5, _SECOND, _SECOND, _THIRD)
    yield _one("one-hot p against one-hot q, u = 0: rejected", 1, 0.0, 0.5, _THIRD, _SECOND, _SECOND)
    residual: dict[str, _Row] = {"p": (0.25, 0.5, 0.25), "q": (0.75, 0.25, 0.0)}
    yield _one("a residual of two equal halves, emit coin on the edge", 0, 0.75, 0.5, **residual)
    yield _one("accept coin and emit coin are two coins", 0, 0.96875, 0.125, **residual)
    p, q = (0.5, 0.25, 0.25), (0.75, 0.25, 0.0)
    yield _one("the residual is not p: p's likeliest token is not in it", 0, 0.875, 0.25, p, q)
    yield _case(
        "the bonus comes from the last row, not from the one that tested the last token",
        (1, 2),
        [(0.25, 0.5, 0.25), _THIRD, _FIRST],
        [(0.25, 0.5, 0.25), _THIRD],
        [0.5, 0.5],
        [0.5, 0.5, 0.5],
    )
    yield _case(
        "the emit coin is the one of the depth that the token follows",
        (1, 1),
        [(0.25, 0.5, 0.25), (0.5, 0.0, 0.5), (0.5, 0.25, 0.25)],
        [(0.25, 0.5, 0.25), _SECOND],
        [0.25, 0.25],
        [0.125, 0.75, 0.125],
    )


def _finer() -> Iterator[_Edge]:
    """More of the same, for `chain`: the rule that everybody has."""
    p: _Row = (0.0, 0.25, 0.75)
    yield _one("p(x) = 0 and the largest coin: rejected", 0, LAST, 0.5)
    yield _one("u one step above p / q: rejected", 1, _HALF_ABOVE, 0.5)
    yield _one("q(x) = p(x) = 0, which nobody draws: rejected", 0, 0.0, 0.5, (0.0, 0.5, 0.5), (0.0, 0.25, 0.75))
    for u in (0.0, 0.5, 1 - 2.0**-24):
        yield _one(f"p == q and u = {u!r}: accepted", 1, u, 0.375, q=p)
    yield _one("the smallest p(x), u = 0: accepted", 0, 0.0, 0.75, (_TINY, 1 - _TINY, 0.0), (0.75, 0.25, 0.0))
    yield _one("the smallest p(x), u above p / q: rejected", 0, 0.125, 0.5, (_TINY, 1 - _TINY, 0.0), (0.5, 0.5, 0.0))
    yield _one("one-hot p == q, u = 0: accepted", 1, 0.0, 0.5, _SECOND, _SECOND, _THIRD)
    yield _one("one-hot p against one-hot q, the largest coin: rejected", 1, LAST, 0.5, _THIRD, _SECOND, _SECOND)
    yield _one("one-hot p, emit coin 0: its token, not token 0", 1, 0.75, 0.0, _THIRD, (0.5, 0.5, 0.0))
    yield _one("one-hot p, the largest emit coin", 1, 0.75, LAST, _FIRST, (0.5, 0.25, 0.25))
    for emit, words in ((0.0, "0"), (_HALF_BELOW, "just below the edge"), (LAST, "the largest")):
        why = f"a residual of two equal halves, emit coin {words}"
        yield _one(why, 0, 0.75, emit, (0.25, 0.5, 0.25), (0.75, 0.25, 0.0))


def _no_residual() -> Iterator[_Edge]:
    """p misses a sum of 1 by 2^-20, so that a rejection leaves nothing: the only rows that do not sum to 1."""
    p, q = (0.0, 0.5, 0.5 - _TINY), (0.0, 0.5, 0.5)
    for emit in (0.0, 0.75):
        why = f"a rejection that leaves no residual mass (p sums to 1 - 2^-20): from p, emit coin {emit}"
        yield _case(why, (2,), [p, p], [q], [LAST], [emit, emit])


def _certain() -> Iterator[_Edge]:
    p = (0.25, 0.0, 0.75)
    for u, why in ((0.0, "u = 0: accepted"), (nextafter(0.25, 0), "u below p(x)"), (0.25, "u at p(x): rejected")):
        yield _case(f"a deterministic token, {why}", (0,), [p, p], [], [u], [0.125, 0.125], [_CERTAIN])
    yield _case("a deterministic token of p(x) = 0, u = 0: rejected", (1,), [p, p], [], [0.0], [0.0, 0.0], [_CERTAIN])
    p = _THIRD
    yield _case("a deterministic token, one-hot p, the largest coin", (2,), [p, p], [], [LAST], [0.5, 0.5], [_CERTAIN])


def _siblings(name: str) -> Iterator[_Edge]:
    p, q, after = (0.25, 0.25, 0.5), (0.5, 0.25, 0.25), (0.0, 1.0, 0.0)

    def pair(why: str, tokens: Sequence[int], draw: Draw, accept: Sequence[float], emit: float, p: _Row = p) -> _Edge:
        n = len(tokens)
        rows, law = [p, *[after] * n], None if draw == _CERTAIN else q
        return _case(why, tokens, rows, [law], accept, [emit, emit], [draw] * n, [0] * n)

    yield pair("the same token twice, u = 0 for the second: it was rejected for good", (0, 0), _IID, (0.75, 0.0), 0.5)
    yield pair("the same deterministic token twice, u = 0 for the second", (1, 1), _CERTAIN, (0.75, 0.0), 0.5)
    yield pair("the same token twice, the first one accepted", (0, 0), _IID, (0.25, 0.0), 0.5)
    yield pair("the first sibling wins though the second would pass too", (2, 1), _IID, (0.25, 0.0), 0.5)
    if name == "onehot":
        return
    everything = "all of the support without replacement: the last one is certain, the largest coin accepts it"
    yield pair(everything, (0, 1, 2), _WITHOUT, (0.75, 0.9375, LAST), 0.5, (0.0, 0.0, 1.0))
    yield pair("the second sibling's law is q without the first, renormalised", (0, 2), _WITHOUT, (0.75, 0.9375), 0.5)
    yield pair("more siblings without replacement than support: refused", (0, 0), _WITHOUT, (0.75, 0.5), 0.5)
    yield pair(
        "after a rejection the target is the residual, not p", (0, 1), _IID, (0.75, 0.75), 0.5, (0.0, 0.125, 0.875)
    )


def _candidates() -> Iterator[_Edge]:
    q, after = (0.5, 0.5, 0.0), (0.0, 1.0, 0.0)
    for k in (1, 2, 3):
        why = f"{k} candidates of p(x) = 0, u = 0: all rejected"
        p = (0.0, 0.0, 1.0)
        yield _case(why, [0] * k, [p, *[after] * k], [q], [0.0] * k, [0.5, 0.5], None, [0] * k)
    p = (0.0, 0.5, 0.5)
    yield _case(
        "the second of three is accepted", (0, 1, 1), [p, *[after] * 3], [q], [0.0] * 3, [0.5] * 2, None, [0] * 3
    )


def _matching() -> Iterator[_Edge]:
    p, after = (0.25, 0.25, 0.5), (0.5, 0.0, 0.5)

    def pair(why: str, emit: Sequence[float], tokens: Sequence[int] = (1, 2)) -> _Edge:
        return _case(why, tokens, [p, after, after], [], [0.0, 0.0], emit, [_CERTAIN] * 2, [0, 0])

    yield pair("the emit coin on an edge: the token behind it, which is drafted", (0.25, 0.25))
    yield pair("the emit coin just below the edge: a token that is not drafted", (nextafter(0.25, 0), 0.25))
    yield pair("the second sibling is the target's token", (0.75, 0.75))
    yield pair("two equal siblings: the first one is followed", (0.375, 0.5), (1, 1))
    yield pair("the largest emit coin at both depths", (LAST, LAST))
    yield pair("emit coin 0 at both depths", (0.0, 0.0), (0, 2))


def _thresholds(name: str) -> Iterator[_Edge]:
    after = (0.25, 0.25, 0.5)
    p = (0.5, 0.5, 0.0)
    tied = "relaxed: of three equals none is above the third" if name == "relaxed" else "typical: a likely token passes"
    yield _case(tied, (1,), [(0.25, 0.25, 0.25, 0.25), (*after, 0.0)], [], [0.5], [0.625] * 2, [_CERTAIN])
    yield _case("p(x) = 0: rejected", (2,), [p, after], [], [0.0], [0.25] * 2, [_CERTAIN])
    one_hot = (0.0, 1.0, 0.0)
    yield _case("one-hot p, its token", (1,), [one_hot, after], [], [LAST], [0.75] * 2, [_CERTAIN])
    yield _case("one-hot p, another token", (0,), [one_hot, after], [], [0.0], [0.75] * 2, [_CERTAIN])
    why = "two paths of one length pass: the first one wins"
    yield _case(why, (0, 1), [p, after, p], [], [0.0, 0.0], [0.75] * 2, [_CERTAIN] * 2, [0, 0])


def _leniently() -> Iterator[_Edge]:
    """At a lenience of 1/2; p / q is 1/3."""
    p, q = (0.25, 0.5, 0.25), (0.75, 0.25, 0.0)
    yield _one("u above p / q, below twice that: accepted", 0, 0.5, 0.125, p, q)
    yield _one("u above twice p / q: rejected", 0, 0.75, 0.125, p, q)
    yield _one("the residual is that of q itself, without the lenience", 0, 0.75, 0.5625, p, q)
    yield _one("p(x) = 0 and u = 0: still rejected", 0, 0.0, 0.5)


def _refusals(name: str) -> Iterator[_Edge]:
    nan: _Row = (None, 0.5, 0.5)
    good: _Row = (0.5, 0.25, 0.25)
    q: _Row = (0.5, 0.5, 0.0)
    yield _case("p is not a number at the root", (0,), [nan, good], [q], [0.5], [0.5, 0.5])
    yield _case("p has no mass at the root", (0,), [(0.0, 0.0, 0.0), good], [q], [0.5], [0.5, 0.5])
    if name in (*REJECTION, "match", "onehot"):
        yield _case("the row of the bonus token is not a number", (0,), [_FIRST, nan], [_FIRST], [0.5], [0.5, 0.5])
    siblings = (0, 1), [good] * 3, [q], [0.5, 0.5], [0.5, 0.5]
    if name in CHAINS_ONLY:
        yield _case("a tree, and the rule judges chains", *siblings, parents=[0, 0])
    if name == "kseq":
        yield _case("siblings without replacement are not independent", *siblings, [_WITHOUT] * 2, [0, 0])
        yield _case("deterministic siblings were not drawn", *siblings, [_CERTAIN] * 2, [0, 0])
