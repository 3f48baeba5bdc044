"""Which coin is which: every coin lies in [0, 1), and none serves two ends, in one round or in two.

`loop` gives each round coins of its own, so two rounds that share one are outside its sight. Here the package's own
`Coins` says by its keys which coins are the same, and the law is that of several rounds together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.cube import Reader, Result, claims, explore
from specdecode_ref.fidelity.edges import draw_edges
from specdecode_ref.fidelity.laws import Law, Next
from specdecode_ref.fidelity.private import Package

_WORD = 0xFFFFFFFF
_ROOT = 0
"""The token before the first round."""


def rounds(package: Package, verifier: str, branching: Sequence[int], p: Next, q: Next, length: int) -> Law:
    """The exact law of the first `length` tokens, over as many rounds as they take, with the coins that `Coins` keys.

    branching: children by depth, drawn with replacement; no draft is deeper than the tokens that are still wanted.
    """
    emit = package("coins").EMIT
    shared: set[tuple[int, ...]] = set()

    def program(read: Reader) -> Result:
        past: list[Any] = []
        first: dict[tuple[int, ...], int] = {}

        def noted(key: tuple[int, ...]) -> float:
            if first.setdefault(key, len(past)) != len(past):
                shared.add(key)
            return read(key)

        coins = _coins(package, noted)
        tokens: tuple[int, ...] = ()
        while len(tokens) < length:
            base, start = 1 + len(tokens), tokens
            draft = _drawn(package, q, start, branching[: length - len(start)], coins, base)
            rows = {i: p((*start, *draft.history(i))) for i in range(len(draft))}
            verdict = package("verify").get(verifier)(
                draft, rows, coins.accept(base, len(draft)), coins.emits(base, draft.depth + 1)
            )
            past.append((base, draft, verdict))
            tokens = (*tokens, *(draft.tokens[i] for i in verdict.path[1:]), verdict.token)
        seen = tuple((draft.tokens, verdict.path, verdict.token) for _, draft, verdict in past)
        return Result((tokens[:length], seen), past)

    thresholds = sorted({edge for context in _contexts(p, length - 1) for edge in _ratios(p(context), q(context))})

    def breakpoints(key: tuple[int, int, int], past: list[Any]) -> list[float]:
        """Those of the rounds just seen; of a coin that two rounds share, what any token may be tested with."""
        stream, base, node = key
        if stream == package("coins").DRAFT:
            return [e for at, draft, _ in past if at == base for e in draw_edges(draft, node, len(p(())))]
        if stream == emit:
            return [e for at, _, v in past for e in claims("emit", base - at, v)]
        claimed = [test.p_eff / test.q_eff for _, _, v in past for test in v.tests if test.q_eff > 0]
        return claimed + thresholds if key in shared else claimed

    while True:
        known = set(shared)
        out: Law = {}
        try:
            for box in explore(program, breakpoints, search=True):
                tokens = box.result.outcome[0]
                out[tokens] = out.get(tokens, 0.0) + box.volume
        except FidelityError:
            if shared == known:
                raise
        if shared == known:
            return out


def _drawn(package: Package, q: Next, start: tuple[int, ...], branching: Sequence[int], coins: Any, base: int) -> Any:
    """A draft below the last of `start`, node i drawn with the coin of node i."""
    tree, pick = package("tree").DraftTree, package("sampling").pick
    draft, level = tree.bare(start[-1] if start else _ROOT), [0]
    for width in branching:
        below: list[int] = []
        for node in level:
            law = q((*start, *draft.history(node)))
            grown = range(len(draft), len(draft) + width)
            draft = tree(
                (*draft.tokens, *(pick(law, coins.draft(base, i)) for i in grown)),
                (*draft.parents, *[node] * width),
                (*draft.draws, *["with_replacement"] * width),
                (*draft.q[:node], law, *draft.q[node + 1 :], *[None] * width),
            )
            below += grown
        level = below
    return draft


def _contexts(after: Next, longest: int, start: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    yield start
    if len(start) < longest:
        for token in range(len(after(start))):
            yield from _contexts(after, longest, (*start, token))


def _ratios(p: Any, q: Any) -> list[float]:
    return [min(1.0, float(a / b)) for a, b in zip(p, q, strict=True) if b > 0]


def _coins(package: Package, read: Callable[[tuple[int, ...]], float]) -> Any:
    """`Coins` whose uniforms are read by their key, at the moment they are used."""

    def uniform(self: Any, stream: Any, base: Any, node: Any) -> Any:
        names = np.broadcast(stream, base, node)
        coins = [_Unread(read, tuple(map(int, name))) for name in names]
        return np.array(coins, dtype=object) if names.shape else coins[0]

    return type("Keyed", (package("coins").Coins,), {"_uniform": uniform})(seed=0)


class _Unread:
    """A coin that is read once something is made of it; lists of coins may hold some that are never looked at."""

    def __init__(self, read: Callable[[tuple[int, ...]], float], key: tuple[int, ...]) -> None:
        self._read, self._key = read, key

    def __float__(self) -> float:
        return self._read(self._key)

    def __mul__(self, other: float) -> float:
        return float(self) * other

    __rmul__ = __mul__

    def __lt__(self, other: float) -> bool:
        return float(self) < other

    def __le__(self, other: float) -> bool:
        return float(self) <= other

    def __gt__(self, other: float) -> bool:
        return float(self) > other

    def __ge__(self, other: float) -> bool:
        return float(self) >= other


def check_range(package: Package) -> None:
    """Raises FidelityError unless a coin is 53 bits of two words, over 2^53: 0 for zeros, and below 1 for ones."""
    module = package("coins")

    def coin(first: int, second: int) -> float:
        node, base, sequence, stream = _before(module, (first, second, 0, 0), (7, 9))
        coins = module.Coins(7 + (9 << 32), sequence)
        alone = coins._uniform(stream, base, node)
        (one_of_many,) = coins._uniform(stream, base, np.array([node], dtype=np.uint64)).tolist()
        if not 0 <= alone < 1 or alone * 2**53 % 1 or one_of_many != alone:
            words = f"{first:#x} and {second:#x}"
            raise FidelityError(
                "a coin in [0, 1) of 53 bits", f"{(alone, one_of_many)} from {words}", "look at rounding"
            )
        return float(alone)

    ends = coin(0, 0), coin(_WORD, 0), coin(0, _WORD), coin(_WORD, _WORD)
    if ends[0] != 0 or ends[3] != 1 - 2.0**-53 or ends[1] + ends[2] != ends[3] or 0 in ends[1:]:
        raise FidelityError("every bit of a coin from a bit of its own", ends, "take other bits of the second word")


def _before(module: Any, words: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The counter that gives these words: Philox, run backwards."""
    c0, c1, c2, c3 = words
    for number in reversed(range(10)):
        k0, k1 = ((k + number * step) & _WORD for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        a, b = c3 * pow(0xD2511F53, -1, 1 << 32) & _WORD, c1 * pow(0xCD9E8D57, -1, 1 << 32) & _WORD
        c0, c1, c2, c3 = a, c0 ^ (b * 0xCD9E8D57 >> 32) ^ k0, b, c2 ^ (a * 0xD2511F53 >> 32) ^ k1
    if module.philox((c0, c1, c2, c3), key) != words:
        raise FidelityError("Philox-4x32-10", "other words", "compare with its published test vectors")
    return c0, c1, c2, c3


def check_distinct(package: Package) -> None:
    """Raises FidelityError where two keys give one coin, or one key two coins, or the coins are not uniform."""
    make = package("coins").Coins
    owner: dict[float, Any] = {}
    for seed, sequence in ((0, 0), (1, 0), (0, 1), (1 << 32, 0), (1, 1)):
        coins = make(seed, sequence)
        for base in range(1, 24):
            named: dict[Any, float] = {("draft", base, i): coins.draft(base, i) for i in range(8)}
            named["emit", base] = coins.emit(base)
            named |= {("accept", base, i): u for i, u in enumerate(coins.accept(base, 8))}
            for name, u in named.items():
                if owner.setdefault(u, (seed, sequence, name)) != (seed, sequence, name):
                    raise FidelityError("a coin of its own for every key", (owner[u], name), "look at the counter")
            again = [*coins.accept(base, 3), *coins.emits(base, 1)]
            if again != [*(named["accept", base, i] for i in range(3)), named["emit", base]]:
                raise FidelityError("the same coin for the same key", again, "make coins functions of their keys")
    ordered = np.sort(list(owner))
    n = len(ordered)
    gap = float(np.abs(ordered - (np.arange(n) + 0.5) / n).max())
    bound = math.sqrt(math.log(2 / 1e-9) / 2 / n) + 0.5 / n  # Dvoretzky, Kiefer and Wolfowitz, with Massart's constant
    if gap > bound:
        raise FidelityError(f"uniform coins, to {bound:.3g} in {n}", f"a distance of {gap:.3g}", "look at the words")
