"""`specdecode fidelity` as its users meet it: exit codes, one line for bad input, JSON that nothing can spoil."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]

SOURCE = """
import os
print("imported")
from specdecode_ref.verify.chain import verify

def good(draft, p, accept_coins, emit_coins):
    print("called")
    os.write(1, b"called")
    return verify(draft, p, accept_coins, emit_coins)

def bad(draft, p, accept_coins, emit_coins):
    return (0,), 0

def engine(draft_ids, target_probs, temperature, seed):
    return draft_ids

number = 3
"""
BRIEF = ("--kind", "chain", "--draw", "with_replacement", "--vocab", "3", "--samples", "1000")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module, as the current one."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_broken.py").write_text("raise SystemExit(3)")
    (tmp_path / f"{name}_base.py").write_text("raise BaseException('x\\x1b[31m')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path / name


def test_a_module_of_the_current_folder(specdecode: Run, here: Path) -> None:
    code, out, _ = specdecode("fidelity", "--verifier", f"{here.name}:good", "--json", *BRIEF)
    report = json.loads(out)
    assert code == 0 and report["lossless"] and report["verifier"] == f"{here.name}:good"
    code, out, _ = specdecode("fidelity", "--verifier", f"{here.name}:bad", "--json", *BRIEF)
    assert code == 1 and not json.loads(out)["lossless"]


def test_our_own_names_and_a_report_to_read(specdecode: Run) -> None:
    code, out, err = specdecode("fidelity", "--verifier", "lenient", *BRIEF)
    assert code == 1 and err == "" and out.startswith("lenient: not lossless") and "known bug" in out


@pytest.mark.parametrize(
    ("verifier", "options", "expected"),
    [
        ("no_such_module_at_all:f", (), "no_such_module_at_all"),
        ("{}:missing", (), "missing"),
        ("{}:number", (), "callable"),
        ("{}_broken:f", (), "SystemExit"),
        ("{}_base:f", (), "BaseException"),
        ("no such rule", (), "a verifier out of"),
        ("", (), "verifier"),
        (":", (), "module"),
        ("chain", ("--kind", "bush"), "bush"),
        ("chain", ("--vocab", "1"), "vocab"),
        ("chain", ("--time-limit", "nan"), "time limit"),
        ("{}:engine", ("--batched",), "temperature"),
        ("{}:engine", ("--batched", "--kind", "tree"), "batched"),
    ],
)
def test_bad_input_is_one_line(
    specdecode: Run, here: Path, verifier: str, options: tuple[str, ...], expected: str
) -> None:
    code, out, err = specdecode("fidelity", "--verifier", verifier.format(here.name), *options)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line != "imported"]
    assert len(lines) == 1 and expected in lines[0], err


def test_what_a_module_writes_past_python_stays_off_standard_output(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import os\nos.write(1, b'raw')\nprint('printed')\n")
    command = [sys.executable, "-m", "specdecode_ref.cli", "fidelity", "--verifier", "loud:missing", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "raw" in done.stderr and "missing" in done.stderr
