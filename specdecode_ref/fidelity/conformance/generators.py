"""Rung R2 for batched functions that draw their own coins, from a generator or a seed: all that can be had is samples.

Large batches of drafts, drawn from q by a generator of ours, each completed by the target to one length, so that every
row owes the same law. Rows of several lengths share a batch. Beside the law of a row, pairs of rows and of calls must
be independent, and the same seed must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecode_ref.fidelity.betting import Bets
from specdecode_ref.fidelity.conformance import cases
from specdecode_ref.fidelity.conformance.adapters import Engine, drawn
from specdecode_ref.fidelity.conformance.cases import CERTAIN, WITH, Case, Shape
from specdecode_ref.fidelity.conformance.contract import Breach, Question
from specdecode_ref.fidelity.laws import Law, sequences
from specdecode_ref.fidelity.statistics import Gate, gate
from specdecode_ref.tree import DraftTree

ROWS = 4096
MOST_CELLS = 1000


@dataclass(frozen=True)
class Outcome:
    """A sample of one case. `what`: the law it was compared with."""

    case: Case
    what: str
    gate: Gate
    bets: Bets
    counts: dict[tuple[int, ...], int]

    @property
    def rejects(self) -> bool:
        """True where either gate does."""
        return self.gate.rejects or self.bets.rejects()


class Source:
    """Batches of one case, made with tensors throughout."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.k, self.v = case, case.shape.depth, case.vocab
        self._noise = torch.Generator().manual_seed(seed)
        self._certain = case.shape.draws[-1] == CERTAIN
        self._p = [self._table(case.p, depth) for depth in range(self.k + 1)]
        self._q = [self._table(case.q, depth) for depth in range(self.k)]

    def _table(self, after: Any, depth: int) -> Tensor:
        """The laws [V^depth, V] after every history of that length."""
        histories = [[]]  # type: ignore[var-annotated]
        for _ in range(depth):
            histories = [[*h, x] for h in histories for x in range(self.v)]
        return torch.stack([after(tuple(h)) for h in histories])

    def rand(self, *size: int) -> Tensor:
        """Uniforms in float64."""
        return torch.rand(*size, generator=self._noise, dtype=torch.float64)

    def draft(self, rows: int, mixed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids [B, K], q [B, K, V], p [B, K + 1, V], lengths [B]; what lies behind a row's length is noise."""
        lengths = torch.arange(rows) // 2 % (self.k + 1) if mixed else torch.full((rows,), self.k)  # neighbours alike
        context = torch.zeros(rows, dtype=torch.int64)
        ids, q = torch.full((rows, self.k), -1), self.rand(rows, self.k, self.v).softmax(-1)
        p = self.rand(rows, self.k + 1, self.v).softmax(-1)
        for depth in range(self.k + 1):
            here = lengths >= depth
            p[here, depth] = self._p[depth][context[here]]
            if depth < self.k:
                law = self._q[depth][context]
                token = law.argmax(-1) if self._certain else drawn(law, self.rand(rows))
                deeper = lengths > depth
                ids[deeper, depth], q[deeper, depth] = token[deeper], law[deeper]
                context = context * self.v + token
        return ids, q, p, lengths

    def completed(self, emitted: list[list[int]]) -> np.ndarray:
        """The tokens [B, K + 1] of every row, what is missing drawn from the target."""
        b, counts = len(emitted), torch.tensor([min(len(row), self.k + 1) for row in emitted])
        tokens = torch.tensor([[*row[: self.k + 1], *[0] * (self.k + 1 - len(row))] for row in emitted])
        context = torch.zeros(b, dtype=torch.int64)
        for depth in range(self.k + 1):
            missing = counts <= depth
            tokens[:, depth] = torch.where(missing, drawn(self._p[depth][context], self.rand(b)), tokens[:, depth])
            context = context * self.v + tokens[:, depth]
        return tokens.numpy()

    def question(self, ids: Tensor, q: Tensor, p: Tensor, n: int) -> Question:
        """One row as a question; its coins are the function's own."""
        laws = None if self._certain else tuple(q[:n])
        draft = DraftTree.chain(0, tuple(ids[:n].tolist()), laws)
        return Question(draft, p[: n + 1], (), ())


def plan(vocab: int, gamma: int, draws: tuple[Any, ...], seed: int) -> Iterator[Case]:
    """The cases, those with the most power first."""
    deep = max(1, min(gamma, int(np.log(MOST_CELLS) / np.log(vocab) + 1e-9) - 1))
    for number, values in enumerate(("smooth", "smooth", "short", "holed", "skewed-p", "certain-p")):
        for draw in draws:
            k, v = ((deep, vocab), (5, 2))[number] if number < 2 else (2, min(vocab, 3))
            yield cases.case(Shape.chain(*[draw] * k), values, v, seed * 1000 + 700 + number)
    for draw in draws:
        yield cases.case(Shape.chain(draw), "few", 31, seed * 1000 + 799)


def sampled(engine: Engine, case: Case, count: int, mixed: bool, seed: int) -> Iterator[Outcome]:
    """Samples of the law of a row, of pairs of neighbouring rows, and of pairs of calls."""
    source = Source(case, seed)
    law = sequences(case.p, source.k + 1)
    tables: list[np.ndarray] = []
    generator = torch.Generator().manual_seed(seed)
    laws = case.shape.draws[-1] == WITH
    while sum(len(t) for t in tables) < count:
        ids, q, p, lengths = source.draft(min(ROWS, count), mixed)
        engine.seed = (
            seed * 1_000_003 + len(tables) * 32_452_843
        ) % 2**31  # far apart, so that seed + row is no overlap
        made = engine.floats(ids, q if laws and engine.takes_laws else None, p) | {"generator": generator}
        made |= {"lengths": lengths, "bonus": drawn(p[range(len(ids)), lengths], source.rand(len(ids)))}

        def row(i: int, ids: Tensor = ids, q: Tensor = q, p: Tensor = p, lengths: Tensor = lengths) -> Question:
            return source.question(ids[i], q[i], p[i], int(lengths[i]))

        emitted = engine.invoke(made, row(0), row)
        for i, (tokens, draft, n) in enumerate(zip(emitted, ids.tolist(), lengths.tolist(), strict=True)):
            if len(tokens) > n + 1 or tokens[:-1] != draft[: len(tokens) - 1]:
                came = f"{tokens} came for the draft {draft[:n]}: all but the last must be accepted drafts"
                raise Breach("not a path", came, row(i), tokens)
        tables.append(source.completed(emitted))
    counts = _counted(np.concatenate(tables), case.vocab)
    yield Outcome(case, "of a row", gate(counts, law), Bets(law).after(counts), counts)
    yield from _pairs(case, tables)


def _pairs(case: Case, tables: list[np.ndarray]) -> Iterator[Outcome]:
    """First tokens of two rows that must not know of each other: their joint law is the product."""
    first = [table[:, 0] for table in tables]
    p = case.p(()).tolist()
    product: Law = {(x, y): a * b for x, a in enumerate(p) for y, b in enumerate(p)}
    half = len(first[0]) // 2
    pairs = {"of neighbouring rows": [(f[0::2][:half], f[1::2][:half]) for f in first]}
    pairs["of rows half a batch apart"] = [(f[:half], f[half : 2 * half]) for f in first]
    calls = list(zip(first[0::2], first[1::2], strict=False))
    if calls:
        pairs["of the same row in two calls"] = calls
        pairs["of the next row in the next call"] = [(a[1:], b[:-1]) for a, b in calls]
    for what, several in pairs.items():
        counts = _counted(np.concatenate([np.stack(pair, 1) for pair in several]), case.vocab)
        yield Outcome(case, what, gate(counts, product), Bets(product).after(counts), counts)


def _counted(table: np.ndarray, vocab: int) -> dict[tuple[int, ...], int]:
    """How often each row [n] of the table came."""
    width = table.shape[1]
    codes = table @ (vocab ** np.arange(width - 1, -1, -1))
    found = np.bincount(codes, minlength=vocab**width)
    cells = np.stack(np.unravel_index(np.flatnonzero(found), (vocab,) * width), 1)
    return {tuple(map(int, cell)): int(n) for cell, n in zip(cells, found[found > 0], strict=True)}


def check_seeded(engine: Engine, case: Case, seed: int) -> None:
    """Raises Breach unless the same seed gives the same tokens."""
    source = Source(case, seed)
    ids, q, p, lengths = source.draft(256, True)
    laws = case.shape.draws[-1] == WITH and engine.takes_laws
    bonus = drawn(p[range(len(ids)), lengths], source.rand(len(ids)))
    question = source.question(ids[-1], q[-1], p[-1], int(lengths[-1]))
    seen: list[list[list[int]]] = []
    for engine.seed in (seed, seed, seed + 1):
        torch.manual_seed(len(seen))
        made = engine.floats(ids, q if laws else None, p) | {"lengths": lengths, "bonus": bonus}
        seen.append(engine.invoke(made, question, lambda i: None))
    if seen[0] != seen[1]:
        raise Breach("hidden randomness", "the same seed gives different tokens", question)
    if seen[0] == seen[2]:
        raise Breach("ignores its seed", "another seed gives the same tokens", question)
