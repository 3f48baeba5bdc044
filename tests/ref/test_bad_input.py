"""Bad input: one line that says what was expected, what came and what to do; exit code 2; nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdecode_ref.decode import autoregressive
from specdecode_ref.models import zoo
from specdecode_ref.models.table import TableModel
from tests.ref.conftest import CONFIG

CommandLine = Callable[..., tuple[int, str, str]]

GENERATE = [
    pytest.param([""], "a prompt of at least one character", id="empty-prompt"),
    pytest.param([" \n\t"], "a prompt of at least one character", id="white-prompt"),
    pytest.param(["", "--raw"], "a prompt of at least one character", id="empty-raw-prompt"),
    pytest.param(["\udcff"], "a prompt in UTF-8", id="prompt-not-utf8"),
    pytest.param(["x", "--max-new-tokens", "0"], "--max-new-tokens of 1 or more; got 0", id="no-tokens"),
    pytest.param(["x", "--max-new-tokens", "-3"], "--max-new-tokens of 1 or more; got -3", id="negative-tokens"),
    pytest.param(["x", "--max-new-tokens", "many"], "'--max-new-tokens'", id="tokens-no-number"),
    pytest.param(["x", "--max-new-tokens", "many"], "got 'many'; see", id="tokens-say-what-came"),
    pytest.param(["x", "--top-k=1.5"], "got '1.5'; see `specdecode generate --help`", id="top-k-no-integer"),
    pytest.param(["x", "--temperature", "nan"], "a temperature of 0 or more; got nan", id="nan-temperature"),
    pytest.param(["x", "--temperature", "-1"], "a temperature of 0 or more; got -1.0", id="negative-temperature"),
    pytest.param(["x", "--temperature", "inf"], "a temperature of 0 or more; got inf", id="infinite-temperature"),
    pytest.param(["x", "--top-p", "0"], "top_p above 0 and at most 1; got 0.0", id="top-p-zero"),
    pytest.param(["x", "--top-p", "1.5"], "top_p above 0 and at most 1; got 1.5", id="top-p-above-one"),
    pytest.param(["x", "--top-p", "nan"], "top_p above 0 and at most 1; got nan", id="top-p-nan"),
    pytest.param(["x", "--top-k", "-1"], "top_k of 0 or more; got -1", id="top-k-negative"),
    pytest.param(["x", "--min-p", "2"], "min_p from 0 to 1; got 2.0", id="min-p"),
    pytest.param(["x", "--repetition-penalty", "0"], "a repetition_penalty above 0; got 0.0", id="repetition"),
    pytest.param(["x", "--presence-penalty", "nan"], "a finite presence_penalty; got nan", id="presence"),
    pytest.param(["x", "--frequency-penalty", "inf"], "a finite frequency_penalty; got inf", id="frequency"),
    pytest.param(["x", "--seed", "-1"], "a seed from 0 to 2^64 - 1; got -1", id="seed"),
    pytest.param(["x", "--gamma", "0"], "--gamma of 1 or more; got 0", id="gamma-zero"),
    pytest.param(["x", "--gamma", "-2"], "--gamma of 1 or more; got -2", id="gamma-negative"),
    pytest.param(["x", "--drafter", "magic"], "a drafter out of auto, none, ngram, model", id="drafter"),
    pytest.param(["x", "--drafter", "ngram+"], "a drafter out of auto, none, ngram, model", id="drafter-half-joined"),
    pytest.param(
        ["x", "--verifier", "magic"],
        "a verifier out of match, chain, tree, block, traversal, kseq, onehot, typical, relaxed, lenient; got 'magic'",
        id="verifier",
    ),
    pytest.param(["x", "--dtype", "float8"], "dtype", id="dtype"),
    pytest.param(["x", "--device", "tpu"], "device", id="device"),
    pytest.param(["x", "--model", "smolm2"], "a model", id="model"),
    pytest.param(["x", "--stop", ""], "--stop with at least one character", id="empty-stop"),
    pytest.param(["x", "--tree", "3,two"], "a tree like sampled:3,2,1; got '3,two'", id="tree-words"),
    pytest.param(["x", "--tree", ""], "a tree like chain:4, sampled:3,2,1, static:wide", id="tree-empty"),
    pytest.param(["x", "--tree", "bush:3"], "a tree like chain:4, sampled:3,2,1, static:wide", id="tree-kind"),
    pytest.param(["x", "--tree", "3,-1"], "a tree like sampled:3,2,1; got '3,-1'", id="tree-negative"),
    pytest.param(["x", "--tree", "3,0"], "one child or more at every depth", id="tree-zero"),
    pytest.param(["x", "--tree", "9,9,9,9"], "a draft of at most 1023 nodes and 64 levels", id="tree-huge"),
    pytest.param(["x", "--tree", "9" * 300], "a draft of at most 1023 nodes", id="tree-of-digits"),
    pytest.param(["x", "--gamma", "65"], "a draft of at most 1023 nodes and 64 levels", id="gamma-huge"),
    pytest.param(["x", "--tree", "²"], "a tree like chain:4", id="tree-odd-digit"),
    pytest.param(["x", "--tree", "chain:x"], "a tree like chain:4; got 'chain:x'", id="chain-words"),
    pytest.param(["x", "--tree", "static:huge"], "a static tree named narrow, middle, wide, medusa", id="tree-name"),
    pytest.param(["x", "--tree", "dynamic:3,2"], "a tree like dynamic:5,4,12", id="tree-half"),
    pytest.param(["x", "--tree", "dynamic:3,2,4,1"], "a floor of 0 or more and below 1", id="tree-floor"),
    pytest.param(["x", "--tree", "optimal:0"], "an optimal tree of 1 node or more", id="tree-optimal"),
    pytest.param(["x", "--tree", "auto:3"], "a tree like auto; got 'auto:3'", id="tree-auto"),
    pytest.param(
        ["x", "--tree", "2,1", "--drafter", "ngram"], "a drafter that guesses with probabilities", id="tree-for-ngram"
    ),
    pytest.param(
        ["x", "--drafter", "none", "--tree", "auto"], "a drafter that guesses with probabilities", id="tree-for-none"
    ),
    pytest.param(["x", "--tree", "2,1", "--gamma", "2"], "--gamma or --tree; got both", id="tree-and-gamma"),
    pytest.param(
        ["x", "--tree", "2,1", "--drafter", "early-exit", "--verifier", "chain"],
        "a verifier that judges trees; got 'chain'; use match, tree, traversal, kseq, onehot",
        id="chain-for-a-tree",
    ),
    pytest.param(["x", "--trace", "/"], "a file to write for --trace", id="trace-is-a-folder"),
    pytest.param(["x", "--trace", "/dev/null"], "a file to write for --trace", id="trace-is-a-device"),
    pytest.param(["x", "--trace", "/no/such/folder/t.jsonl"], "a writable place for --trace", id="trace-nowhere"),
    pytest.param(["x", "--trace", "/proc/t.jsonl"], "a writable place for --trace", id="trace-unwritable"),
    pytest.param(["x", "--magic"], "No such option: --magic", id="option"),
    pytest.param([], "Missing argument", id="no-prompt"),
    pytest.param(["x", "y"], "unexpected extra argument", id="two-prompts"),
]


def refused(result: tuple[int, str, str], expected: str) -> None:
    """Exit code 2, nothing on standard output, and one line on standard error that says it."""
    code, out, err = result
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("specdecode: error: ")
    assert err.endswith("\n") and err.count("\n") == 1, err
    assert expected in err, err


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is a failure: all this must be refused before."""
    monkeypatch.setattr(zoo, "_load_gguf", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr(zoo, "_load_folder", lambda *_: pytest.fail("a model was loaded"))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(("arguments", "expected"), GENERATE)
def test_generate_refuses(specdecode: CommandLine, arguments: list[str], expected: str) -> None:
    refused(specdecode("generate", *arguments), expected)


def test_cuda_without_cuda(specdecode: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(specdecode("generate", "x", "--device", "cuda"), "a CUDA device; got none; use --device cpu")


def test_a_prompt_beyond_the_context(specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    refused(
        specdecode("generate", "x" * 300, "--model", tiny, "--trace", str(file)),
        "a prompt shorter than the context of 256 tokens; got 317 tokens",
    )
    assert not list(tmp_path.iterdir())


def test_a_draft_model_with_another_vocabulary(specdecode: CommandLine, tiny: str, other_vocabulary: str) -> None:
    arguments = ("generate", "x", "--model", tiny, "--drafter", "model", "--draft-model", other_vocabulary)
    refused(specdecode(*arguments), "a draft model with the vocabulary of tiny; got another one in other")


def test_a_drafter_without_its_model(specdecode: CommandLine, tiny: str) -> None:
    arguments = ("generate", "x", "--model", tiny, "--drafter", "model")
    refused(specdecode(*arguments), "a draft model for 'tiny'; got none shipped; name its folder")


def test_a_tree_for_a_target_without_a_head(specdecode: CommandLine, tiny: str) -> None:
    """The drafter "auto" is a lookup there, which drafts chains."""
    refused(specdecode("generate", "x", "--model", tiny, "--tree", "2,1"), "a chain for 'ngram'; got sampled:2,1")


def test_a_trace_that_cannot_be_written_in_the_end(
    specdecode: CommandLine, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    arguments = ("generate", "x", "--model", tiny, "--max-new-tokens", "3", "--json")
    refused(specdecode(*arguments, "--trace", str(tmp_path / "t.jsonl")), "No space left on device")
    assert not list(tmp_path.iterdir())


def test_an_older_trace_survives_a_refusal(specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("older")
    refused(specdecode("generate", "x" * 300, "--model", tiny, "--trace", str(file)), "shorter than the context")
    assert file.read_text() == "older"


PROMPTS = [
    pytest.param(None, "a prompts file that can be read", id="missing"),
    pytest.param("", "at least one prompt", id="empty"),
    pytest.param("\n\n", "at least one prompt", id="blank"),
    pytest.param("{", "another thing on line 1", id="not-json"),
    pytest.param("[]", "another thing on line 1", id="not-an-object"),
    pytest.param('{"id": "a", "category": "b"}', "another thing on line 1", id="no-turns"),
    pytest.param('{"id": "a", "category": "b", "turns": []}', "another thing on line 1", id="no-turn"),
    pytest.param('{"id": "a", "category": "b", "turns": [3]}', "another thing on line 1", id="turn-no-text"),
    pytest.param('{"id": 3, "category": "b", "turns": ["x"]}', "another thing on line 1", id="id-no-text"),
    pytest.param('{"id": "a", "category": "b", "turns": [" "]}', "another thing on line 1", id="turn-empty"),
    pytest.param('{"id": "a", "category": "b", "turns": ["x"]}\n' * 2, "an id that stands twice", id="same-id"),
    pytest.param("[" * 100_000, "another thing on line 1", id="deep"),
    pytest.param(b"\xff\xfe", "not UTF-8", id="not-utf8"),
]


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(("content", "expected"), PROMPTS)
def test_bench_refuses_prompts(
    specdecode: CommandLine, tmp_path: Path, content: str | bytes | None, expected: str
) -> None:
    file = tmp_path / "p.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(specdecode("bench", "--prompts", str(file)), expected)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--limit", "0"], "--limit of 1 or more; got 0"),
        (["--repeats", "0"], "--repeats of 1 or more; got 0"),
        (["--gamma", "0"], "--gamma of 1 or more; got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens of 1 or more; got 0"),
        (["--drafters", "none,magic"], "a drafter out of auto, none"),
        (["--drafters", "none,ngram@2,1"], "a drafter that guesses with probabilities; got 'ngram'"),
        (["--drafters", "early-exit@two"], "a tree like chain:4, sampled:3,2,1"),
        (["--drafters", "early-exit@"], "a tree like chain:4, sampled:3,2,1"),
        (["--drafters", ""], "at least one drafter"),
        (["--drafters", "none,none"], "every method once"),
        (["--peers", "vllm"], "peers out of hf, hf-pld, hf-assisted; got 'vllm'"),
        (["--temperature", "nan"], "a temperature of 0 or more; got nan"),
        (["--json", "/no/such/folder/b.json"], "a writable place for --json"),
        (["--tree", "x"], "a tree like chain:4, sampled:3,2,1"),
    ],
)
def test_bench_refuses(specdecode: CommandLine, tmp_path: Path, arguments: list[str], expected: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "category": "b", "turns": ["x"]}\n')
    refused(specdecode("bench", "--prompts", str(file), *arguments), expected)


def test_bench_needs_prompts(specdecode: CommandLine) -> None:
    refused(specdecode("bench"), "Missing option '--prompts'")


def test_results_that_cannot_be_written_in_the_end_leave_nothing(
    specdecode: CommandLine, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "category": "b", "turns": ["x"]}\n')
    arguments = (
        "--model",
        tiny,
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "3",
        "--json",
        str(tmp_path / "b.json"),
    )
    code, _, err = specdecode("bench", *arguments)
    assert code == 2
    assert err.startswith("specdecode: error: expected a results file that can be written; got ")
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_bench_refuses_a_prompt_beyond_the_context(specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"id": "long", "category": "b", "turns": ["x" * 200]}))
    arguments = ("--model", tiny, "--prompts", str(file), "--json", str(tmp_path / "b.json"))
    refused(specdecode("bench", *arguments), "217 + 64 tokens for 'long'")
    assert not (tmp_path / "b.json").exists()


def trace_lines() -> list[str]:
    return list(autoregressive(TableModel.random(5), [1, 2], max_new_tokens=4).trace.lines())


def edited(line: int, **changes: object) -> str:
    lines = trace_lines()
    lines[line] = json.dumps(json.loads(lines[line]) | changes) + "\n"
    return "".join(lines)


TRACES = [
    pytest.param("", "a header, rounds and a footer", id="empty"),
    pytest.param("no json\nat all\n", "a valid header on line 1", id="not-json"),
    pytest.param("".join(trace_lines()[:-1]), "a valid footer", id="truncated"),
    pytest.param("".join(trace_lines())[:-30], "a valid footer", id="cut-in-a-line"),
    pytest.param(edited(0, schema="specdec-trace/9"), "a valid header on line 1", id="other-schema"),
    pytest.param(edited(0, extra=1), "a valid header on line 1", id="unknown-field"),
    pytest.param(edited(1, index=7), "index 0 (line 2)", id="wrong-index"),
    pytest.param(edited(1, path=[0, 5]), "a path along parents (line 2)", id="wrong-path"),
    pytest.param(edited(2, committed=float("nan")), "a valid round on line 3", id="nan"),
    pytest.param(edited(-1, metrics={"num_drafts": 99}), "metrics", id="wrong-counts"),
    pytest.param("{" * 100_000 + "\n\n", "a valid header on line 1", id="deep"),
    pytest.param("\n" * 5000, "at most 4096 rounds", id="too-many-rounds"),
    pytest.param(edited(0, method="\x1b[31m<script>\n"), None, id="hostile-name"),
]


@pytest.mark.parametrize("command", ["validate", "stats"])
@pytest.mark.parametrize(("content", "expected"), TRACES)
def test_traces_are_refused(
    specdecode: CommandLine, tmp_path: Path, command: str, content: str, expected: str | None
) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    result = specdecode("trace", command, str(file))
    assert "\x1b" not in result[1] + result[2]
    if expected is None:
        assert result[0] == 0
    else:
        refused(result, expected)


def test_a_trace_too_large_is_not_even_read(specdecode: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with file.open("wb") as handle:
        handle.truncate(20_000_001)
    refused(specdecode("trace", "validate", str(file)), "at most 20,000,000 bytes")


@pytest.mark.parametrize("path", ["nothing.jsonl", "/", "\x1b[31mred"])
def test_a_trace_that_is_not_there(specdecode: CommandLine, path: str) -> None:
    result = specdecode("trace", "validate", path)
    refused(result, "a trace file that can be read")
    assert "\x1b" not in result[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", ""],
        ["generate", "x", "--gamma", "0"],
        ["generate", "x", "--tree", "a"],
        ["generate", "x", "--magic"],
        ["bench", "--prompts", "nothing"],
        ["trace", "validate", "nothing"],
        ["magic"],
    ],
    ids=" ".join,
)
def test_the_real_program(arguments: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", "specdecode_ref.cli", *arguments], capture_output=True, text=True)
    refused((run.returncode, run.stdout, run.stderr), "")
    assert "Traceback" not in run.stderr


DAMAGED = [
    *(
        pytest.param("config.json", {**CONFIG, **change}, id="-".join(f"{k}={str(v)[:20]}" for k, v in change.items()))
        for change in (
            {"num_attention_heads": 0},
            {"num_attention_heads": 3},
            {"num_hidden_layers": -1},
            {"rope_scaling": {"rope_type": "llama3"}},
            {"rope_theta": "abc"},
            {"rope_parameters": [1]},
            {"model_type": ["llama"]},
            {"vocab_size": None},
            {"eos_token_id": "x"},
        )
    ),
    *(
        pytest.param("model.safetensors.index.json", {"weight_map": places}, id=f"index-{number}")
        for number, places in enumerate((["a"], {"a": 3}, {"a": ["x"]}, {"a": "../other/model.safetensors"}, {}))
    ),
    *(
        pytest.param("tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": template}, id=f"template-{n}")
        for n, template in enumerate(("{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ range(9999999999) }}", [1], 5))
    ),
]


@pytest.mark.parametrize(("file", "content"), DAMAGED)
def test_a_damaged_model_folder(
    specdecode: CommandLine, tiny: str, tmp_path: Path, file: str, content: dict[str, object]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / file).write_text(json.dumps(content))
    refused(specdecode("generate", "x", "--model", str(folder)), "expected")


def test_what_is_not_a_regular_file_is_not_read(specdecode: CommandLine, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", str(pipe)):
        refused(specdecode("trace", "validate", path), "not a regular file")
        refused(specdecode("bench", "--prompts", path), "not a regular file")


def test_a_trace_file_whose_name_cannot_be(specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path / ("x" * 300), loop):
        refused(specdecode("generate", "x", "--model", tiny, "--trace", str(path)), "--trace")
