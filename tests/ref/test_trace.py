"""The trace: what was written is what is read, a level only adds, and the path is what the tests say."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specdecode_ref.decode import Generation, Session
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.errors import TraceError
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace import Trace, counts, token_ids
from specdecode_ref.trace_file import LOSSY, read_trace
from specdecode_ref.verify import VERIFIERS

V = 9
DRAFTERS: dict[str, Any] = {
    "plain": None,
    "lookup": NGram(gamma=4),
    "chain": ModelDrafter(TableModel.random(V, seed=1), (1, 1, 1)),
    "tree": ModelDrafter(TableModel.random(V, seed=1), (3, 2)),
    "iid tree": ModelDrafter(TableModel.random(V, seed=1), (2, 2, 1), "with_replacement"),
}


class Letters:
    """Token i is a letter; one of them is not text on its own, and one is what a page must never run."""

    def token_bytes(self, token: int) -> bytes:
        return [b"a", b"b", b"\xe2", b"\x82\xac", b"<script>", b"", b"\x00", b"f", b"g"][token]

    text_bytes = token_bytes


def generation(kind: str = "tree", level: int = 3, **settings: Any) -> Generation:
    settings = {"max_new_tokens": 14, "rule": SamplingRule(temperature=0.8, top_p=0.9), **settings}
    return Session(TableModel.random(V), [[1, 2, 3, 1, 2]], DRAFTERS[kind], level=level, **settings).run()[0]


def as_bytes(trace: Trace) -> bytes:
    return "".join(trace.lines()).encode()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("verifier", ["auto", "match"])
def test_what_was_written_is_what_is_read(tmp_path: Path, kind: str, verifier: str, level: int) -> None:
    for seed in range(4):
        result = generation(kind, level, seed=seed, verifier=verifier, tokenizer=Letters())
        path = tmp_path / "a.jsonl"
        result.trace.write(path)
        read = read_trace(path)
        assert read == result.trace == read_trace(str(path)) == read_trace(path.read_bytes())
        if level:
            assert read.tokens == result.tokens
            assert {int(t) for t in read.header.vocab} == token_ids(read.header, read.rounds)
            assert base64.b64decode(read.header.vocab[1]) == b"b"
        else:
            with pytest.raises(TraceError, match="level 1 or higher"):
                _ = read.tokens


JUDGED = [
    (kind, name)
    for name, verifier in VERIFIERS.items()
    for kind, shape, draw in (
        ("lookup", "chain", "deterministic"),
        ("chain", "chain", "with_replacement"),
        ("iid tree", "tree", "with_replacement"),
    )
    if shape in verifier.shapes and draw in verifier.draws
]


@pytest.mark.parametrize(("kind", "verifier"), JUDGED)
def test_every_verifiers_trace_is_read_and_its_path_is_what_the_tests_say(kind: str, verifier: str) -> None:
    refused = 0
    for seed in range(6):
        trace = generation(kind, 3, seed=seed, verifier=verifier).trace
        assert read_trace(as_bytes(trace)) == trace
        for number, r in enumerate(trace.rounds):
            if r.tests and verifier not in ("typical", "relaxed"):
                flipped = replace(r.tests[-1], accepted=not r.tests[-1].accepted)
                rounds = list(trace.rounds)
                rounds[number] = replace(r, tests=(*r.tests[:-1], flipped))
                with pytest.raises(TraceError, match=rf"line {number + 2}\)"):
                    read_trace(as_bytes(replace(trace, rounds=tuple(rounds))))
                refused += 1
    assert refused > 5 or verifier in ("typical", "relaxed")


def test_a_reader_knows_the_lossy_verifiers() -> None:
    assert {name for name, verifier in VERIFIERS.items() if not verifier.lossless} == LOSSY


@pytest.mark.parametrize("verifier", ["block", "traversal", "typical"])
def test_a_path_beyond_the_tests_is_refused(verifier: str) -> None:
    for seed in range(20):
        trace = generation("chain", 3, seed=seed, verifier=verifier).trace
        for number, r in enumerate(trace.rounds[:-1]):
            if len(r.path) == 1 and r.tests:
                rounds = list(trace.rounds)
                rounds[number] = replace(r, path=(0, 1), cut=None)
                with pytest.raises(TraceError):
                    read_trace(as_bytes(replace(trace, rounds=tuple(rounds))))
                return
    pytest.fail("no round was rejected")


def test_a_level_adds_and_never_changes() -> None:
    lines = [[json.loads(line) for line in generation("tree", level).trace.lines()] for level in range(4)]
    for lower, higher in pairwise(lines):
        for a, b in zip(lower[1:-1], higher[1:-1], strict=True):
            assert a["path"] == b["path"] and a["nodes"]["parent"] == b["nodes"]["parent"]
            for name in ("token", "q"):
                assert a["nodes"][name] in ([], b["nodes"][name])
            assert a["tests"] in ([], b["tests"]) and a["topk"] in ({}, b["topk"])
        assert lower[-1]["metrics"] == higher[-1]["metrics"]
    assert lines[0][1]["nodes"]["token"] == [] and lines[0][1]["emitted"]["token"] is None
    assert None in lines[2][1]["nodes"]["p"][1:] or None not in lines[3][1]["nodes"]["p"][1:]
    assert all(None not in line["nodes"]["p"][1:] for line in lines[3][1:-1])


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("before")
    broken = generation().trace
    broken.header.sampling["temperature"] = float("nan")
    with pytest.raises(ValueError):
        broken.write(path)
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    generation().trace.write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask, "as readable as any other file"


def test_a_trace_without_rounds_is_valid() -> None:
    session = Session(TableModel.random(V), [[1, 2]], max_new_tokens=3)
    trace = session.generation().trace
    assert read_trace(as_bytes(trace)) == trace and trace.footer.finish_reason == "cancelled" and trace.tokens == ()


def test_what_counts_count() -> None:
    trace = generation("tree", seed=3).trace
    found: Any = counts(trace.rounds)
    assert found["num_drafts"] == sum(len(r.nodes.parent) > 1 for r in trace.rounds)
    assert found["num_emitted_tokens"] == 14 == len(trace.tokens)
    assert sum(found["num_accepted_tokens_per_pos"]) == found["num_accepted_tokens"]
    assert found["num_accepted_tokens_per_pos"] == sorted(found["num_accepted_tokens_per_pos"], reverse=True)
