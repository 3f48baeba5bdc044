"""`specdecode diff` as its users meet it: traces, token lists, runs made here, and files that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]

TEXT = "abcabcabc"


@pytest.fixture
def generate(specdecode: Run, tiny: str, tmp_path: Path) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Records a trace of the tiny model: (file, what --json printed)."""

    def record(name: str, *options: str) -> tuple[str, dict[str, Any]]:
        file = str(tmp_path / f"{name}.jsonl")
        base = ("generate", TEXT, "--model", tiny, "--max-new-tokens", "20", "--dtype", "float64", "--json")
        code, out, err = specdecode(*base, "--trace", file, *options)
        assert code == 0, err
        return file, json.loads(out)

    return record


def changed(file: str, change: Callable[[list[dict[str, Any]]], None]) -> str:
    """The trace with something changed, in a file of its own."""
    lines = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    change(lines)
    other = Path(file).with_suffix(".changed")
    other.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(other)


def last_token(lines: list[dict[str, Any]]) -> None:
    """Another last token."""
    last = lines[-2]["emitted"]
    last["token"] = lines[0]["prompt"][0] if last["token"] != lines[0]["prompt"][0] else lines[0]["prompt"][1]
    lines[0]["vocab"] = {}


def test_equal_traces(specdecode: Run, tiny: str, generate: Any) -> None:
    a, b = generate("plain", "--drafter", "none")[0], generate("fast", "--drafter", "ngram")[0]
    assert specdecode("diff", a, b, "--model", tiny, "--dtype", "float64")[:2] == (0, "no difference: in 20 tokens\n")


def test_a_changed_trace_is_a_defect(specdecode: Run, tiny: str, generate: Any) -> None:
    a = generate("plain", "--drafter", "none")[0]
    code, out, err = specdecode("diff", a, changed(a, last_token), "--model", tiny, "--dtype", "float64")
    assert (code, err) == (1, "")
    assert out.startswith("DEFECT: B's token") and "first difference: token 19 of the output" in out
    assert "computed in" in out and "1 row" in out and "noise" in out


def test_token_lists_in_any_form(specdecode: Run, tiny: str, generate: Any, tmp_path: Path) -> None:
    tokens = generate("plain", "--drafter", "none")[1]["tokens"]
    other = [*tokens[:9], (tokens[9] + 1) % 256, *tokens[10:]]
    (tmp_path / "a").write_text(json.dumps(tokens))
    (tmp_path / "b").write_text(" ".join(map(str, other)) + "\n")
    base = ("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--model", tiny, "--dtype", "float64", "--json")
    code, out, err = specdecode(*base, "--prompt", TEXT)
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert (found["verdict"], found["index"], found["tokens"]) == ("defect", 9, [tokens[9], other[9]])
    assert found["dtype"] == "float64" and len(found["readings"]) > 3 and found["noise"] < 1e-5 < found["short"][1]
    ids = ",".join(str(token) for token in TEXT.encode())
    raw = ("--prompt", TEXT, "--raw")
    assert json.loads(specdecode(*base, *raw)[1]) == json.loads(specdecode(*base, "--prompt-ids", ids)[1])


def test_one_a_prefix_of_the_other(specdecode: Run, tiny: str, generate: Any, tmp_path: Path) -> None:
    tokens = generate("plain", "--drafter", "none")[1]["tokens"]
    (tmp_path / "a").write_text(json.dumps(tokens))
    (tmp_path / "b").write_text(json.dumps(tokens[:7]))
    code, out, _ = specdecode("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--model", tiny, "--prompt", TEXT)
    assert code == 1 and "B ends" in out and "has ended" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--drafter", "ngram", "--gamma", "3"),
        ("--drafter", "early-exit", "--tree", "2,1", "--frequency-penalty", "0.5"),
        ("--drafter", "ngram", "--temperature", "0.8", "--verifier", "match", "--seed", "3"),
    ],
    ids=["chain", "tree", "match"],
)
def test_both_decoded_here(specdecode: Run, tiny: str, options: tuple[str, ...]) -> None:
    base = ("diff", "--prompt", TEXT, "--model", tiny, "--max-new-tokens", "16", "--dtype", "float64", "--json")
    code, out, err = specdecode(*base, *options)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["verdict"], found["reason"]) == ("same", "no difference in 16 tokens")
    assert found["names"] == ["plain", options[1]]


def test_sampled_traces(specdecode: Run, tiny: str, generate: Any) -> None:
    sampled = ("--temperature", "0.8", "--seed", "5")
    a = generate("plain", "--drafter", "none", *sampled)[0]
    b = generate("match", "--drafter", "ngram", "--verifier", "match", *sampled)[0]
    chain = generate("chain", "--drafter", "ngram", *sampled)[0]
    other = generate("other", "--drafter", "none", "--temperature", "0.8", "--seed", "6")[0]
    judge = ("--model", tiny, "--dtype", "float64")
    assert specdecode("diff", a, b, *judge)[0] == 0
    assert "verified by 'match'" in refused(specdecode("diff", a, chain, *judge))
    assert "one seed" in refused(specdecode("diff", a, other, *judge))


def refused(result: tuple[int, str, str]) -> str:
    """The one line of bad input."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("specdecode: error: expected ") and err.count("\n") == 1
    return err


def header(**values: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda lines: lines[0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (header(sampling={"temperature": 0.5}), "of one sampling"),
        (header(target={"name": "else", "revision": "", "tokenizer": ""}), "of one model"),
        (lambda lines: lines[0]["prompt"].insert(0, 5), "committed"),
        (lambda lines: lines.pop(), "a valid footer"),
    ],
    ids=["rule", "model", "prompt", "cut off"],
)
def test_traces_that_do_not_agree(
    specdecode: Run, tiny: str, generate: Any, change: Callable[[list[dict[str, Any]]], None], message: str
) -> None:
    a = generate("plain", "--drafter", "none")[0]
    assert message in refused(specdecode("diff", a, changed(a, change), "--model", tiny))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 0, "eos": [999]}, "eos tokens from 0 to 256"),
        ({"temperature": 0, "logit_bias": 3}, "logit_bias"),
        ({"temperature": 0, "unheard": 1}, "unheard"),
        ({"temperature": -1}, "temperature of 0 or more"),
    ],
    ids=["type", "vocabulary", "shape", "name", "range"],
)
def test_hostile_rules(specdecode: Run, tiny: str, generate: Any, sampling: dict[str, Any], message: str) -> None:
    a = generate("plain", "--drafter", "none")[0]
    bad = changed(a, header(sampling=sampling))
    assert message in refused(specdecode("diff", bad, bad, "--model", tiny))


def test_no_file_names_a_download(specdecode: Run, tiny: str, generate: Any) -> None:
    a = generate("plain", "--drafter", "none")[0]
    bad = changed(a, header(target={"name": "some/model", "revision": "", "tokenizer": ""}))
    assert "expected --model" in refused(specdecode("diff", bad, bad))
    bad = changed(a, header(target={"name": "tiny", "revision": "", "tokenizer": "0" * 16}))
    assert "another tokenizer" in refused(specdecode("diff", bad, bad, "--model", tiny))


def test_different_prompts_and_level_0(specdecode: Run, tiny: str, generate: Any, tmp_path: Path) -> None:
    a = generate("plain", "--drafter", "none")[0]
    other = str(tmp_path / "other.jsonl")
    specdecode("generate", "xyz", "--model", tiny, "--max-new-tokens", "20", "--trace", other)
    assert "of one prompt" in refused(specdecode("diff", a, other, "--model", tiny))

    def counts_only(lines: list[dict[str, Any]]) -> None:
        lines[0] |= {"level": 0, "vocab": {}}
        for line in lines[1:-1]:
            line["nodes"] |= {"token": [], "q": [], "p": []}
            line["emitted"]["token"] = None
            line |= {"tests": [], "topk": {}}

    bare = changed(a, counts_only)
    assert "one of level 0" in refused(specdecode("diff", bare, bare, "--model", tiny))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one token in B"),
        ("[]", "at least one token in B"),
        ("[1, 2", "half a list"),
        ("1 2 999", "999 in B"),
        ("1 -2", "'-2'"),
        ("1 2.5", "'2.5'"),
        ("[1, true]", "'true'"),
        ("9" * 5000, "token ids in B"),
        ("1 \x1b[31m", "token ids in B"),
        ("\ufeffé", "token ids in B"),
        ('{"a": 1}', "one of each"),
    ],
    ids=["empty", "empty list", "half", "range", "negative", "fraction", "word", "huge", "escape", "letters", "object"],
)
def test_hostile_lists(specdecode: Run, tiny: str, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a").write_text("[1, 2, 3]")
    (tmp_path / "b").write_text(text, encoding="utf-8")
    files = (str(tmp_path / "a"), str(tmp_path / "b"))
    assert message in refused(specdecode("diff", *files, "--model", tiny, "--prompt", "hello"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "two files, or --prompt and --drafter"),
        (("{a}",), "two files A and B"),
        (("{a}", "{a}"), "--prompt or --prompt-ids"),
        (("{a}", "{a}", "--prompt", "x", "--prompt-ids", "1"), "both"),
        (("{a}", "{a}", "--prompt-ids", "1,x"), "'x'"),
        (("{a}", "{a}", "--prompt", "x", "--drafter", "ngram"), "leave one out"),
        (("{a}", "{a}", "--prompt", "x", "--temperature", "1"), "temperature 0 with lists"),
        (("{a}", "{a}", "--prompt", "x", "--dtype", "int4"), "dtype auto"),
        (("{a}", "{none}", "--prompt", "x"), "No such file"),
        (("{a}", "{folder}", "--prompt", "x"), "not a regular file"),
        (("{a}", "a\0b", "--prompt", "x"), "null byte"),
        (("--prompt", "x"), "--prompt and --drafter"),
        (("--prompt", "x", "--drafter", "none"), "a drafter that drafts"),
        (("--prompt", "x", "--drafter", "magic"), "'magic'"),
        (("--prompt", "", "--drafter", "ngram"), "at least one character"),
        (("--prompt", "x", "--drafter", "ngram", "--temperature", "1"), "--verifier match"),
        (("--prompt", "x", "--drafter", "ngram", "--gamma", "0"), "--gamma of 1 or more"),
        (("--prompt", "x", "--drafter", "ngram", "--seed", "-1"), "a seed from 0"),
    ],
    ids=str,
)
def test_usage(specdecode: Run, tiny: str, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "a").write_text("[1, 2, 3]")
    places = {"{a}": str(tmp_path / "a"), "{none}": str(tmp_path / "none"), "{folder}": str(tmp_path)}
    given = [places.get(word, word) for word in arguments]
    assert message in refused(specdecode("diff", *given, "--model", tiny))
