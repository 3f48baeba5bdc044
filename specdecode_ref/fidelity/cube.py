"""The coin cube: the exact law of a program whose only randomness is uniform coins in [0, 1).

Such a program is piecewise constant in its coins. Walk the tree of the coins it reads, one coin a level: split the
unit interval at its breakpoints, evaluate the real program in every cell, weight by volume. No sampling, no error bar.

The breakpoints come from theory (`edges`), never from the code under test. Every cell is probed just inside both of its
ends, and every box once at random in all its coins; a probe that disagrees means that the program changes where theory
says it does not. Then `explore` raises, or, with `search`, finds the true breakpoints by bisection to the last bit, so
that a wrong program gets its exact law too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.edges import SEARCHED, Edges, cdf_edges, theory
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Verdict

INSIDE = 1e-14
"""How far inside a cell its ends are probed: a breakpoint that is off by more than this is seen."""


Key = Any
"""The name of a coin; anything hashable."""


class Reader:
    """Gives the program its coins by key and remembers the order in which they were first read."""

    def __init__(self, fixed: Mapping[Key, float], other: Callable[[Key], float]) -> None:
        self._fixed, self._other = fixed, other
        self.order: dict[Key, None] = {}

    def __call__(self, key: Key) -> float:
        self.order[key] = None
        return self._fixed[key] if key in self._fixed else self._other(key)


class Result(NamedTuple):
    """`outcome` must differ wherever the program decided differently; `detail` is for breakpoints and the caller."""

    outcome: Any
    detail: Any = None


Program = Callable[[Reader], Result]
Breakpoints = Callable[[Any, Any], Iterable[float]]
"""(coin, detail) -> where the program may change in this coin, given the coins read before it."""


class Box(NamedTuple):
    """A box of the cube in which the program is constant."""

    volume: float
    result: Result


def explore(program: Program, breakpoints: Breakpoints, *, search: bool = False, seed: int = 0) -> Iterator[Box]:
    """The boxes of the cube; their volumes sum to one.

    Coins are split in the order read, each given the ones before it. Raises FidelityError where the program changes
    away from its breakpoints; with `search` only where a change hid from every probe of its own coin.
    """
    walk = _Walk(program, random.Random(seed))
    stack: list[tuple[float, dict[Key, _Span], _Run]] = [(1.0, {}, walk.run({}))]
    while stack:
        volume, spans, seen = stack.pop()
        key = next((k for k in seen.reads if k not in spans), None)
        if key is None:
            walk.probe(spans, seen)
            yield Box(volume, seen.result)
            continue
        fixed = {k: span.u for k, span in spans.items()}
        for span, run in walk.cells(key, fixed, _edges(breakpoints(key, seen.result.detail)), search):
            stack.append((volume * (span.right - span.left), {**spans, key: span}, run))


class _Span(NamedTuple):
    """A cell of one coin, and a point inside."""

    left: float
    right: float
    u: float


@dataclass(frozen=True, slots=True)
class _Run:
    result: Result
    reads: tuple[Key, ...]


class _Walk:
    """Runs the program. A coin that is not fixed keeps one random value throughout."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self._program, self._rng = program, rng
        self._others: dict[Key, float] = {}

    def run(self, fixed: Mapping[Key, float]) -> _Run:
        reader = Reader(fixed, lambda key: self._others.setdefault(key, self._rng.random()))
        return _Run(self._program(reader), tuple(reader.order))

    def cells(
        self, key: Key, fixed: Mapping[Key, float], edges: Sequence[float], search: bool
    ) -> Iterator[tuple[_Span, _Run]]:
        """The cells along one coin and what happens there, the others held."""

        def at(u: float) -> _Run:
            return self.run({**fixed, key: u})

        for left, right in pairwise(edges):
            middle = (left + right) / 2
            inset = _inset(left, right)
            points = [(u, at(u)) for u in (left + inset, middle, right - inset)]
            run = points[1][1]
            strange = [(u, probe) for u, probe in points if probe.result.outcome != run.result.outcome]
            if not strange:
                yield _Span(left, right, middle), run
            elif search:
                yield from _bisected(at, left, right, points)
            else:
                raise FidelityError(
                    f"the outcome {run.result.outcome} for the coin {key} throughout [{left!r}, {right!r})",
                    f"{strange[0][1].result.outcome} at {strange[0][0]!r}",
                    "find out what else the program makes of this coin",
                )

    def probe(self, spans: Mapping[Key, _Span], seen: _Run) -> None:
        """One random point of the box: what every coin does must not depend on the values the later ones had."""
        insets = {k: _inset(s.left, s.right) for k, s in spans.items()}
        point = {k: self._rng.uniform(s.left + insets[k], s.right - insets[k]) for k, s in spans.items()}
        found = self.run(point)
        if found.result.outcome != seen.result.outcome:
            raise FidelityError(
                f"the outcome {seen.result.outcome} throughout the box {spans}",
                f"{found.result.outcome} at {point}",
                "find out what else the program makes of these coins",
            )


def _bisected(
    at: Callable[[float], _Run], left: float, right: float, points: list[tuple[float, _Run]]
) -> Iterator[tuple[_Span, _Run]]:
    """The steps between known points, each found to the last bit of the coin."""
    start, (inside, run) = left, points[0]
    last = points[0]
    todo = points[:0:-1]
    while todo:
        u, here = todo[-1]
        if here.result.outcome == last[1].result.outcome:
            last = todo.pop()
        elif u - last[0] > 2.0**-52:
            middle = (u + last[0]) / 2
            todo.append((middle, at(middle)))
        else:
            yield _Span(start, u, inside), run
            start, (inside, run) = u, (u, here)
            last = todo.pop()
    yield _Span(start, right, inside), run


def _edges(breakpoints: Iterable[float]) -> list[float]:
    """0, the breakpoints, 1: in order, and without those so close to another that rounding could swap them."""
    out = [0.0]
    for b in sorted(breakpoints):
        if out[-1] + INSIDE / 2 < b < 1 - INSIDE / 2:
            out.append(b)
    return [*out, 1.0]


def _inset(left: float, right: float) -> float:
    """How far inside this cell its probes are: less than `INSIDE` where the cell is thin."""
    return min(INSIDE, (right - left) / 4)


Verify = Callable[[DraftTree, Any, Sequence[float], Sequence[float]], Verdict]
"""What `verify.Verifier` is: (tree, p, accept_coins [N], emit_coins [depth + 1]) -> Verdict."""


class Lazy(Sequence[float]):
    """Coins that are read one by one, so that it is known which ones a verifier looked at."""

    def __init__(self, size: int, read: Callable[[int], float]) -> None:
        self._size, self._read = size, read

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._size))]
        if not -self._size <= i < self._size:
            raise IndexError(i)
        return self._read(i % self._size)


def verdicts(
    verify: Verify, draft: DraftTree, p: Mapping[int, Any], *, search: bool = False, seed: int = 0
) -> dict[tuple[tuple[int, ...], int], float]:
    """The exact law of a verifier's (accepted path, emitted token) on one draft, whoever wrote the verifier.

    p: the target's laws, float64 tensors [V] by node. A verifier with the name of a rule is held to that rule's edges.
    """
    name = getattr(verify, "name", None)
    search = search or name in SEARCHED
    edges = theory(name)(draft, {node: p[node].tolist() for node in range(len(draft))})

    def program(read: Reader) -> Result:
        verdict = _asked(verify, draft, p, read)
        return Result((verdict.path, verdict.token), verdict)

    def breakpoints(key: tuple[str, int], verdict: Verdict) -> list[float]:
        return steps(edges, *key, verdict) + (claims(*key, verdict) if search else [])

    law: dict[tuple[tuple[int, ...], int], float] = {}
    for box in explore(program, breakpoints, search=search, seed=seed):
        law[box.result.outcome] = law.get(box.result.outcome, 0.0) + box.volume
    return law


def _asked(verify: Verify, draft: DraftTree, p: Any, read: Reader) -> Verdict:
    """The verdict, the coins being read as ("accept", node) and ("emit", depth)."""
    accept = Lazy(len(draft), lambda node: read(("accept", node)))
    emit = Lazy(draft.depth + 1, lambda depth: read(("emit", depth)))
    return verify(draft, p, accept, emit)


def accepted(verify: Verify, draft: DraftTree, p: Any) -> float:
    """The expected number of accepted tokens on one draft, over all coins: exact, for a vocabulary of any size.

    p: the target's laws by node, as in `verdicts`. The edges are the verifier's own claims, probed and searched.
    """

    def program(read: Reader) -> Result:
        verdict = _asked(verify, draft, p, read)
        return Result(verdict.path, verdict)

    def breakpoints(key: tuple[str, int], verdict: Verdict) -> list[float]:
        kind, index = key
        if kind == "accept":
            return claims(kind, index, verdict)
        return _cells_of_children(draft, p, verdict.path[index]) if index < len(verdict.path) else []

    boxes = explore(program, breakpoints, search=True)
    return sum(box.volume * (len(box.result.outcome) - 1) for box in boxes)


def _cells_of_children(draft: DraftTree, p: Any, node: int) -> list[float]:
    """Where inverse-transform sampling from p enters and leaves the tokens that were drafted after `node`."""
    if not draft.children[node]:
        return []
    cdf = p[node].cumsum(0) / p[node].sum()
    tokens = [draft.tokens[child] for child in draft.children[node]]
    return [float(cdf[x]) for token in tokens for x in (token - 1, token) if x >= 0]


def steps(edges: Edges, kind: str, index: int, verdict: Verdict) -> list[float]:
    """Breakpoints of the coin ("accept", node) or ("emit", depth), given where the verdict came to rest."""
    if kind == "accept":
        return edges.accept(index)
    if index >= len(verdict.path):
        return []
    last = index == len(verdict.path) - 1
    return edges.emit(verdict.path[index], rejected=last and verdict.kind == "residual")


def claims(kind: str, index: int, verdict: Verdict) -> list[float]:
    """Where the verdict itself says that the coin mattered. A hint that saves a search, as every cell is probed."""
    if kind == "accept":
        return [test.p_eff / test.q_eff for test in verdict.tests if test.node == index and test.q_eff > 0]
    if index != len(verdict.path) - 1:
        return []
    return cdf_edges([Fraction(x) for x in verdict.law.tolist()])
