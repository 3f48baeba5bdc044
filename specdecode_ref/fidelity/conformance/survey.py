"""The law of a verifier that nobody here wrote, on one draft: `cube` for code that follows no known theory.

The coins are split in the order they are read. Along each, the verifier is asked on both sides of every breakpoint of
every theory, on both sides of what its own verdict claims, and on a grid that is elsewhere on every line; wherever two
neighbours differ the place is found by bisection. Later coins are held at several settings at once, so that what hides
behind one of them shows behind another. In the end every box is asked at its corners, which may split it once more, and
at a random point; one that disagrees there counts as unresolved.

A survey is a generator: it yields inputs and is sent answers, so that many surveys can share a batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from specdecode_ref.fidelity.boundaries import LAST
from specdecode_ref.fidelity.conformance.contract import Answer, Asker, Question
from specdecode_ref.fidelity.cube import claims
from specdecode_ref.fidelity.edges import Edges, Plain, Rejection, Traversal, onehot

Outcome = tuple[tuple[int, ...], int]
MOST_CELLS = 100
MOST_QUESTIONS = 20_000
CORRECTIONS = 12


class Span(NamedTuple):
    """A cell of one coin, and a point inside."""

    left: float
    right: float
    u: float


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the coin cube and what the verifier answers in it.

    checked: its corners were. cut: it comes from a box that had to be split once more.
    """

    volume: float
    spans: dict[int, Span]
    answer: Answer
    checked: bool = False
    cut: bool = False


@dataclass
class Found:
    """The law of (path, token). `width`: how far off the volumes may be; `unresolved`: the volume of bad boxes."""

    law: dict[Outcome, float] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    width: float = 0.0
    unresolved: float = 0.0


Survey = Generator[list[Question], list[Answer], Found]
Asking = Generator[list[Question], list[Answer], None]


THEORIES: dict[str, Callable[..., Edges]] = {
    "p": Plain,
    "rejection": Rejection,
    "traversal": Traversal,
    "one-hot": onehot,
}
PATIENCE = 40


class Sources:
    """Which breakpoints are worth asking at: those of theories that were right before, and the verdicts' own claims.

    The others are still found, by bisection; this saves questions only.
    """

    def __init__(self) -> None:
        self._right: Counter[str] = Counter()
        self._lines = 0
        self._shift = 0.5

    def next_shift(self) -> float:
        """Where in their cells the next grid has its points: multiples of the golden ratio fill the cells evenly."""
        self._shift = (self._shift + 0.6180339887498949) % 1.0
        return self._shift

    def useful(self, source: str) -> bool:
        """Whether to ask at what it says."""
        return self._lines < PATIENCE or 20 * self._right[source] > self._right.total()

    def learn(self, steps: Sequence[tuple[float, float]], hints: Mapping[str, Sequence[float]]) -> None:
        """Where a line really stepped, and what was said before."""
        self._lines += 1
        for a, b in steps:
            for source, edges in hints.items():
                self._right[source] += any(a <= edge <= b for edge in edges)


class _Point(NamedTuple):
    u: float
    outcomes: tuple[Outcome, ...]
    answer: Answer


class Surveyor:
    """Makes the survey of one draft. grid: cells a coin is cut into at least; settings: of the later coins."""

    def __init__(
        self,
        asker: Asker,
        start: Question,
        rng: random.Random,
        sources: Sources,
        grid: int = 6,
        settings: int = 3,
    ) -> None:
        draft = start.draft
        self._asker, self._draft, self._start, self._sources = asker, draft, start, sources
        self._rng, self._grid, self._step = rng, grid, asker.step
        self._size = len(draft) + draft.depth + 1
        makers = (lambda: rng.random(), lambda: 0.04 * rng.random(), lambda: 1 - 0.04 * rng.random())
        self._others = [[makers[s % 3]() for _ in range(self._size)] for s in range(settings)]
        self._rows = {n: start.p[n].tolist() for n in range(len(draft))}
        self._edges: dict[str, Edges] = {}
        self._hints: dict[tuple[str, int, bool, str], list[float]] = {}
        self._asked = 0

    def run(self) -> Survey:
        """The survey."""
        found = Found()
        (first,) = yield [self._at({}, 0)]
        boxes, again = [Box(1.0, {}, first)], 0
        while boxes:
            lines = []
            for box in boxes:
                key = next((k for k in box.answer.reads if k not in box.spans), None)
                if key is None:
                    found.boxes.append(box)
                else:
                    lines.append(_Line(self, box, key))
            boxes = yield from self._split(lines, found)
            if not boxes and again < CORRECTIONS:
                again += 1
                boxes = yield from self._split((yield from self._corners(found)), found)
        yield from self._probe(found)
        for box in found.boxes:
            found.law[box.answer.outcome] = found.law.get(box.answer.outcome, 0.0) + box.volume
        return found

    def _split(self, lines: list[_Line], found: Found) -> Generator[list[Question], list[Answer], list[Box]]:
        """The boxes that these lines cut theirs into."""
        if not lines:
            return []
        yield from self._first_look(lines)
        yield from self._closer_look(lines)
        boxes = []
        for line in lines:
            if line.too_fine or self._asked > MOST_QUESTIONS:
                found.unresolved += line.box.volume
                continue
            found.width += line.width * line.box.volume
            self._sources.learn([(a.u, b.u) for a, b in line.steps()], line.hints)
            boxes += line.boxes()
        return boxes

    def _corners(self, found: Found) -> Generator[list[Question], list[Answer], list[_Line]]:
        """Boxes whose ends differ from their middle along some coin, now that all others are fixed.

        A coin that is read before others was scanned at a few settings of those only. They leave `found`.
        """
        asked = []
        for box in found.boxes:
            if not box.checked:
                keys = list(box.spans)
                for key in (k for k in keys if len(keys) > 1 and (k != keys[-1] or box.cut)):
                    span = box.spans[key]
                    if len(keys) == self._size and span[:2] == (0.0, 1.0):
                        continue  # it reads all coins at once, and this one seems not to matter
                    inset = min(self._step, (span.right - span.left) / 4)
                    asked += [(box, key, span.left + inset), (box, key, span.right - inset)]
        fixed = [{**{k: span.u for k, span in box.spans.items()}, key: u} for box, key, u in asked]
        answers = yield [self._at(f, 0) for f in fixed]
        bad: dict[int, tuple[Box, int]] = {}
        for (box, key, _), answer in zip(asked, answers, strict=True):
            if answer.outcome != box.answer.outcome:
                bad.setdefault(id(box), (box, key))
        found.boxes = [replace(box, checked=True) for box in found.boxes if id(box) not in bad]
        return [_Line(self, box, key) for box, key in bad.values()]

    def _first_look(self, lines: list[_Line]) -> Asking:
        questions = [self._at({**line.fixed, line.key: u}, s) for line in lines for u in line.us for s in line.settings]
        answers = iter((yield questions))
        for line in lines:
            line.points = [line.point(u, [next(answers) for _ in line.settings]) for u in line.us]

    def _closer_look(self, lines: list[_Line]) -> Asking:
        while gaps := [(line, a, b) for line in lines for a, b in line.gaps(self._step)]:
            middles = [(line, (a.u + b.u) / 2) for line, a, b in gaps]
            answers = iter((yield [self._at({**w.fixed, w.key: u}, s) for w, u in middles for s in w.settings]))
            for line, u in middles:
                line.points.append(line.point(u, [next(answers) for _ in line.settings]))
            for line in lines:
                line.points.sort(key=lambda point: point.u)

    def _probe(self, found: Found) -> Asking:
        """A random point of each box: what every coin does must not depend on the values the later ones had."""
        points = []
        for box in found.boxes:
            inside = {}
            for k, span in box.spans.items():
                inset = min(self._step, (span.right - span.left) / 4)
                inside[k] = self._rng.uniform(span.left + inset, span.right - inset)
            points.append(inside)
        answers = yield [self._question([p.get(k, self._rng.random()) for k in range(self._size)]) for p in points]
        for box, answer in zip(found.boxes, answers, strict=True):
            if answer.outcome != box.answer.outcome:
                found.unresolved += box.volume

    def hints(self, key: int, answer: Answer) -> dict[str, list[float]]:
        """Where theories, or the verdict itself, say that this coin may matter."""
        place = self._asker.place(key, answer, self._draft)
        out = {"claims": self._claimed(place, answer)} if self._sources.useful("claims") else {}
        for name in THEORIES:
            if self._sources.useful(name):
                if (*place, name) not in self._hints:
                    self._hints[*place, name] = self._theory(name, *place)
                out[name] = self._hints[*place, name]
        return out

    def _theory(self, name: str, kind: str, node: int, last: bool) -> list[float]:
        if name not in self._edges:
            self._edges[name] = THEORIES[name](self._draft, self._rows)
        edges = self._edges[name]
        return edges.accept(node) if kind == "accept" else edges.emit(node, rejected=last and name != "p")

    def _claimed(self, place: tuple[str, int, bool], answer: Answer) -> list[float]:
        try:
            kind, node, last = place
            if kind == "emit" and not last:
                return []
            found = claims(kind, node if kind == "accept" else len(answer.path) - 1, answer.said)
            return [float(u) for u in found if 0 < u < 1][:MOST_CELLS]
        except Exception:  # a foreign verdict need not hold tests and a law
            return []

    def grid(self) -> list[float]:
        """Cells of equal width with a point in each, elsewhere on every line, and the ends."""
        shift = self._sources.next_shift()
        inner = [(i + shift) / self._grid for i in range(self._grid)]
        return [self._step, *inner, 1 - self._step]

    def sides(self, edges: Sequence[float]) -> list[float]:
        """Points just below and just above each edge."""
        return [u for edge in edges for u in (edge - self._step, edge + self._step) if 0 < u < 1]

    def settings(self, key: int, box: Box) -> range:
        """One setting is enough for a coin that nothing is read after."""
        return range(1 if box.answer.reads[-1] == key else len(self._others))

    def _at(self, fixed: dict[int, float], setting: int) -> Question:
        others = self._others[setting]
        return self._question([fixed.get(k, others[k]) for k in range(self._size)])

    def _question(self, coins: Sequence[float]) -> Question:
        self._asked += 1
        n = len(self._draft)
        below = [min(u, LAST) for u in coins]
        return Question(self._draft, self._start.p, tuple(below[:n]), tuple(below[n:]))


class _Line:
    """One coin of one box, and what is known along it."""

    def __init__(self, surveyor: Surveyor, box: Box, key: int) -> None:
        self.box, self.key = box, key
        self.left, self.right = box.spans[key][:2] if key in box.spans else (0.0, 1.0)
        self.fixed = {k: span.u for k, span in box.spans.items() if k != key}
        self.settings = range(1) if key in box.spans else surveyor.settings(key, box)
        self.hints = surveyor.hints(key, box.answer)
        sides = surveyor.sides([edge for edges in self.hints.values() for edge in edges])
        size = self.right - self.left
        grid = (self.left + size * u for u in surveyor.grid())
        self.us = sorted({*grid, *(u for u in sides if self.left < u < self.right)})
        self.points: list[_Point] = []
        self.too_fine = False

    def point(self, u: float, answers: list[Answer]) -> _Point:
        """What was learnt at u, one answer a setting."""
        return _Point(u, tuple(a.outcome for a in answers), answers[0])

    def steps(self) -> list[tuple[_Point, _Point]]:
        """Neighbours that differ."""
        return [(a, b) for a, b in pairwise(self.points) if a.outcomes != b.outcomes]

    def gaps(self, step: float) -> list[tuple[_Point, _Point]]:
        """Neighbours that differ and are not close yet."""
        steps = self.steps()
        self.too_fine = len(steps) > MOST_CELLS
        return [] if self.too_fine else [(a, b) for a, b in steps if b.u - a.u > 2.5 * step]

    @property
    def width(self) -> float:
        """How far off the cells' ends may be, together."""
        return sum(b.u - a.u for a, b in self.steps())

    def boxes(self) -> list[Box]:
        """The cells, each with a point near its middle."""
        cells = [[self.points[0]]]
        ends = [self.left]
        for a, b in pairwise(self.points):
            if a.outcomes != b.outcomes:
                cells.append([])
                ends.append((a.u + b.u) / 2)
            cells[-1].append(b)
        out = []
        for points, left, right in zip(cells, ends, [*ends[1:], self.right], strict=True):
            middle = min(points, key=lambda point: abs(point.u - (left + right) / 2))
            spans = {**self.box.spans, self.key: Span(left, right, middle.u)}
            share = (right - left) / (self.right - self.left)
            out.append(Box(self.box.volume * share, spans, middle.answer, cut=self.key in self.box.spans))
        return out


def surveyed(asker: Asker, surveys: Sequence[Survey]) -> list[Found]:
    """Run the surveys side by side, each question of each put in one batch."""
    found: dict[int, Found] = {}
    waiting = {i: next(survey) for i, survey in enumerate(surveys)}
    while waiting:
        answers = iter(asker.ask([question for questions in waiting.values() for question in questions]))
        still = {}
        for i, questions in waiting.items():
            try:
                still[i] = surveys[i].send([next(answers) for _ in questions])
            except StopIteration as stop:
                found[i] = stop.value
        waiting = still
    return [found[i] for i in range(len(surveys))]
