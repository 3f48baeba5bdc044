"""What an examination is to do, and what it knows so far; shared by its rungs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from specdecode_ref.fidelity.conformance.cases import Case
from specdecode_ref.fidelity.conformance.contract import Answer, Asker, Question
from specdecode_ref.fidelity.conformance.survey import Found, Sources
from specdecode_ref.fidelity.laws import Law
from specdecode_ref.tree import DraftTree

EXACT, ROUNDED = 1e-12, 5e-6
"""What a law may be off by: in float64, and in float32."""

MIXED = 0.05
"""With more of the cube unresolved than this, the coins are hashed or so, and no exact law can be had."""


@dataclass(frozen=True)
class Plan:
    """What is to be examined, and how far. `kind`: None finds out whether trees are judged.

    part, parts: an examination may be shared between processes, each of which takes every `parts`-th case.
    """

    kind: str | None
    vocab: int
    gamma: int
    seed: int
    samples: int | None
    draws: tuple[Any, ...]
    part: int = 0
    parts: int = 1

    def mine(self, number: int) -> bool:
        """Whether the case of that number is for this process."""
        return number % self.parts == self.part


@dataclass
class State:
    """What is known so far."""

    plan: Plan
    asker: Asker
    reads_all: bool = False
    judged: dict[str, None] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tv: float = 0.0
    width: float = 0.0
    unresolved: float = 0.0
    cases: int = 0
    tolerance: float = EXACT
    kept: list[tuple[Question, Answer]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    failed: list[tuple[Case, Law, list[tuple[float, DraftTree]], list[Found]]] = field(default_factory=list)
    sources: Sources = field(default_factory=Sources)
    largest: tuple[float, str] = (0.0, "")


def random_question(case: Case, draft: DraftTree, rng: random.Random) -> Question:
    """This draft with random coins."""
    accept = tuple(rng.random() for _ in range(len(draft)))
    return Question(draft, case.rows(draft), accept, tuple(rng.random() for _ in range(draft.depth + 1)))
