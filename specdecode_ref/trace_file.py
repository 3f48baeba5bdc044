"""Reading a trace file: hostile until every field and every invariant has been checked.

Pydantic checks the types against the records of `trace`; what follows checks that they tell one consistent story.
Needs neither torch nor a tokenizer. Every fault is a TraceError that names the line.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from specdecode_ref.errors import TraceError
from specdecode_ref.trace import Footer, Header, Round, Trace, counts, token_ids
from specdecode_ref.tree import children

MAX_BYTES, MAX_ROUNDS, MAX_NODES = 20_000_000, 4096, 1024
MAX_VALUES = 400_000  # in one line: a hostile one with millions of wrong values would take minutes to be explained

_AGAIN = "record the trace again"
_Line = TypeVar("_Line")


def read_trace(source: str | os.PathLike[str] | bytes) -> Trace:
    """Read and check a trace from a path, or from the bytes of an upload.

    Raises TraceError with the line that is wrong.
    """
    data = source if isinstance(source, bytes) else _read(Path(source))
    if len(data) > MAX_BYTES:
        raise TraceError(f"at most {MAX_BYTES:,} bytes", f"{len(data):,}", "record fewer rounds or a lower level")
    lines = data.splitlines()
    if len(lines) < 2:
        raise TraceError(
            "a header, rounds and a footer, one JSON object a line", f"{len(lines)} lines", "record it again"
        )
    if len(lines) - 2 > MAX_ROUNDS:
        raise TraceError(f"at most {MAX_ROUNDS} rounds", len(lines) - 2, "record fewer tokens")
    header = _parse(Header, lines[0], 1)
    rounds = tuple(_parse(Round, line, number) for number, line in enumerate(lines[1:-1], 2))
    trace = Trace(header, rounds, _parse(Footer, lines[-1], len(lines)))
    _check(trace)
    return trace


def json_schema() -> Mapping[str, Any]:
    """The JSON Schema of one line of a trace file."""
    from pydantic import TypeAdapter

    return TypeAdapter(Header | Round | Footer).json_schema()


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise TraceError("a trace file that can be read", f"{path}: not a regular file", "check the path")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise TraceError("a trace file that can be read", f"{path}: {why}"[:200], "check the path") from error


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _parse(kind: type[_Line], line: bytes, number: int) -> _Line:
    from pydantic import ValidationError

    values = line.count(b",") + line.count(b":")
    _ensure(values <= MAX_VALUES, number, f"at most {MAX_VALUES:,} values in a line", f"{values:,}")
    try:
        parsed: _Line = _adapter(kind).validate_json(line)  # type: ignore[arg-type]
        return parsed
    except ValidationError as error:
        where, why = "the line", f"{error.error_count():,} wrong values"
        if error.error_count() <= 1000:
            first = error.errors(include_url=False, include_input=False)[0]
            where, why = ".".join(map(str, first["loc"])) or where, first["msg"]
        raise TraceError(
            f"a valid {kind.__name__.lower()} on line {number}",
            f"{where}: {why}"[:200],
            "record the trace again, or check that it is whole",
        ) from error


def _check(trace: Trace) -> None:
    """The invariants of the format; the types are known to be right."""
    try:
        json.dumps([trace.header.sampling, trace.header.drafting], allow_nan=False)
    except ValueError:
        raise TraceError("finite numbers in sampling and drafting (line 1)", "NaN or Infinity", _AGAIN) from None
    for token, encoded in trace.header.vocab.items():
        try:
            base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise TraceError("base64 in vocab (line 1)", f"token {token}", _AGAIN) from None
    h = trace.header
    _ensure(0 <= h.seed < 2**64 and 0 <= h.sequence < 2**32, 1, "a seed below 2^64, a sequence below 2^32", "another")
    _ensure(1 <= h.max_new_tokens < 2**63, 1, "max_new_tokens from 1 to 2^63", "another")
    _ensure(bool(trace.header.prompt), 1, "a prompt of at least one token", "none")
    committed = len(trace.header.prompt)
    root = trace.header.prompt[-1] if trace.header.level >= 1 else None
    for number, r in enumerate(trace.rounds):
        line = number + 2
        _ensure(r.index == number, line, f"index {number}", r.index)
        _ensure(r.committed == committed, line, f"committed {committed}", r.committed)
        _check_nodes(r, line, trace.header.level, root)
        _check_verdict(r, line, trace.header.level, trace.header.verifier)
        _ensure(r.cut is None or number == len(trace.rounds) - 1, line, "a cut in the last round only", r.cut)
        committed += r.kept
        root = r.tokens[-1] if trace.header.level >= 1 else None
    ids = token_ids(trace.header, trace.rounds)
    _ensure(min(ids) >= 0 and max(ids) < 2**31, 1, "token ids from 0 to 2^31 in the whole file", "another")
    if trace.header.level >= 1 and trace.header.vocab:
        missing = sorted(ids - trace.header.vocab.keys())
        _ensure(not missing, 1, "every token id of the file in vocab", f"none for {missing[:5]}")
    last, footer = len(trace.rounds) + 2, trace.footer
    cut = trace.rounds[-1].cut if trace.rounds else None
    reason = cut.reason if cut else "cancelled"
    _ensure(
        footer.finish_reason == reason, last, f"the finish_reason '{reason}' of the last round", footer.finish_reason
    )
    found = counts(trace.rounds)
    _ensure(all(0 <= ns < 2**63 for ns in footer.ns.values()), last, "ns from 0 to 2^63", "another")
    _ensure(footer.metrics == found, last, f"metrics {found}", footer.metrics)


def _check_nodes(r: Round, line: int, level: int, root: int | None) -> None:
    n = r.nodes
    size = len(n.parent)
    _ensure(1 <= size <= MAX_NODES, line, f"1 to {MAX_NODES} nodes", size)
    _ensure(n.parent[0] == -1, line, "parent -1 for the root", n.parent[0])
    for node in range(1, size):
        _ensure(0 <= n.parent[node] < node, line, f"a parent of node {node} before it", n.parent[node])
    _ensure(
        len(n.draw) == size and n.draw[0] is None and None not in n.draw[1:],
        line,
        "a draw for each node",
        n.draw,
    )
    columns: Sequence[tuple[str, Sequence[Any], int]] = (("token", n.token, 1), ("q", n.q, 2), ("p", n.p, 2))
    for name, column, needs in columns:
        expected = size if level >= needs else 0
        _ensure(len(column) == expected, line, f"{expected} entries of {name}", len(column))
    _ensure(root is None or n.token[0] == root, line, f"the last token {root} as the root", n.token[:1])
    _ensure(not r.topk or level >= 3, line, "topk at level 3 only", f"level {level}")
    _ensure(all(0 <= node < size for node in r.topk), line, f"topk of nodes 0 to {size - 1}", list(r.topk)[:5])
    laws = [law for top in r.topk.values() for law in (top.p, top.q, top.residual) if law]
    decided = [value for test in r.tests for value in (test.p_eff, test.q_eff)]
    for value in (*n.q, *n.p, *decided, *(mass for law in laws for _, mass in law)):
        _ensure(value is None or 0 <= value <= 1 + 1e-6, line, "probabilities from 0 to 1", value)


def _check_verdict(r: Round, line: int, level: int, verifier: str) -> None:
    size = len(r.nodes.parent)
    _ensure(bool(r.path) and r.path[0] == 0, line, "a path from the root", r.path)
    for above, node in zip(r.path, r.path[1:], strict=False):
        _ensure(0 < node < size and r.nodes.parent[node] == above, line, "a path along parents", r.path)
    _ensure(r.cut is None or 1 <= r.cut.kept <= len(r.path), line, f"1 to {len(r.path)} tokens kept", r.cut)
    numbers = (*r.ns.values(), *r.kv.values())
    _ensure(all(0 <= number < 2**63 for number in numbers), line, "ns and kv from 0 to 2^63", "another")
    _ensure(not r.kv or sum(r.kv.values()) == size, line, f"kv of this round's {size} nodes", r.kv)
    _ensure((r.emitted.token is None) == (level < 1), line, "an emitted token from level 1 up", r.emitted.token)
    _ensure(not r.tests or level >= 2, line, "tests from level 2 up", f"level {level}")
    for test in r.tests:
        _ensure(0 < test.node < size, line, f"tests of nodes 1 to {size - 1}", test.node)
        _ensure(0 <= test.u < 1, line, "coins in [0, 1)", test.u)
        if verifier != "match":
            accepted = test.u * test.q_eff < test.p_eff
            _ensure(test.accepted == accepted, line, f"accepted = {accepted} at node {test.node}", test.accepted)
    below = children(r.nodes.parent)
    if verifier in ("chain", "tree", "match"):
        _check_columns(r, line, below)
    if verifier in (*_TOP_DOWN - {"match"}, *_BOTTOM_UP):
        kind = "residual" if below[r.path[-1]] else "bonus" if len(r.path) > 1 else "target"
        _ensure(r.emitted.kind == kind, line, f"an emitted token of the kind '{kind}'", r.emitted.kind)
    if level >= 2:
        _check_path(r, line, verifier, below)


LOSSY = frozenset({"typical", "relaxed", "lenient"})
"""Verifiers that do not keep the target's law, for readers that must not load torch to know."""

_TOP_DOWN = frozenset({"chain", "tree", "match", "kseq", "onehot", "lenient"})
"""Verifiers that test siblings in order and go on below the one that passed."""

_BOTTOM_UP = frozenset({"block", "traversal"})
"""Verifiers that test the end of a path first; the one test that passes, if any, is the last."""


def _check_columns(r: Round, line: int, below: Sequence[Sequence[int]]) -> None:
    """Where nothing was rejected before a test, its p_eff and q_eff are the columns of the nodes."""
    for test in r.tests:
        if test.node == below[r.nodes.parent[test.node]][0]:
            column = (r.nodes.q[test.node], r.nodes.p[test.node])
            _ensure(column == (test.q_eff, test.p_eff), line, f"q and p of node {test.node} as in its test", column)


def _check_path(r: Round, line: int, verifier: str, below: Sequence[Sequence[int]]) -> None:
    """The path is what the tests say."""
    tested = [test.node for test in r.tests]
    passed = tuple(test.node for test in r.tests if test.accepted)
    if verifier in _TOP_DOWN:
        taken = (*r.path[1:], len(r.nodes.parent))
        due = [child for node, last in zip(r.path, taken, strict=True) for child in below[node] if child <= last]
        _ensure(tested == due, line, f"tests of the siblings {due[:20]} in index order", tested[:20])
        _ensure(passed == r.path[1:], line, f"a path of the accepted nodes {passed}", r.path)
    elif verifier in _BOTTOM_UP:
        ends = (r.path[-1],) if len(r.path) > 1 else ()
        _ensure(passed == ends and tuple(tested[-1:])[: len(ends)] == ends, line, f"a path to {passed or 0}", r.path)
    else:
        _ensure(set(r.path[1:]) <= set(passed), line, f"a path within the accepted nodes {passed}", r.path)


def _ensure(holds: bool, line: int, expected: str, came: object) -> None:
    if not holds:
        raise TraceError(f"{expected} (line {line})", str(came)[:200], _AGAIN)
