"""Reading a trace file: nothing but a valid trace is read, and what is wrong is named with its line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_ref.errors import TraceError
from specdecode_ref.trace_file import MAX_BYTES, MAX_NODES, MAX_ROUNDS, json_schema, read_trace
from tests.ref.test_trace import Letters, as_bytes, generation

# Each is done to the lines of a valid level-3 trace: 0 is the header, 1 the first round, -1 the footer.
Change = Callable[[list[dict[str, Any]]], Any]

WRONG: dict[str, tuple[int | None, Change]] = {
    "another schema": (1, lambda t: t[0].update(schema="specdec-trace/2")),
    "no level": (1, lambda t: t[0].pop("level")),
    "level 4": (1, lambda t: t[0].update(level=4)),
    "an unknown field": (1, lambda t: t[0].update(onload="alert(1)")),
    "an unknown field in a test": (2, lambda t: t[1]["tests"][0].update(x=1)),
    "no prompt": (1, lambda t: t[0].update(prompt=[])),
    "a prompt of strings": (1, lambda t: t[0].update(prompt=["1"])),
    "a prompt of booleans": (1, lambda t: t[0].update(prompt=[True])),
    "a prompt of fractions": (1, lambda t: t[0].update(prompt=[1.0])),
    "a negative token in the prompt": (1, lambda t: t[0]["prompt"].__setitem__(0, -1)),
    "NaN in the rule": (1, lambda t: t[0]["sampling"].update(temperature=float("nan"))),
    "infinity in the drafter's settings": (1, lambda t: t[0]["drafting"].update(deep=[[float("-inf")]])),
    "vocab that is not base64": (1, lambda t: t[0]["vocab"].update({"1": "<b>!"})),
    "vocab with strange base64": (1, lambda t: t[0]["vocab"].update({"1": "é"})),
    "vocab without a token": (1, lambda t: t[0]["vocab"].pop("1")),
    "vocab by name": (1, lambda t: t[0]["vocab"].update({"one": "YQ=="})),
    "another order of lines": (1, lambda t: t.insert(0, t.pop(1))),
    "a second header": (2, lambda t: t.insert(1, t[0])),
    "no footer": (None, lambda t: t.pop()),
    "an index twice": (3, lambda t: t.insert(1, t[1])),
    "a round left out": (2, lambda t: t.pop(1)),
    "an index of another round": (2, lambda t: t[1].update(index=1)),
    "an index that is a string": (2, lambda t: t[1].update(index="0")),
    "a wrong base": (2, lambda t: t[1].update(committed=6)),
    "a root that was not emitted": (3, lambda t: t[2]["nodes"]["token"].__setitem__(0, 1 - t[2]["nodes"]["token"][0])),
    "no nodes": (2, lambda t: t[1].update(nodes={"parent": [], "draw": [], "token": [], "q": [], "p": []})),
    "a root with a parent": (2, lambda t: t[1]["nodes"]["parent"].__setitem__(0, 0)),
    "a root above the root": (2, lambda t: t[1]["nodes"]["parent"].__setitem__(0, -2)),
    "two roots": (2, lambda t: t[1]["nodes"]["parent"].__setitem__(1, -1)),
    "a node that is its own parent": (2, lambda t: t[1]["nodes"]["parent"].__setitem__(2, 2)),
    "a parent beyond the tree": (2, lambda t: t[1]["nodes"]["parent"].__setitem__(1, 10**30)),
    "an unknown draw": (2, lambda t: t[1]["nodes"]["draw"].__setitem__(1, "guessed")),
    "no draw": (2, lambda t: t[1]["nodes"]["draw"].__setitem__(1, None)),
    "a draw for the root": (2, lambda t: t[1]["nodes"]["draw"].__setitem__(0, "deterministic")),
    "a column too short": (2, lambda t: t[1]["nodes"]["q"].pop()),
    "no tokens": (2, lambda t: t[1]["nodes"].update(token=[])),
    "HTML for a token": (2, lambda t: t[1]["nodes"]["token"].__setitem__(1, "<img src=x onerror=alert(1)>")),
    "a negative token": (1, lambda t: (t[0].update(vocab={}), t[1]["nodes"]["token"].__setitem__(-1, -1))),
    "NaN for q": (2, lambda t: t[1]["nodes"]["q"].__setitem__(1, float("nan"))),
    "q above one": (2, lambda t: t[1]["nodes"]["q"].__setitem__(1, 1.5)),
    "p below zero": (2, lambda t: t[1]["nodes"]["p"].__setitem__(1, -0.1)),
    "p that is a boolean": (2, lambda t: t[1]["nodes"]["p"].__setitem__(1, True)),
    "an empty path": (2, lambda t: t[1].update(path=[])),
    "a path not from the root": (2, lambda t: t[1].update(path=[1])),
    "a path beyond the tree": (2, lambda t: t[1].update(path=[0, 99])),
    "a path that jumps": (2, lambda t: t[1].update(path=[0, len(t[1]["nodes"]["parent"]) - 1])),
    "a path back to the root": (2, lambda t: t[1].update(path=[0, 0])),
    "a verdict against the coin": (2, lambda t: t[1]["tests"][0].update(accepted=not t[1]["tests"][0]["accepted"])),
    "a coin of one": (2, lambda t: t[1]["tests"][0].update(u=1.0)),
    "infinity for a p": (2, lambda t: t[1]["tests"][0].update(p_eff=float("inf"))),
    "a p of two": (2, lambda t: t[1]["tests"][0].update(p_eff=2.0)),
    "a test of the root": (2, lambda t: t[1]["tests"][0].update(node=0)),
    "a test of no node": (2, lambda t: t[1]["tests"][0].update(node=-1)),
    "a test twice": (2, lambda t: t[1]["tests"].insert(0, t[1]["tests"][0])),
    "a test left out": (2, lambda t: t[1].update(tests=[])),
    "a path that was not accepted": (2, lambda t: t[1].update(path=[0])),
    "an accepted node beside the path": (
        2,
        lambda t: next(x for x in t[1]["tests"] if not x["accepted"]).update(u=0.0, p_eff=0.5, accepted=True),
    ),
    "no emitted token": (2, lambda t: t[1]["emitted"].update(token=None)),
    "an unknown kind": (2, lambda t: t[1]["emitted"].update(kind="gift")),
    "a kind that the path denies": (2, lambda t: t[1]["emitted"].update(kind="target")),
    "a cut before the end": (2, lambda t: t[1].update(cut={"reason": "eos", "kept": 1})),
    "a cut that keeps nothing": (-1, lambda t: t[-2].update(cut={"reason": "length", "kept": 0})),
    "a cut that keeps too much": (-1, lambda t: t[-2]["cut"].update(kept=99)),
    "topk of no node": (2, lambda t: t[1]["topk"].update({"99": t[1]["topk"]["0"]})),
    "topk of a negative token": (1, lambda t: t[1]["topk"]["0"]["p"].append([-3, 0.1])),
    "topk above one": (2, lambda t: t[1]["topk"]["0"]["p"].append([1, 7])),
    "topk that is no pair": (2, lambda t: t[1]["topk"]["0"]["p"].append([1, 0.1, 2])),
    "negative time": (2, lambda t: t[1]["ns"].update(draft=-5)),
    "an unknown clock": (2, lambda t: t[1]["ns"].update(sleep=5)),
    "more kept than there was": (2, lambda t: t[1]["kv"].update(kept=99)),
    "another end than the last round's": (0, lambda t: t[-1].update(finish_reason="eos")),
    "counts that are not true": (0, lambda t: t[-1]["metrics"].update(num_accepted_tokens=99)),
    "counts left out": (0, lambda t: t[-1].update(metrics={})),
    "counts of another name": (0, lambda t: t[-1]["metrics"].update(speedup=9)),
    "negative time at the end": (0, lambda t: t[-1]["ns"].update(total=-1)),
}


@pytest.fixture(scope="module")
def valid() -> bytes:
    """A trace of sampled trees, whose first round accepts something and rejects something."""
    for seed in range(100):
        trace = generation("tree", 3, seed=seed, tokenizer=Letters()).trace
        first = trace.rounds[0]
        if len(first.path) == 2 and {t.accepted for t in first.tests} == {True, False} and len(trace.rounds) > 3:
            return as_bytes(trace)
    raise AssertionError("no such round in a hundred")


def lines_of(valid: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in valid.splitlines()]


def packed(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def refused(data: bytes) -> TraceError:
    """The error of a file that must be refused, quickly, in one line."""
    start = time.process_time()
    with pytest.raises(TraceError) as caught:
        read_trace(data)
    assert time.process_time() - start < 5
    message = str(caught.value)
    assert len(message) < 600 and "\n" not in message
    assert caught.value.expected and caught.value.do
    return caught.value


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_line(valid: bytes, name: str) -> None:
    line, change = WRONG[name]
    lines = lines_of(valid)
    assert read_trace(packed(lines))
    change(lines)
    error = str(refused(packed(lines)))
    if line is not None:
        number = line if line > 0 else len(lines) + line
        assert f"line {number}" in error, error


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_file_holds_no_more_than_its_level_says(valid: bytes, level: int) -> None:
    lines = lines_of(valid)
    lines[0]["level"] = level
    refused(packed(lines))
    for line in lines[1:-1]:
        nodes = line["nodes"]
        nodes.update(token=nodes["token"] if level else [], q=nodes["q"] if level > 1 else [])
        nodes.update(p=nodes["p"] if level > 1 else [])
        line["emitted"].update(token=line["emitted"]["token"] if level else None)
    error = str(refused(packed(lines)))
    assert "topk" in error
    for line in lines[1:-1]:
        line["topk"] = {}
    if level < 2:
        assert "tests" in str(refused(packed(lines)))
        for line in lines[1:-1]:
            line["tests"] = []
    assert read_trace(packed(lines)).header.level == level


def hostile(valid: bytes) -> dict[str, bytes]:
    first, *rest = valid.splitlines(keepends=True)
    body, last = b"".join(rest[:-1]), rest[-1]
    return {
        "empty": b"",
        "a newline": b"\n",
        "blank lines": b"\n" * 1000,
        "only a header": first,
        "half of it": valid[: len(valid) // 2],
        "without its last bracket": valid.rstrip()[:-1],
        "no line breaks": valid.replace(b"\n", b" "),
        "a page": b"<!doctype html>\n<script>alert(1)</script>\n",
        "JSON of another kind": b"[]\n[]\n[]\n",
        "null": b"null\nnull\n",
        "numbers": b"1\n2\n3\n",
        "strings": b'"a"\n"b"\n',
        "a byte order mark": b"\xef\xbb\xbf" + valid,
        "UTF-16": valid.decode().encode("utf-16"),
        "no UTF-8": first.replace(b'"ngram"', b'"\xff"').replace(b'"model"', b'"\xff"') + body + last,
        "half a surrogate": first.replace(b'"model"', b'"\\ud800"') + body + last,
        "binary": bytes(range(256)) * 64,
        "a pickle": b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.\n." * 3,
        "deep lists": b"[" * 1_000_000 + b"\n" + b"]" * 1_000_000,
        "deep objects": b'{"a":' * 1_000_000 + b"\n{}",
        "deep settings": first.replace(b'"sampling":{', b'"sampling":{"x":' + b"[" * 5000 + b"]" * 5000 + b",")
        + body
        + last,
        "a number of 5000 digits": first.replace(b'"seed":', b'"seed":' + b"9" * 5000) + body + last,
        "a number of 4000 digits": first.replace(b'"prompt":[', b'"prompt":[' + b"9" * 4000 + b",") + body + last,
        "1e999": first.replace(b'"temperature":0.8', b'"temperature":1e999') + body + last,
        "NaN": valid.replace(b'"u":0.', b'"u":NaN,"v":0.', 1),
        "Infinity": valid.replace(b'"p_eff":0.', b'"p_eff":Infinity,"v":0.', 1),
        "a comment": b"// a trace\n" + valid,
        "a trailing comma": valid.replace(b"}\n", b",}\n", 1),
        "single quotes": valid.replace(b'"', b"'"),
        "too large": valid.rstrip() + b" " * (MAX_BYTES + 1 - len(valid)) + b"\n",
        "many lines": b"{}\n" * (MAX_BYTES // 3),
        "empty lines to the limit": b"\n" * MAX_BYTES,
        "one long line": b'{"a":"' + b"x" * (MAX_BYTES - 100) + b'"}\n{}',
        "many fields": b'{"a":1' + b',"a":1' * 1_000_000 + b"}\n{}",
        "many numbers": b"[" + b"1," * 5_000_000 + b"1]\n{}",
    }


HOSTILE = tuple(hostile(b"{}\n{}\n{}\n"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_and_nothing_else(valid: bytes, name: str) -> None:
    data = hostile(valid)[name]
    assert data != valid, "the change found its place"
    refused(data)


def test_one_byte_changed_anywhere_is_a_trace_or_refused(valid: bytes) -> None:
    rng = random.Random(0)
    accepted = 0
    for _ in range(600):
        data = bytearray(valid)
        for _ in range(rng.choice([1, 1, 2, 5])):
            where = rng.randrange(len(data))
            act = rng.choice(["flip", "flip", "cut", "double", "swap"])
            if act == "flip":
                data[where] = rng.choice(b'0123456789-+.eE"[]{},:\n\\ntfu \x00\xff')
            elif act == "cut":
                del data[where : where + rng.choice([1, 5, 100])]
            elif act == "double":
                data[where:where] = data[where : where + rng.choice([1, 20, 500])]
            else:
                other = rng.randrange(len(data))
                data[where], data[other] = data[other], data[where]
        try:
            as_bytes(read_trace(bytes(data)))
            accepted += 1
        except TraceError:
            pass
    assert accepted < 300


def test_limits_of_rounds_and_nodes(valid: bytes) -> None:
    plain = lines_of(as_bytes(generation("plain", 0, max_new_tokens=2).trace))
    many = [plain[0], *({**plain[1], "index": i, "committed": 5 + i} for i in range(MAX_ROUNDS + 1)), plain[-1]]
    counted = {"num_emitted_tokens": MAX_ROUNDS}
    many[-1] = {**plain[-1], "finish_reason": "cancelled", "metrics": {**plain[-1]["metrics"], **counted}}
    assert f"at most {MAX_ROUNDS} rounds" in str(refused(packed(many)))
    del many[-2]
    assert len(read_trace(packed(many)).rounds) == MAX_ROUNDS
    for size in (MAX_NODES, MAX_NODES + 1):
        wide = [{**plain[0], "verifier": "match"}, dict(plain[1]), dict(plain[-1])]
        draws = [None, *["deterministic"] * (size - 1)]
        wide[1].update(nodes={"parent": [-1, *[0] * (size - 1)], "draw": draws, "token": [], "q": [], "p": []}, kv={})
        wide[2].update(
            finish_reason="cancelled",
            metrics={**plain[-1]["metrics"], "num_drafts": 1, "num_draft_tokens": size - 1, "num_emitted_tokens": 1},
        )
        if size == MAX_NODES:
            assert read_trace(packed(wide)).rounds[0].nodes.parent[-1] == 0
        else:
            assert f"1 to {MAX_NODES} nodes" in str(refused(packed(wide)))


def test_of_two_fields_of_one_name_the_last_counts(valid: bytes) -> None:
    """As in every browser, so that page and reader never disagree about a file."""
    assert read_trace(valid.replace(b'"seed":', b'"seed":77,"seed":', 1)).header.seed != 77


def test_a_file_that_cannot_be_read_is_an_error_of_the_trace(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, "a\0b", tmp_path / ("x" * 5000)):
        with pytest.raises(TraceError, match="that can be read"):
            read_trace(path)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(TraceError, match="20,000,000 bytes"):
        read_trace(large)


def test_windows_line_ends_are_read(valid: bytes) -> None:
    assert read_trace(valid.replace(b"\n", b"\r\n")) == read_trace(valid)


def test_the_schema_describes_every_line(valid: bytes) -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    names = {part["$ref"].split("/")[-1] for part in schema["anyOf"]}
    assert names == {"Header", "Round", "Footer"}
    for line in lines_of(valid):
        properties = schema["$defs"][line["type"].title()]["properties"]
        assert line.keys() <= properties.keys()
        assert set(schema["$defs"][line["type"].title()]["required"]) <= line.keys()


def test_reading_needs_no_torch(tmp_path: Path, valid: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(valid)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['transformers'] = None\n"
        "from specdecode_ref import read_trace\n"
        "from specdecode_ref.trace_file import json_schema\n"
        f"trace = read_trace({str(path)!r}); json_schema(); print(len(trace.rounds), trace.tokens[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    trace = read_trace(valid)
    assert done.stderr == "" and done.stdout.split() == [str(len(trace.rounds)), str(trace.tokens[0])]


@pytest.mark.parametrize("column", ["q", "p"])
def test_columns_that_contradict_the_tests(column: str) -> None:
    lines = lines_of(as_bytes(generation("tree", seed=3).trace))
    first = next(line for line in lines[1:-1] if line["tests"])
    first["nodes"][column][first["tests"][0]["node"]] *= 0.5
    assert "as in its test" in str(refused(packed(lines)))


@pytest.mark.parametrize("change", [{"seed": 10**400}, {"max_new_tokens": -5}, {"sequence": -1}])
def test_numbers_of_the_header_are_bounded(change: dict[str, int]) -> None:
    lines = lines_of(as_bytes(generation("tree", seed=3).trace))
    refused(packed([{**lines[0], **change}, *lines[1:]]))


def test_nanoseconds_are_bounded() -> None:
    lines = lines_of(as_bytes(generation("tree", seed=3).trace))
    lines[1]["ns"]["draft"] = 10**400
    assert "ns and kv" in str(refused(packed(lines)))
