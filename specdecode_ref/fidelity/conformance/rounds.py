"""Rung R2 of the conformance kit: whole generations over many rounds, the verifier called for real.

The coins are those of the decode loop, keyed by round and node (`Coins`), so that a verifier that reads the coins of a
later round, or keeps something between calls, changes the law of the sequences. `statistics.gate` and `betting.Bets`
judge the counts; both are valid at any number of samples.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specdecode_ref.coins import ACCEPT, DRAFT, EMIT, philox
from specdecode_ref.fidelity.betting import Bets
from specdecode_ref.fidelity.conformance.cases import CERTAIN, WITHOUT, Case
from specdecode_ref.fidelity.conformance.contract import Answer, Asker, Question
from specdecode_ref.fidelity.laws import Law, sequences
from specdecode_ref.fidelity.statistics import Gate, gate
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw

ROOT = 0
BATCH = 512


@dataclass(frozen=True)
class Sampled:
    """What many generations gave: the gate on their counts, the bets, and some of the calls."""

    gate: Gate
    bets: Bets
    counts: dict[tuple[int, ...], int]
    kept: list[tuple[Question, Answer]]

    @property
    def rejects(self) -> bool:
        """True where either gate does."""
        return self.gate.rejects or self.bets.rejects()


class _Coins:
    """The coins of `count` sequences at once: those of `Coins(seed, sequence)` for sequence 0, 1, ..."""

    def __init__(self, seed: int, count: int) -> None:
        self._sequences = np.arange(count, dtype=np.uint64)
        self._key = seed & 0xFFFFFFFF, seed >> 32
        self._held: dict[tuple[int, int, int], list[float]] = {}

    def __call__(self, stream: int, base: int, node: int, sequence: int) -> float:
        name = stream, base, node
        if name not in self._held:
            words = philox((node, base, self._sequences, stream), self._key)
            self._held[name] = (((words[0] >> 5) * 2.0**26 + (words[1] >> 6)) * 2.0**-53).tolist()
        return self._held[name][sequence]


def sampled(asker: Asker, case: Case, length: int, count: int, seed: int) -> Sampled:
    """`count` generations of `length` tokens. Many run side by side, as the rows of a batch would."""
    coins = _Coins(seed, count)
    law: Law = sequences(case.p, length)
    bets = Bets(law)
    counts: dict[tuple[int, ...], int] = {}
    rng = random.Random(seed)
    kept: list[tuple[Question, Answer]] = []
    for start in range(0, count, BATCH):
        rows: dict[int, tuple[int, ...]] = dict.fromkeys(range(start, min(start + BATCH, count)), ())
        batch: dict[tuple[int, ...], int] = {}
        while rows:
            questions = {i: _round(case, tokens, coins, i, length) for i, tokens in rows.items()}
            answers = asker.ask(list(questions.values()))
            for (i, question), answer in zip(questions.items(), answers, strict=True):
                rows[i] = (*rows[i], *answer.tokens(question.draft))[:length]
                if len(kept) < 40 or rng.random() < 0.02:
                    kept.append((question, answer))
                if len(rows[i]) == length:
                    batch[rows[i]] = batch.get(rows[i], 0) + 1
            rows = {i: tokens for i, tokens in rows.items() if len(tokens) < length}
        for tokens, n in batch.items():
            counts[tokens] = counts.get(tokens, 0) + n
        bets = bets.after(batch)
    return Sampled(gate(counts, law), bets, counts, kept)


def _round(case: Case, output: tuple[int, ...], coins: _Coins, sequence: int, length: int) -> Question:
    """The draft of a round, drawn as a drafter would, and the coins it is judged with."""
    base = 1 + len(output)
    held = case.__dict__.setdefault("_rows", {})

    def law(of: str, tokens: tuple[int, ...]) -> tuple[Tensor, list[float]]:
        name = of, tokens
        if name not in held:
            row = (case.p if of == "p" else case.q)(tokens)
            held[name] = row, row.tolist()
        found: tuple[Tensor, list[float]] = held[name]
        return found

    shape = case.shape
    tokens: list[int] = [ROOT]
    places: list[int | None] = [0]
    parents: list[int] = [-1]
    histories: list[tuple[int, ...]] = [()]
    draws: list[Draw | None] = [None]
    q: list[Tensor | None] = [None]
    for i in range(1, len(shape.parents)):
        node, draw = places[shape.parents[i]], shape.draws[i]
        mass: list[float] = []
        if node is not None:
            row, values = law("q", (*output, *histories[node]))
            earlier = [tokens[k] for k in range(1, len(tokens)) if parents[k] == node and draws[k] == draw]
            mass = _mass(values, draw, earlier)
        if node is None or not any(mass):
            places.append(None)
            continue
        token = _pick(mass, coins(DRAFT, base, len(tokens), sequence))
        if draw != CERTAIN:
            q[node] = row
        places.append(len(tokens))
        tokens.append(token)
        parents.append(node)
        histories.append((*histories[node], token))
        draws.append(draw)
        q.append(None)
    draft = DraftTree(tuple(tokens), tuple(parents), tuple(draws), tuple(q))
    p = torch.stack([law("p", (*output, *history))[0] for history in histories])
    accept = tuple(coins(ACCEPT, base, node, sequence) for node in range(len(tokens)))
    emit = tuple(coins(EMIT, base + i, 0, sequence) for i in range(draft.depth + 1))
    return Question(draft, p, accept, emit)


def _mass(q: list[float], draw: Draw | None, earlier: Sequence[int]) -> list[float]:
    """What a child may still be, as `Shape.drafts` has it."""
    if draw == CERTAIN:
        order = sorted(range(len(q)), key=lambda x: -q[x])
        return [float(x == order[len(earlier)]) for x in range(len(q))] if len(earlier) < len(q) else []
    return [0.0 if draw == WITHOUT and x in earlier else m for x, m in enumerate(q)]


def _pick(mass: Sequence[float], u: float) -> int:
    cdf = list(accumulate(mass))
    return bisect_right(cdf, u * cdf[-1])
