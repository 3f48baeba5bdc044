"""The trace `specdec-trace/1`: everything that happened in one generation, as a value.

A trace is what a decode returns, what the app draws and what the metrics count; it is never a log. On disk it is JSONL:
one header, one line a round, one footer; `trace_file` reads it back.

Levels: 0 counts only; 1 and token ids; 2 and p, q, u of every test; 3 and the largest entries of every law.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specdecode_ref.errors import TraceError
from specdecode_ref.types import Cut, Draw, Kind, Test, Verdict
from specdecode_ref.whole_file import whole_file

if TYPE_CHECKING:
    from torch import Tensor

    from specdecode_ref.sampling import Laws
    from specdecode_ref.tree import DraftTree

TOP_K = 8
"""Entries of a law that level 3 records."""

_STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True)
class ModelInfo:
    """Which weights and which tokenizer: a name, a revision, a hash; and the dtype they ran in."""

    name: str
    revision: str = ""
    tokenizer: str = ""
    dtype: str = ""


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
        if self.emitted.token is None:
            raise TraceError("a trace with token ids", "one of level 0", "record it at level 1 or higher")
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
        with whole_file(Path(path)) as part, part.open("x", encoding="utf-8") as file:
            file.writelines(self.lines())


def counts(rounds: Iterable[Round]) -> dict[str, int | list[int]]:
    """The counts of `vllm.v1.spec_decode.metrics.SpecDecodingStats`, plus the emitted tokens.

    Tokens beyond an EOS, a stop string or the length limit count as drafted, never as accepted.
    """
    rounds = list(rounds)
    accepted = [min(len(r.path) - 1, r.kept) for r in rounds]
    return {
        "num_drafts": sum(len(r.nodes.parent) > 1 for r in rounds),
        "num_draft_tokens": sum(len(r.nodes.parent) - 1 for r in rounds),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": [sum(a > i for a in accepted) for i in range(max(accepted, default=0))],
        "num_emitted_tokens": sum(r.kept for r in rounds),
    }


def columns(level: int, draft: DraftTree, p: Laws) -> Nodes:
    """A draft in columns; the probabilities at level 2 and up, as far as the target's laws are known or asked for."""
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
    return Nodes(draft.parents, draft.draws, draft.tokens, tuple(q_column), tuple(p_column))


def record(
    level: int,
    index: int,
    committed: int,
    nodes: Nodes,
    verdict: Verdict,
    cut: CutRound | None,
    ns: dict[str, int],
    topk: dict[int, TopK] | None = None,
) -> Round:
    """What a round leaves in the trace, at the level asked for."""
    kept = min(cut.kept if cut else len(verdict.path), len(verdict.path))
    return Round(
        index=index,
        committed=committed,
        nodes=replace(nodes, token=nodes.token if level >= 1 else ()),
        tests=verdict.tests if level >= 2 else (),
        path=verdict.path,
        emitted=Emitted(verdict.token if level >= 1 else None, verdict.kind),
        cut=cut,
        topk=topk or {},
        ns=ns,  # type: ignore[arg-type]
        kv={"kept": kept, "dropped": len(nodes.parent) - kept},
    )


def largest_of(draft: DraftTree, p: Laws, verdict: Verdict) -> dict[int, TopK]:
    """The largest entries of the laws after every node, and of the residual where the round ended with one."""

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
