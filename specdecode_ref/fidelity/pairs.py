"""Hard pairs of target and draft, mined: where a bug that random tables hide shows in some hundreds of samples.

On random tables many bugs move the law by less than a percent. A pair is searched for that makes the samples needed
small for every bug of a set at once: random restarts, then steps on one logit at a time, all from a seed. The mined
pairs are data, `pairs.json`, made again by `python -m specdecode_ref.fidelity mine --seed 0`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from specdecode_ref.errors import UnknownNameError
from specdecode_ref.fidelity import mutants
from specdecode_ref.fidelity.betting import model_drafts, played
from specdecode_ref.fidelity.laws import Next, definition, sequences
from specdecode_ref.fidelity.statistics import samples_needed
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.types import Draw

PROMPT = (0,)
_GRID, _LARGEST = 8, 5
"""Logits are multiples of 1/8 from -5 to 5: short to write down, and the same on every machine."""

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Pair:
    """p, q: logits [V, V] of target and draft after each last token.

    draws:  how the children at each depth are drawn. verifier: the rule whose bugs it shows.
    needed: samples (99.9% power, alpha 1e-9) that show each mutant in the law of `depth + 1` tokens after `PROMPT`.
    seed, restart: where the miner found it.
    """

    name: str
    verifier: str
    draws: tuple[tuple[Draw, ...], ...]
    p: Table
    q: Table
    needed: Mapping[str, float]
    seed: int
    restart: int

    def __hash__(self) -> int:
        return hash((self.name, self.p, self.q))

    @property
    def length(self) -> int:
        """Tokens of output in which all of the draft may be accepted, and one more emitted."""
        return len(self.draws) + 1

    @cached_property
    def models(self) -> tuple[TableModel, TableModel]:
        """Target and draft."""
        return _model(self.p), _model(self.q)

    @cached_property
    def target(self) -> Next:
        """The target's law after some output."""
        return definition(self.models[0], PROMPT, SamplingRule())

    @cached_property
    def draft(self) -> Next:
        """The draft's law after some output."""
        return definition(self.models[1], PROMPT, SamplingRule())


def _model(logits: Table) -> TableModel:
    """As a table model of order 1; the row for "before the beginning" is never read behind a prompt."""
    return TableModel(torch.tensor([*logits, [0.0] * len(logits)], dtype=torch.float64))


@dataclass(frozen=True)
class Hunt:
    """What is mined: one pair on which all these mutants of one verifier show."""

    verifier: str
    draws: tuple[tuple[Draw, ...], ...]
    mutants: tuple[str, ...]
    vocab: int = 3


Needed = Callable[[Pair, str], float]

_ONE: tuple[Draw, ...] = ("with_replacement",)
_IID: tuple[Draw, ...] = ("with_replacement",) * 2
_DISTINCT: tuple[Draw, ...] = ("without_replacement",) * 2
HUNTS: Mapping[str, Hunt] = {
    "single": Hunt("chain", (_ONE,), ("M01", "M02", "M03", "M05", "M16")),
    "chain": Hunt("chain", (_ONE, _ONE), ("M02", "M10", "M12")),
    "siblings": Hunt("tree", (_IID,), ("M02", "M25")),
    "distinct siblings": Hunt("tree", (_DISTINCT,), ("M02", "M24", "M25")),
    "coin reused": Hunt("chain", (_ONE,), ("M16",), vocab=4),
    "sibling law": Hunt("tree", (_DISTINCT,), ("M24",)),
    "first p": Hunt("tree", (_IID,), ("M25",)),
}


def mine(name: str, seed: int = 0, restarts: Sequence[int] = range(3), steps: int = 120) -> Pair:
    """The best pair for a hunt. Each restart depends on the seed and its own number alone."""
    if name not in HUNTS:
        raise UnknownNameError(f"a hunt out of {', '.join(HUNTS)}", repr(name), "choose one of them")
    hunt = HUNTS[name]
    with _counting(hunt.mutants) as needed:
        found = [_climb(name, hunt, seed, restart, steps, needed) for restart in restarts]
    return min(found, key=_worst)


def needed_on(pair: Pair) -> dict[str, float]:
    """The samples that each of the pair's mutants needs on it, computed afresh."""
    with _counting(tuple(pair.needed)) as needed:
        return {name: needed(pair, name) for name in pair.needed}


def _worst(pair: Pair) -> float:
    return max(pair.needed.values())


def _climb(name: str, hunt: Hunt, seed: int, restart: int, steps: int, needed: Needed) -> Pair:
    """From random logits, keep every step that does not raise the largest number of samples."""
    rng = random.Random(f"{seed} {restart} {name}")
    tables = _random(rng, hunt.vocab), _random(rng, hunt.vocab)
    best = Pair(name, hunt.verifier, hunt.draws, *tables, dict.fromkeys(hunt.mutants, math.inf), seed, restart)
    for step in range(steps):
        p, q = best.p, best.q
        if step and rng.random() < 0.5:
            p = _moved(rng, p)
        elif step:
            q = _moved(rng, q)
        pair = replace(best, p=p, q=q, needed={})
        found = {}
        # The hardest first: most steps are given up after one or two laws.
        for mutant in sorted(hunt.mutants, key=lambda m: -best.needed[m]):
            found[mutant] = needed(pair, mutant)
            if found[mutant] > _worst(best):
                break
        else:
            best = replace(pair, needed={mutant: found[mutant] for mutant in hunt.mutants})
    return best


def _random(rng: random.Random, vocab: int) -> Table:
    return tuple(tuple(_rounded(rng.uniform(-3, 3)) for _ in range(vocab)) for _ in range(vocab))


def _moved(rng: random.Random, table: Table) -> Table:
    """One or two logits changed, by much or by little."""
    rows = [list(row) for row in table]
    for _ in range(rng.choice((1, 1, 2))):
        row, column = rng.randrange(len(rows)), rng.randrange(len(rows))
        rows[row][column] = _rounded(rows[row][column] + rng.choice((0.25, 1.0, 4.0)) * rng.uniform(-1, 1))
    return tuple(map(tuple, rows))


def _rounded(logit: float) -> float:
    return max(-_LARGEST, min(_LARGEST, round(logit * _GRID) / _GRID))


@contextmanager
def _counting(names: Sequence[str]) -> Iterator[Needed]:
    """The samples that a mutant needs on a pair. Private copies are made once, not for every pair."""
    with ExitStack() as stack:
        copies = {name: stack.enter_context(mutants.get(name).plant()) for name in names}

        def needed(pair: Pair, name: str) -> float:
            verifier = copies[name]("verify").get(pair.verifier)
            propose = model_drafts(pair.draft, pair.draws, pair.length)
            wrong = played(verifier, pair.target, propose, pair.length, search=True).law
            return samples_needed(sequences(pair.target, pair.length), wrong)

        yield needed


_FILE = Path(__file__).with_name("pairs.json")


@cache
def stored() -> Mapping[str, Pair]:
    """The mined pairs by name."""
    return {pair.name: pair for pair in _read(json.loads(_FILE.read_text(encoding="utf-8")))}


def _read(entries: Sequence[dict[str, Any]]) -> Iterator[Pair]:
    for entry in entries:
        tables = {name: tuple(map(tuple, entry[name])) for name in ("p", "q", "draws")}
        yield Pair(**{**entry, **tables})


def store(found: Sequence[Pair]) -> None:
    """Write `pairs.json`, one pair a line."""
    lines = ",\n".join(json.dumps(asdict(pair)) for pair in found)
    _FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
