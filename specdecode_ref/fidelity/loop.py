"""The exact law of a whole generation, out of the real decode loop.

A round is a program of coins, the drafter's, the verifier's and the emitted tokens'; `cube.explore` turns it into a
law. A generation is a tree of rounds, and rounds that left the same tokens in the same state are joined, so that a few
thousand rounds stand for all generations. The target's law beside it comes from the model's definition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdecode_ref.decode import Session
from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.cube import Lazy, Reader, Result, claims, explore, steps
from specdecode_ref.fidelity.edges import Edges, draw_edges, theory
from specdecode_ref.fidelity.laws import Law, Next, definition, sequences
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace import Round

PLAIN = SamplingRule()


class Letters:
    """A tokenizer in which every token is a letter."""

    def of(self, token: int) -> str:
        """a, b, c, ..."""
        return chr(ord("a") + token)

    def token_bytes(self, token: int) -> bytes:
        """See `decode.Tokenizer`."""
        return self.of(token).encode()

    text_bytes = token_bytes


@dataclass(frozen=True)
class Setup:
    """One generation, to be explored in full. Models, drafter, rule and session may be those of a private copy.

    stop: strings that end the text, in which token 0 is an "a", token 1 a "b", and so on.
    """

    model: Any
    drafter: Any
    prompt: tuple[int, ...] = (0, 1, 0, 1)
    rule: Any = PLAIN
    verifier: str = "auto"
    new_tokens: int = 3
    stop: tuple[str, ...] = ()
    session: Callable[..., Any] = Session

    @property
    def after(self) -> Next:
        """The target's law after some output, by definition."""
        rule = SamplingRule(**{name: getattr(self.rule, name) for name in SamplingRule.__slots__})
        return definition(self.model, self.prompt, rule)

    @property
    def target(self) -> Law:
        """The law of plain decoding, by definition."""
        letters = Letters()
        return sequences(
            self.after,
            self.new_tokens,
            self.rule.eos,
            stopped=lambda tokens: any(stop in "".join(map(letters.of, tokens)) for stop in self.stop),
        )


@dataclass(frozen=True)
class Exact:
    """The law of the output, the expected number of rounds, and of drafted tokens that were accepted."""

    law: Law
    rounds: float
    accepted: float


def generated(setup: Setup, *, search: bool = False) -> Exact:
    """Everything the real decode loop may generate, with its exact probability. `search` as in `cube.explore`."""
    session = setup.session(
        setup.model,
        [setup.prompt],
        _Watched(setup.drafter),
        verifier=setup.verifier,
        rule=setup.rule,
        max_new_tokens=setup.new_tokens,
        stop=setup.stop,
        tokenizer=Letters(),
        level=1,
    )
    session._start()  # once, not in every fork
    out: Law = {}
    rounds = accepted = 0.0
    waiting: dict[Any, tuple[float, Any]] = {((), ()): (1.0, session)}
    while waiting:
        state = min(waiting, key=lambda s: len(s[0]))
        weight, session = waiting.pop(state)
        rounds += weight
        for volume, end in _ends(setup, session, state[0], search):
            accepted += weight * volume * min(len(end.round.path) - 1, end.round.kept)
            if end.round.cut:
                out[end.output] = out.get(end.output, 0.0) + weight * volume
            else:
                before, _ = waiting.get(end.state, (0.0, None))
                waiting[end.state] = (before + weight * volume, end.session)
    return Exact(out, rounds, accepted)


@dataclass(frozen=True)
class _End:
    """How one round ended: its trace, the output up to now, the session, ready for the next round."""

    round: Round
    output: tuple[int, ...]
    session: Any

    @property
    def state(self) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The output, and what else the coming rounds may depend on: the committed part of every cache."""
        caches = (self.session._cache, *_caches(self.session._rows[0].proposer))
        held = [
            (cache.lengths[0], *(tuple(plane[0, : cache.lengths[0]].tolist()) for plane in cache.planes))
            for cache in caches
        ]
        return self.output, tuple(held)


def _ends(setup: Setup, session: Any, output: tuple[int, ...], search: bool) -> Iterator[tuple[float, _End]]:
    """The ways one round may go, with their volumes."""
    after, base = setup.after, len(setup.prompt) + len(output)
    (row,) = session._rows
    frozen = (*row.rounds, row.proposer.draft, row.proposer.verdict, setup.rule)
    drafters = (session._drafter, setup.drafter, *getattr(setup.drafter, "drafters", ()))
    fixed = (session._verifier, session._tokenizer, session._about, session._job, row.coins)
    shared = {id(x): x for x in (setup.model, *drafters, *frozen, *fixed)}  # what a fork need not copy
    planes = [plane for cache in (session._cache, *_caches(row.proposer)) for plane in cache.planes]
    rule = setup.verifier if setup.verifier != "auto" else "tree"
    known: dict[Any, Edges] = {}

    def program(read: Reader) -> Result:
        clones = {id(plane): plane.clone() for plane in planes}  # `deepcopy` takes ten times as long for a tensor
        fork = copy.deepcopy(session, shared | clones)
        (row,) = fork._rows
        row.coins = _Coins(read, base)
        step = next(iter(fork))
        seen = row.proposer
        if not step.round.cut:
            _check_spent(read, step.round.kept)
        end = _End(step.round, (*output, *step.round.tokens), fork)
        return Result((seen.draft.tokens, seen.verdict.path, seen.verdict.token), end)

    def breakpoints(key: tuple[str, int], end: _End) -> list[float]:
        seen = end.session._rows[0].proposer
        draft = seen.draft
        name = draft.tokens, draft.parents
        if key[0] == "draft":
            return draw_edges(draft, key[1], setup.model.vocab_size)
        if name not in known:
            known[name] = theory(rule)(draft, _Rows(lambda node: after((*output, *draft.history(node)))))
        return steps(known[name], *key, seen.verdict) + (claims(*key, seen.verdict) if search else [])

    for box in explore(program, breakpoints, search=search):
        yield box.volume, box.result.detail


def _check_spent(read: Reader, kept: int) -> None:
    """A later round will read the emit coins of later positions: they must be untouched, or rounds are not independent.

    Draft and accept coins belong to one round by their key.
    """
    early = [key[1] for key in read.order if key[0] == "emit" and key[1] >= kept]
    if early:
        raise FidelityError(
            f"no emit coin beyond the {kept} tokens of the round", f"coins {early}", "key the coin by round and node"
        )


class _Coins:
    """Stands in for `Coins` during the round that starts with `base` committed tokens."""

    seed = sequence = 0

    def __init__(self, read: Reader, base: int) -> None:
        self._read, self._base = read, base

    def draft(self, base: int, node: int) -> float:
        return self._coin("draft", base, node)

    def accept(self, base: int, nodes: int) -> Sequence[float]:
        return Lazy(nodes, lambda node: self._coin("accept", base, node))

    def emit(self, position: int) -> float:
        return self._coin("emit", self._base, position - self._base)

    def emits(self, base: int, count: int) -> Sequence[float]:
        return Lazy(count, lambda i: self.emit(base + i))

    def _coin(self, kind: str, base: int, index: int) -> float:
        if base != self._base or index < 0:
            raise FidelityError(
                f"a {kind} coin of the round at {self._base}", f"one of {base}", "key coins by the round's own base"
            )
        return self._read((kind, index))


class _Rows(Mapping[int, list[float]]):
    """Laws by node, made on first use."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._rows: dict[int, list[float]] = {}

    def __getitem__(self, node: int) -> list[float]:
        if node not in self._rows:
            self._rows[node] = self._make(node).tolist()
        return self._rows[node]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _Watched:
    """A drafter that remembers what it last proposed and heard."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.name, self.features = drafter.name, drafter.features
        self.vocab_size, self.settings = drafter.vocab_size, drafter.settings

    def start(self, prompt: Sequence[int], rule: Any, features: Sequence[Tensor] = ()) -> _WatchedProposer:
        return _WatchedProposer(self._drafter.start(prompt, rule, features))


class _WatchedProposer:
    def __init__(self, proposer: Any) -> None:
        self.proposer = proposer
        self.draft: Any = None
        self.verdict: Any = None

    def propose(self, context: Any, coins: Any) -> Any:
        self.draft = self.proposer.propose(context, coins)
        return self.draft

    def observe(self, verdict: Any, features: Sequence[Tensor]) -> None:
        self.verdict = verdict
        self.proposer.observe(verdict, features)


def _caches(proposer: Any) -> Iterator[Any]:
    """The caches of a proposer and of those it is composed of."""
    if hasattr(proposer, "cache"):
        yield proposer.cache
    for inner in (*getattr(proposer, "_proposers", ()), *filter(None, [getattr(proposer, "proposer", None)])):
        yield from _caches(inner)
