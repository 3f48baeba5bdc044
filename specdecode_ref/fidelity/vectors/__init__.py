"""Test vectors: (tree, p, q, coins) -> verdict, as JSON that a verifier in any language can be checked against.

`cases` are the shipped ones, `check` compares a program's answers with them, and `answer` is what this package itself
says. `file` reads the files, `making` makes the shipped one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.vectors.file import (
    NOT_A_LAW,
    NOT_APPLICABLE,
    Answer,
    Case,
    ensure,
    law,
    read_answers,
    read_cases,
)

FILE = Path(__file__).with_name("vectors-1.json")
"""The shipped vectors."""


@dataclass
class Tally:
    """How one verifier's cases were answered; `excused`: differently, where float32 may."""

    lossless: bool
    passed: int = 0
    excused: int = 0
    failed: int = 0
    missing: int = 0
    first: tuple[Case, Answer] | None = field(default=None, repr=False)
    """The first case that failed, and what came."""


@dataclass(frozen=True)
class Report:
    """The tallies by verifier, in the order of the file."""

    tallies: dict[str, Tally]

    @property
    def ok(self) -> bool:
        """True when nothing failed and nothing is missing."""
        return not any(t.failed or t.missing for t in self.tallies.values())


@cache
def cases() -> tuple[Case, ...]:
    """The shipped vectors."""
    return read_cases(FILE)


def check(
    answers: Iterable[Mapping[str, Any]] | Iterable[Answer],
    *,
    against: Sequence[Case] | None = None,
    verifiers: Sequence[str] = (),
    float32: bool = False,
) -> Report:
    """Compare answers with what is due.

    answers: objects as in an answers file, `{"id", "path", "token"}` or `{"id", "error"}`.
    verifiers: the rules that the program has; a case of theirs without an answer is missing. All, where none is named.
    float32: a different answer is excused where the margin is below `FLOAT32`.

    Raises InputError for answers that cannot be read and ids that nobody asked for.
    """
    due = {case.id: case for case in (cases() if against is None else against)}
    known = {case.verifier for case in due.values()}
    for name in verifiers:
        ensure(name in known, f"a verifier out of {', '.join(sorted(known))}", repr(name))
    given = {a.id: a for a in _answers(answers)}
    for id, answer in given.items():
        ensure(id in due, "ids of the vectors", repr(id))
        chain = answer.accepted is None or due[id].draft().is_chain
        ensure(chain, f"a path for {id!r}, whose draft is a tree", f"accepted {answer.accepted}")
    tallies: dict[str, Tally] = {}
    for case in due.values():
        if not verifiers or case.verifier in verifiers:
            _count(tallies.setdefault(case.verifier, Tally(case.lossless)), case, given.get(case.id), float32)
    return Report(tallies)


def answer(case: Case, package: Package | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What this package (or a private copy of it) says to a case, as an answers file would hold it."""
    package = package or Package()
    errors = package("errors")
    try:
        verdict = judged(case, package, dtype)
    except errors.NotApplicableError:
        return {"id": case.id, "error": NOT_APPLICABLE}
    except errors.NumericalError:
        return {"id": case.id, "error": NOT_A_LAW}
    return {"id": case.id, "path": list(verdict.path), "token": verdict.token}


def judged(case: Case, package: Package, dtype: torch.dtype = torch.float64) -> Any:
    """The verdict of the package's own verifier, set to the case's parameters."""
    verifier, draft = package("verify").get(case.verifier), case.draft(package, dtype)
    p = [law(row, dtype) for row in case.p]
    if case.parameters and verifier.objection(draft) is None:
        return verifier.rule(draft, p, case.accept_coins, case.emit_coins, **case.parameters)
    return verifier(draft, p, case.accept_coins, case.emit_coins)


def _count(tally: Tally, case: Case, answer: Answer | None, float32: bool) -> None:
    if answer is None:
        tally.missing += 1
    elif answer.agrees(case):
        tally.passed += 1
    elif float32 and case.boundary():
        tally.excused += 1
    else:
        tally.failed += 1
        tally.first = tally.first or (case, answer)


def _answers(given: Iterable[Mapping[str, Any]] | Iterable[Answer]) -> tuple[Answer, ...]:
    rows = [a.told() if isinstance(a, Answer) else a for a in given]
    try:
        return read_answers(json.dumps(rows).encode())
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("answers of plain JSON values", str(error)[:200], "give ids, lists and integers") from None
