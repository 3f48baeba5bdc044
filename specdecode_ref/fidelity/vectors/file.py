"""The two files of test vectors: the cases, and the answers of somebody's program. docs/test-vectors.md describes both.

They are hostile until read: Pydantic checks the types, and what they say is checked after that. Every fault is an
InputError of one line.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.private import Package
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw, Kind

FORMAT = "specdec-vectors/1"
FLOAT32 = 1e-4
"""A case of at least this margin must be answered alike in float32; below it, rounding may decide."""

NOT_A_LAW, NOT_APPLICABLE = "not_a_law", "not_applicable"
"""The refusals: a row that is no distribution, and a draft outside the verifier's premises."""

MAX_BYTES, MAX_VALUES = 4_000_000, 400_000
_STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
_Row = tuple[float | None, ...]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Nodes:
    """The draft tree without its laws; see `DraftTree`."""

    __pydantic_config__ = _STRICT
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draws: tuple[Draw | None, ...]


@dataclass(frozen=True)
class Decision:
    """One test on the way to the verdict: `node` is accepted where its coin times `q` is below `p`."""

    __pydantic_config__ = _STRICT
    node: int
    p: float
    q: float
    accepted: bool


@dataclass(frozen=True)
class Verdict:
    """What a case is due: the path, root first, and the token after it."""

    __pydantic_config__ = _STRICT
    path: tuple[int, ...]
    token: int
    kind: Kind
    tests: tuple[Decision, ...]


@dataclass(frozen=True)
class Refusal:
    """What a case is due that has no verdict: `NOT_A_LAW` or `NOT_APPLICABLE`."""

    __pydantic_config__ = _STRICT
    error: str


@dataclass(frozen=True)
class Case:
    """One vector. `q` and `p` hold a row [V] a node, None where there is none; a None inside a row is not a number.

    margin: how far every coin that mattered is from where the verdict changes; None for a refusal.
    parameters: what a lossy rule is set to.
    """

    __pydantic_config__ = _STRICT
    id: str
    verifier: str
    lossless: bool
    parameters: dict[str, int | float]
    why: str
    tree: Nodes
    q: tuple[_Row | None, ...]
    p: tuple[_Row, ...]
    accept_coins: tuple[float, ...]
    emit_coins: tuple[float, ...]
    expected: Verdict | Refusal
    margin: float | None

    def draft(self, package: Package | None = None, dtype: torch.dtype = torch.float64) -> Any:
        """The `DraftTree`, of `package` if one is given."""
        laws = tuple(None if row is None else law(row, dtype) for row in self.q)
        made: type[DraftTree] = (package or Package())("tree").DraftTree
        return made(self.tree.tokens, self.tree.parents, self.tree.draws, laws)

    def boundary(self) -> bool:
        """True where float32 may decide otherwise."""
        return self.margin is not None and self.margin < FLOAT32


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = _STRICT
    format: str
    seed: int
    float32_margin: float
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Answer:
    """What a program says to a case: `path` (or, for chains, how many it `accepted`) and `token`, or an `error`."""

    __pydantic_config__ = _STRICT
    id: str
    path: tuple[int, ...] | None = None
    accepted: int | None = None
    token: int | None = None
    error: str | None = None

    def agrees(self, case: Case) -> bool:
        """True when the answer is what the case is due."""
        due = case.expected
        if isinstance(due, Refusal):
            return self.error == due.error
        path = self.path if self.accepted is None else tuple(range(self.accepted + 1))
        return self.error is None and (path, self.token) == (due.path, due.token)

    def told(self) -> dict[str, Any]:
        """The fields that were given."""
        return {k: v for k, v in vars(self).items() if v is not None}


def read_cases(source: str | os.PathLike[str] | bytes) -> tuple[Case, ...]:
    """The vectors of a file, or of its bytes. Raises InputError where it is not a whole `specdec-vectors/1`."""
    file = _parse(_File, _read(source, "test vectors"), "test vectors")
    ensure(file.format == FORMAT, f"vectors of the format {FORMAT}", repr(file.format))
    ensure(bool(file.cases), "at least one case", "none")
    _no_duplicates(file.cases)
    for case in file.cases:
        nodes, draft = len(case.tree.tokens), case.draft()
        sizes = (len(case.p), len(case.accept_coins), len(case.emit_coins))
        ensure(sizes == (nodes, nodes, draft.depth + 1), f"as many p rows and coins as nodes in {case.id!r}", sizes)
        widths = {len(row) for row in (*case.p, *case.q) if row is not None}
        ensure(len(widths) == 1 and max(case.tree.tokens) < max(widths), f"rows of one size in {case.id!r}", widths)
    return file.cases


def read_answers(source: str | os.PathLike[str] | bytes) -> tuple[Answer, ...]:
    """A program's answers: a JSON array, or one object a line. Raises InputError with what is wrong."""
    data = _read(source, "answers").strip()
    ensure(bool(data), "at least one answer", "an empty file")
    if data.startswith(b"["):
        answers = _parse(tuple[Answer, ...], data, "answers")
    else:
        lines = enumerate(data.splitlines(), 1)
        answers = tuple(_parse(Answer, line, f"an answer on line {n}") for n, line in lines if line.strip())
    ensure(bool(answers), "at least one answer", "none")
    _no_duplicates(answers)
    for a in answers:
        given = [name for name in ("path", "accepted", "error") if getattr(a, name) is not None]
        whole = len(given) == 1 and (a.token is None) == (a.error is not None)
        ensure(whole, f"path and token, accepted and token, or error, for {a.id!r}", a.told())
        ensure(a.accepted is None or 0 <= a.accepted < 10**6, f"accepted of 0 or more for {a.id!r}", a.accepted)
    return answers


def law(row: _Row, dtype: torch.dtype = torch.float64) -> Tensor:
    """A row as a tensor [V]; None is NaN."""
    return torch.tensor([float("nan") if x is None else x for x in row], dtype=dtype)


def _read(source: str | os.PathLike[str] | bytes, what: str) -> bytes:
    if isinstance(source, bytes):
        data = source
    else:
        path = Path(source)
        try:
            if path.exists() and not path.is_file():
                raise InputError(f"a file of {what}", f"{path}: not a regular file", "check the path")
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            if isinstance(error, InputError):
                raise
            why = getattr(error, "strerror", None) or error
            raise InputError(f"a file of {what} that can be read", f"{path}: {why}"[:200], "check the path") from None
    ensure(len(data) <= MAX_BYTES, f"{what} of at most {MAX_BYTES:,} bytes", "more")
    values = data.count(b",") + data.count(b":")
    ensure(values <= MAX_VALUES, f"{what} of at most {MAX_VALUES:,} values", f"{values:,}")
    return data


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _parse(kind: type[_T], data: bytes, what: str) -> _T:
    from pydantic import ValidationError

    try:
        parsed: _T = _adapter(kind).validate_json(data)  # type: ignore[arg-type]
        return parsed
    except ValidationError as error:
        where, why = "", f"{error.error_count():,} wrong values"
        if error.error_count() <= 1000:
            first = error.errors(include_url=False, include_input=False)[0]
            where, why = ".".join(map(str, first["loc"])), first["msg"]
        raise InputError(what, f"{where}: {why}".removeprefix(": ")[:200], "see docs/test-vectors.md") from None


def _no_duplicates(items: Iterable[Case] | Iterable[Answer]) -> None:
    id, count = Counter(item.id for item in items).most_common(1)[0]
    ensure(count < 2, "each id once", f"{id!r} {count} times")


def ensure(holds: bool, expected: str, came: object) -> None:
    """Raises InputError where it does not hold."""
    if not holds:
        raise InputError(expected, str(came)[:200], "see docs/test-vectors.md")
