"""`specdecode compare-verifiers`: on laws, at random, on a trace, and on what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specdecode_ref.verify import VERIFIERS

Run = Callable[..., tuple[int, str, str]]
LAWS = ("compare-verifiers", "--p", "0.5,0.3,0.2", "--q", "0.2,0.5,0.3")


def test_two_laws(specdecode: Run) -> None:
    code, out, err = specdecode(*LAWS, "--gamma", "2", "--json")
    assert (code, err) == (0, "")
    found = {row["verifier"]: row for row in json.loads(out)["verifiers"]}
    assert list(found) == list(VERIFIERS)
    assert found["chain"]["accepted"] == pytest.approx(1.19) and found["block"]["accepted"] == pytest.approx(1.25)
    assert all((row["tv"] < 1e-12) == row["lossless"] for row in found.values())
    assert sum(mass for _, mass in found["block"]["law"]) == pytest.approx(1)


def test_the_table_marks_what_is_lossy_and_what_does_not_apply(specdecode: Run) -> None:
    code, out, _ = specdecode(*LAWS, "--tree", "2", "--draw", "without_replacement")
    assert code == 0
    line = {row.split()[1]: row for row in out.splitlines() if row.startswith("│")}
    assert "NO, lossy" in line["typical"] and "applicable" in line["kseq"] and "0 (rounding)" in line["traversal"]


def test_random_laws_depend_on_the_seed(specdecode: Run) -> None:
    outs = {specdecode("compare-verifiers", "--random", "3", "--seed", seed, "--json")[1] for seed in "001"}
    assert len(outs) == 2


def test_a_trace(specdecode: Run, tiny: str, tmp_path: Path) -> None:
    file = str(tmp_path / "t.jsonl")
    generate = ("generate", "abcab", "--model", tiny, "--drafter", "early-exit", "--temperature", "1", "--gamma", "2")
    assert specdecode(*generate, "--max-new-tokens", "12", "--trace", file)[0] == 0
    code, out, _ = specdecode("compare-verifiers", file, "--model", tiny, "--rounds", "3", "--json")
    assert code == 0
    found = {row["verifier"]: row for row in json.loads(out)["verifiers"]}
    assert found["tree"]["accepted"] == pytest.approx(found["chain"]["accepted"]) and found["chain"]["tv"] is None
    assert found["lenient"]["accepted"] >= found["chain"]["accepted"] >= found["onehot"]["accepted"] - 1e-12


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "one of TRACE, --p with --q, or --random"),
        (["--random", "3", "--p", "1,0"], "one of TRACE"),
        (["--p", "0.5,0.5"], "--q as 2 to 64 probabilities"),
        (["--p", "0.5,0.6", "--q", "0.5,0.5"], "--p as 2 to 64 probabilities that sum to 1"),
        (["--p", "nan,0.5", "--q", "0.5,0.5"], "--p as"),
        (["--p", "a", "--q", "0.5,0.5"], "--p as"),
        (["--p", "0.5,0.5", "--q", "0.2,0.3,0.5"], "of one length"),
        (["--random", "1"], "2 to 64 tokens"),
        (["--random", "3", "--seed", "-1"], "a seed"),
        (["--random", "3", "--gamma", "0"], "--gamma of 1 or more"),
        (["--random", "3", "--gamma", "30"], "small enough to enumerate"),
        (["--random", "20", "--gamma", "3"], "at most 4096 drafts"),
        (["--random", "3", "--draw", "twice"], "--draw out of"),
        (["/no/such/trace"], "a trace file that can be read"),
    ],
)
def test_what_cannot_be_compared(specdecode: Run, arguments: list[str], expected: str) -> None:
    code, out, err = specdecode("compare-verifiers", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
