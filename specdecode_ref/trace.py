"""The trace `specdec-trace/1`: everything that happened in one generation, as a value.

A trace is what a decode returns, what the app draws and what the metrics count; it is never a log. On disk it is JSONL:
one header, one line a round, one footer. Reading needs no torch and no tokenizer, and treats a file as hostile until
every field and every invariant has been checked.

Levels: 0 counts only; 1 and token ids; 2 and p, q, u of every test; 3 and the largest entries of every law.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from specdecode_ref.errors import TraceError
from specdecode_ref.types import Cut, Draw, Kind, Test, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specdecode_ref.sampling import Laws
    from specdecode_ref.tree import DraftTree

SCHEMA = "specdec-trace/1"
MAX_BYTES, MAX_ROUNDS, MAX_NODES = 20_000_000, 4096, 1024
TOP_K = 8

_Line = TypeVar("_Line")

_STRICT = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class ModelInfo:
    """Which weights and which tokenizer: a name, a revision, a hash."""

    name: str
    revision: str = ""
    tokenizer: str = ""


@dataclass(frozen=True)
class Header:
    """What was asked for. `vocab` maps each token id in the file to the base64 of its bytes: no tokenizer needed."""

    __pydantic_config__ = _STRICT
    engine: dict[str, str]
    method: str
    verifier: str
    target: ModelInfo
    draft: ModelInfo | None
    sampling: dict[str, Any]
    seed: int
    sequence: int
    drafting: dict[str, Any]
    max_new_tokens: int
    prompt: tuple[int, ...]
    level: Literal[0, 1, 2, 3]
    vocab: dict[int, str] = field(default_factory=dict)
    batch_id: str | None = None
    type: Literal["header"] = "header"
    schema: Literal["specdec-trace/1"] = "specdec-trace/1"


@dataclass(frozen=True)
class Nodes:
    """The draft tree in columns. q and p are the probabilities of a node's token at its parent; None if not known."""

    __pydantic_config__ = _STRICT
    parent: tuple[int, ...]
    draw: tuple[Draw | None, ...]
    token: tuple[int, ...] = ()
    q: tuple[float | None, ...] = ()
    p: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Emitted:
    """The round's last token; `token` is None at level 0."""

    __pydantic_config__ = _STRICT
    token: int | None
    kind: Kind


@dataclass(frozen=True)
class CutRound:
    """The generation ended in this round, and only `kept` of its tokens belong to the output."""

    __pydantic_config__ = _STRICT
    reason: Cut
    kept: int


@dataclass(frozen=True)
class TopK:
    """The largest entries of the laws after one node, as (token, probability)."""

    __pydantic_config__ = _STRICT
    p: tuple[tuple[int, float], ...]
    q: tuple[tuple[int, float], ...] | None = None
    residual: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True)
class Round:
    """One draft, one target forward, one verdict. `committed` counts the tokens before it; `ns` are nanoseconds."""

    __pydantic_config__ = _STRICT
    index: int
    committed: int
    nodes: Nodes
    path: tuple[int, ...]
    emitted: Emitted
    tests: tuple[Test, ...] = ()
    cut: CutRound | None = None
    topk: dict[int, TopK] = field(default_factory=dict)
    ns: dict[Literal["draft", "verify", "sample"], int] = field(default_factory=dict)
    kv: dict[Literal["kept", "dropped"], int] = field(default_factory=dict)
    type: Literal["round"] = "round"

    @property
    def kept(self) -> int:
        """How many tokens this round added to the output."""
        return self.cut.kept if self.cut else len(self.path)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens this round added to the output (level 1 and up)."""
        assert self.emitted.token is not None
        return (*(self.nodes.token[i] for i in self.path[1:]), self.emitted.token)[: self.kept]


@dataclass(frozen=True)
class Footer:
    """How it ended, and its counts under vLLM's names, which a reader recomputes and compares."""

    __pydantic_config__ = _STRICT
    finish_reason: Literal["eos", "stop", "length", "cancelled"]
    metrics: dict[str, int | list[int]]
    ns: dict[Literal["prefill", "total"], int] = field(default_factory=dict)
    type: Literal["footer"] = "footer"


@dataclass(frozen=True)
class Trace:
    """One sequence's generation."""

    header: Header
    rounds: tuple[Round, ...]
    footer: Footer

    @property
    def tokens(self) -> tuple[int, ...]:
        """The output tokens (level 1 and up)."""
        return tuple(token for r in self.rounds for token in r.tokens)

    def with_vocab(self, token_bytes: Callable[[int], bytes]) -> Trace:
        """The same trace with the bytes of every token it mentions, so that drawing it needs no tokenizer."""
        ids = sorted(token_ids(self.header, self.rounds))
        vocab = {token: base64.b64encode(token_bytes(token)).decode() for token in ids}
        return replace(self, header=replace(self.header, vocab=vocab))

    def lines(self) -> Iterator[str]:
        """The JSONL lines, each ending in a newline."""
        parts: tuple[Header | Round | Footer, ...] = (self.header, *self.rounds, self.footer)
        for part in parts:
            yield json.dumps(asdict(part), separators=(",", ":"), allow_nan=False) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all."""
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(self.lines())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def counts(rounds: Iterable[Round]) -> dict[str, int | list[int]]:
    """The counts of `vllm.v1.spec_decode.metrics.SpecDecodingStats`, plus the emitted tokens.

    Tokens beyond an EOS, a stop string or the length limit count as drafted, never as accepted.
    """
    rounds = list(rounds)
    accepted = [min(len(r.path) - 1, r.kept) for r in rounds]
    return {
        "num_drafts": len(rounds),
        "num_draft_tokens": sum(len(r.nodes.parent) - 1 for r in rounds),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": [sum(a > i for a in accepted) for i in range(max(accepted, default=0))],
        "num_emitted_tokens": sum(r.kept for r in rounds),
    }


def record(
    level: int,
    index: int,
    committed: int,
    draft: DraftTree,
    p: Laws,
    verdict: Verdict,
    cut: CutRound | None,
    ns: dict[str, int],
) -> Round:
    """What a round leaves in the trace, at the level asked for."""
    kept = cut.kept if cut else len(verdict.path)
    edges = [(i, draft.parents[i], draft.tokens[i]) for i in range(1, len(draft))]
    q_column: list[float | None] = []
    p_column: list[float | None] = []
    if level >= 2:
        q_laws = [draft.q[parent] if draft.draws[i] != "deterministic" else None for i, parent, _ in edges]
        q_column = [
            None,
            *(1.0 if q is None else float(q[t]) for q, (_, _, t) in zip(q_laws, edges, strict=True)),
        ]
        seen = [level >= 3 or p.known(parent) for _, parent, _ in edges]
        p_column = [None, *(float(p[i][t]) if s else None for s, (_, i, t) in zip(seen, edges, strict=True))]
    return Round(
        index=index,
        committed=committed,
        nodes=Nodes(draft.parents, draft.draws, draft.tokens if level >= 1 else (), tuple(q_column), tuple(p_column)),
        tests=verdict.tests if level >= 2 else (),
        path=verdict.path,
        emitted=Emitted(verdict.token if level >= 1 else None, verdict.kind),
        cut=cut,
        topk=_topk(draft, p, verdict) if level >= 3 else {},
        ns=ns,  # type: ignore[arg-type]
        kv={"kept": min(kept, len(verdict.path)), "dropped": len(draft) - min(kept, len(verdict.path))},
    )


def _topk(draft: DraftTree, p: Laws, verdict: Verdict) -> dict[int, TopK]:
    def largest(law: Tensor) -> tuple[tuple[int, float], ...]:
        values, tokens = law.topk(min(TOP_K, len(law)))
        return tuple((t, v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True) if v > 0)

    out = {}
    for node in range(len(draft)):
        q = draft.q[node]
        rejected = node == verdict.path[-1] and verdict.kind == "residual"
        out[node] = TopK(
            largest(p[node]),
            None if q is None else largest(q),
            largest(verdict.law) if rejected else None,
        )
    return out


def token_ids(header: Header, rounds: Iterable[Round]) -> set[int]:
    """Every token id that a trace mentions."""
    ids = set(header.prompt)
    for r in rounds:
        ids.update(r.nodes.token)
        ids.update(() if r.emitted.token is None else (r.emitted.token,))
        for top in r.topk.values():
            ids.update(token for law in (top.p, top.q, top.residual) for token, _ in law or ())
    return ids


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
        if path.stat().st_size > MAX_BYTES:
            raise TraceError(f"at most {MAX_BYTES:,} bytes", f"{path.stat().st_size:,}", "record a lower level")
        return path.read_bytes()
    except OSError as error:
        raise TraceError("a trace file that can be read", f"{path}: {error.strerror}", "check the path") from error


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _parse(kind: type[_Line], line: bytes, number: int) -> _Line:
    from pydantic import ValidationError

    try:
        parsed: _Line = _adapter(kind).validate_json(line)  # type: ignore[arg-type]
        return parsed
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise TraceError(
            f"a valid {kind.__name__.lower()} on line {number}",
            f"{where}: {first['msg']}"[:200],
            "record the trace again, or check that it is whole",
        ) from error


def _check(trace: Trace) -> None:
    """The invariants of the format; the types are known to be right."""
    for token, encoded in trace.header.vocab.items():
        try:
            base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise TraceError("base64 in vocab", f"token {token}", "record the trace again") from None
    committed = len(trace.header.prompt)
    root = trace.header.prompt[-1] if trace.header.prompt else None
    for number, r in enumerate(trace.rounds):
        line = number + 2
        _ensure(r.index == number, line, f"index {number}", r.index)
        _ensure(r.committed == committed, line, f"committed {committed}", r.committed)
        _check_nodes(r, line, trace.header.level, root)
        _check_verdict(r, line, trace.header.level, trace.header.verifier)
        _ensure(r.cut is None or number == len(trace.rounds) - 1, line, "a cut in the last round only", r.cut)
        committed += r.kept
        root = r.tokens[-1] if trace.header.level >= 1 else None
    if trace.header.level >= 1:
        missing = (
            sorted(token_ids(trace.header, trace.rounds) - trace.header.vocab.keys()) if trace.header.vocab else []
        )
        _ensure(not missing, 1, "every token id of the file in vocab", f"none for {missing[:5]}")
    found = counts(trace.rounds)
    _ensure(trace.footer.metrics == found, len(trace.rounds) + 2, f"metrics {found}", trace.footer.metrics)


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
    _ensure(all(t >= 0 for t in n.token), line, "token ids of 0 or more", min(n.token, default=0))
    _ensure(root is None or n.token[0] == root, line, f"the last token {root} as the root", n.token[:1])
    for value in (*n.q, *n.p):
        _ensure(value is None or 0 <= value <= 1 + 1e-6, line, "probabilities from 0 to 1", value)


def _check_verdict(r: Round, line: int, level: int, verifier: str) -> None:
    size = len(r.nodes.parent)
    _ensure(bool(r.path) and r.path[0] == 0, line, "a path from the root", r.path)
    for above, node in zip(r.path, r.path[1:], strict=False):
        _ensure(0 < node < size and r.nodes.parent[node] == above, line, "a path along parents", r.path)
    _ensure(r.cut is None or 1 <= r.cut.kept <= len(r.path), line, f"1 to {len(r.path)} tokens kept", r.cut)
    _ensure((r.emitted.token is None) == (level < 1), line, "an emitted token from level 1 up", r.emitted.token)
    for test in r.tests:
        _ensure(0 < test.node < size, line, f"tests of nodes 1 to {size - 1}", test.node)
        _ensure(0 <= test.u < 1, line, "coins in [0, 1)", test.u)
        if verifier in ("chain", "tree"):
            accepted = test.u * test.q_eff < test.p_eff
            _ensure(test.accepted == accepted, line, f"accepted = {accepted} at node {test.node}", test.accepted)
    if level >= 2 and verifier in ("chain", "tree", "match"):
        passed = tuple(test.node for test in r.tests if test.accepted)
        _ensure(passed == r.path[1:], line, f"a path of the accepted nodes {passed}", r.path)


def _ensure(holds: bool, line: int, expected: str, came: object) -> None:
    if not holds:
        raise TraceError(f"{expected} (line {line})", str(came)[:200], "record the trace again")
