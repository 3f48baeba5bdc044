"""The command line as its users meet it: what it prints, in which colours, and what a Ctrl-C leaves behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdecode_ref import cli
from specdecode_ref.cli import generate as command
from specdecode_ref.cli import screen
from specdecode_ref.errors import SpecDecodeError
from specdecode_ref.stream import Piece
from specdecode_ref.trace_file import read_trace

Run = Callable[..., tuple[int, str, str]]

PIECES = [Piece("One", "target"), Piece(" two", "draft"), Piece(" three", "draft"), Piece(" four", "bonus")]


def paint(marks: screen.Marks, pieces: list[Piece], **console: Any) -> str:
    """What a painter prints on a terminal of that kind."""
    file = io.StringIO()
    out = Console(file=file, force_terminal=True, color_system="standard", markup=False, highlight=False, **console)
    painter = screen.Painter(out, marks)
    painter.paint(pieces)
    painter.finish()
    return file.getvalue()


def test_json_is_one_object_with_everything(specdecode: Run, tiny: str) -> None:
    code, out, err = specdecode("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "24", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found.keys() == {"text", "tokens", "prompt_tokens", "finish_reason", "metrics", "config"}
    assert len(found["tokens"]) == found["metrics"]["emitted"] == 24
    assert found["prompt_tokens"] == len("<user>abcabcabc<assistant>")
    assert found["finish_reason"] == "length"
    expected = {"rounds", "drafted", "accepted", "emitted", "acceptance_rate", "tau", "accepted_per_position"}
    assert found["metrics"].keys() >= expected | {"seconds", "tokens_per_second"}
    assert found["metrics"]["seconds"].keys() == {"prefill", "draft", "verify", "sample", "total"}
    assert found["config"]["drafter"] == "ngram"
    assert found["config"]["sampling"]["temperature"] == 0


def test_plain_and_speculative_decoding_write_the_same_text(specdecode: Run, tiny: str) -> None:
    common = ("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "40", "--dtype", "float64")
    texts = {
        specdecode(*common, *extra)[1]
        for extra in (
            ("--drafter", "none"),
            ("--drafter", "ngram", "--gamma", "3"),
            ("--drafter", "early-exit", "--tree", "3,2,1"),
            ("--drafter", "ngram+early-exit"),
            ("--drafter", "model", "--draft-model", tiny, "--verifier", "match"),
        )
    }
    assert len(texts) == 1


def test_a_pipe_gets_the_text_alone(specdecode: Run, tiny: str) -> None:
    options = ("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "24")
    _, out, err = specdecode(*options)
    text = json.loads(specdecode(*options, "--json")[1])["text"]
    assert out == screen.visible(text) + "\n"
    assert err == ""


def test_stop_strings_and_standard_input(specdecode: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--model", tiny, "--raw", "--max-new-tokens", "40", "--json")
    whole = json.loads(specdecode("generate", "hello", *options)[1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    stop = next(c for c in whole["text"][3:] if " " < c < "\x7f")
    found = json.loads(specdecode("generate", "-", *options, "--stop", stop)[1])
    assert found["prompt_tokens"] == 5
    assert found["finish_reason"] == "stop"
    assert found["text"] == whole["text"][: whole["text"].index(stop)]


def test_the_trace_is_whole_and_can_be_checked(specdecode: Run, tiny: str, tmp_path: Path) -> None:
    file = str(tmp_path / "run.jsonl")
    options = ("--temperature", "0.7", "--top-p", "0.9", "--seed", "5", "--max-new-tokens", "20", "--json")
    found = json.loads(specdecode("generate", "abcabc", "--model", tiny, *options, "--trace", file)[1])
    trace = read_trace(file)
    assert list(trace.tokens) == found["tokens"]
    assert trace.header.level == 3
    assert trace.header.target.tokenizer
    valid = f"{file}: valid specdec-trace/1, level 3, {len(trace.rounds)} rounds\n"
    assert specdecode("trace", "validate", file)[:2] == (0, valid)
    assert json.loads(specdecode("trace", "stats", file, "--json")[1])["emitted"] == 20
    table = specdecode("trace", "stats", file, "--names")[1]
    assert "tau" in table and "num_draft_tokens" in table and "spec_accept_rate" in table


def test_the_first_interrupt_ends_after_the_round(
    specdecode: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    painted = screen.Painter.paint
    calls: list[int] = []

    def paint_and_interrupt(self: screen.Painter, pieces: list[Piece]) -> None:
        painted(self, pieces)
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(screen.Painter, "paint", paint_and_interrupt)
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = specdecode("generate", "abcabc", "--model", tiny, "--trace", str(file), "--max-new-tokens", "200")
    assert code == 130
    assert signal.getsignal(signal.SIGINT) is before
    trace = read_trace(file)
    assert trace.footer.finish_reason == "cancelled"
    assert len(trace.rounds) == 3
    assert out.endswith("\n")


def test_an_interrupted_json_is_still_an_object(specdecode: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_interruptible", lambda: nullcontext([signal.SIGINT]))
    code, out, _ = specdecode("generate", "abcabc", "--model", tiny, "--json")
    assert code == 130
    assert json.loads(out)["finish_reason"] == "cancelled"
    assert len(json.loads(out)["tokens"]) >= 1


def test_two_interrupts_end_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), command._interruptible() as pressed:
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)


def test_kinds_have_colours_and_marks_that_need_none() -> None:
    coloured = paint("style", PIECES)
    assert "One" in coloured
    assert "\x1b[4;32m two\x1b[0m\x1b[4;32m three\x1b[0m" in coloured
    assert "\x1b[7;36m four\x1b[0m" in coloured
    colourless = paint("style", PIECES, no_color=True)
    assert "\x1b[4m two\x1b[0m" in colourless and "\x1b[7m four\x1b[0m" in colourless
    assert paint("text", PIECES) == "One[ two three]+ four\n"
    assert paint("none", PIECES) == "One two three four\n"


def test_text_marks_close_before_the_next_draft() -> None:
    pieces = [Piece("a", "draft"), Piece("b", "residual"), Piece("c", "draft")]
    assert paint("text", pieces) == "[a]!b[c]\n"


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31mred", "␛[31mred"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x9b2J", "<U+009B>2J"),
        ("over\rwrite\x08", "over␍write␈"),
        ("\u202egnp.exe", "<U+202E>gnp.exe"),
        ("zero\u200bwidth\ufeff", "zero<U+200B>width<U+FEFF>"),
        ("[bold red]markup[/bold red] :smile:", "[bold red]markup[/bold red] :smile:"),
        ("tab\tnew\nline 👩\u200d💻 한글 é", "tab\tnew\nline 👩\u200d💻 한글 é"),
        ("\x00\x7f", "␀␡"),
    ],
)
def test_text_cannot_steer_the_terminal(hostile: str, shown: str) -> None:
    assert screen.visible(hostile) == shown
    assert paint("none", [Piece(hostile, "target")]).expandtabs(8) == (shown + "\n").expandtabs(8)


def test_text_keeps_its_spaces_and_is_not_wrapped() -> None:
    text = "a  \n  b" + " word" * 60 + " \n\n"
    assert paint("none", [Piece(text, "target")], width=20) == text + "\n"


def test_provenance_counts_what_was_kept(specdecode: Run, tiny: str, tmp_path: Path) -> None:
    file = str(tmp_path / "run.jsonl")
    specdecode("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "50", "--trace", file)
    trace = read_trace(file)
    found = command.provenance(trace)
    assert sum(found.values()) == 50
    assert found["draft"] == trace.footer.metrics["num_accepted_tokens"]


def test_a_setting_without_effect_is_mentioned(specdecode: Run, tiny: str) -> None:
    code, _, err = specdecode("generate", "a", "--model", tiny, "--top-p", "0.9", "--max-new-tokens", "2")
    assert code == 0
    assert err == ("specdecode: note: --top-p changes nothing at temperature 0, which is greedy; add --temperature 1\n")


def test_models_lists_the_default(specdecode: Run) -> None:
    code, out, _ = specdecode("models")
    assert code == 0
    assert "smollm2" in out and ("ready" in out or "missing" in out)


def test_app_starts_the_visualiser(specdecode: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_app import launch

    seen: dict[str, Any] = {}
    monkeypatch.setattr(launch, "run", lambda **settings: seen.update(settings) or 0)
    assert specdecode("app", "--port", "8765", "--headless")[0] == 0
    assert seen == {"port": 8765, "headless": True}


def test_app_without_streamlit_says_what_to_install(specdecode: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "streamlit" else found(name))
    code, _, err = specdecode("app")
    assert code == 2
    assert "pip install 'specdecode-ref[app]'" in err


def test_help_names_every_command_and_no_arguments_are_help(specdecode: Run) -> None:
    code, out, _ = specdecode("--help")
    assert code == 0
    assert all(command in out for command in ("generate", "bench", "trace", "models", "app"))
    assert specdecode()[0] == 0
    assert "generate" in specdecode()[1]
    assert specdecode("--version")[1].startswith("specdecode-ref ")


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from specdecode_ref import cli; cli.execute(['--help']); "
        "sys.exit(bool({'torch', 'transformers', 'pydantic', 'tokenizers'} & sys.modules.keys()))"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.perf_counter() - start < 5  # a second on an idle machine


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "specdecode_ref.cli", "generate", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(timeout=60)


def test_an_error_of_the_program_is_not_hidden(specdecode: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(command, "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.execute(["generate", "x"])
    assert not issubclass(RuntimeError, SpecDecodeError)
