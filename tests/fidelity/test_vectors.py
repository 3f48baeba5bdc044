"""The test vectors: they say what the verifiers do, they catch bugs, another language can answer them, and bad files
are refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_ref import cli, verify
from specdecode_ref.errors import InputError
from specdecode_ref.fidelity import mutants, vectors
from specdecode_ref.fidelity.private import Package, planted
from specdecode_ref.fidelity.vectors import making
from specdecode_ref.fidelity.vectors.file import MAX_BYTES, Case, Refusal, Verdict, read_answers, read_cases
from specdecode_ref.tree import depths

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "test-vectors.md"
CASES = vectors.cases()


def answers(package: Package | None = None) -> list[dict[str, Any]]:
    """What a package says; a crash is an answer too."""

    def one(case: Case) -> dict[str, Any]:
        try:
            return vectors.answer(case, package)
        except Exception as error:
            return {"id": case.id, "error": repr(error)}

    return [one(case) for case in CASES]


def test_the_shipped_file_is_what_the_seed_gives() -> None:
    assert vectors.FILE.read_text(encoding="utf-8") == making.text()


def test_our_own_verifiers_answer_all() -> None:
    report = vectors.check(answers())
    assert report.ok
    assert report.tallies.keys() == verify.VERIFIERS.keys()
    assert sum(t.passed for t in report.tallies.values()) == len(CASES)


def test_float32_agrees_wherever_the_margin_allows() -> None:
    report = vectors.check((vectors.answer(case, dtype=torch.float32) for case in CASES), float32=True)
    assert report.ok, [t.first for t in report.tallies.values() if t.first]


def test_the_file_is_of_the_promised_size_and_numbers() -> None:
    assert 300 <= len(CASES) <= 450
    assert vectors.FILE.stat().st_size < 700_000
    assert {len(case.p[0]) for case in CASES} >= {2, 3, 5, 17, 64}
    for case in CASES:
        for row in (*case.p, *case.q):
            if row is not None and None not in row:
                assert all((x * 2**20).is_integer() for x in row if x is not None), case.id
                missing = 1 - sum(x for x in row if x is not None)
                assert missing == 0 or "no residual mass" in case.why or "no mass" in case.why, case.id
        assert all(0 <= u < 1 for u in (*case.accept_coins, *case.emit_coins)), case.id


@pytest.mark.parametrize("name", verify.VERIFIERS)
def test_every_way_a_round_can_end_is_there(name: str) -> None:
    mine = [case for case in CASES if case.verifier == name]
    due = [case.expected for case in mine]
    ended = [verdict for verdict in due if isinstance(verdict, Verdict)]
    assert {len(verdict.path) for verdict in ended} >= {1, 2, 3}
    kinds = {"bonus", "target"} if name in ("match", "typical", "relaxed") else {"bonus", "target", "residual"}
    assert {verdict.kind for verdict in ended} == kinds
    assert any(isinstance(verdict, Refusal) for verdict in due)
    assert all(case.lossless == verify.get(name).lossless for case in mine)
    if "tree" in verify.get(name).shapes:  # a second sibling, and one below another
        second = [(c, v) for c in mine if isinstance(v := c.expected, Verdict) and len(set(c.tree.parents)) < len(c.p)]
        assert any(case.tree.parents[: verdict.path[-1]].count(0) > 0 for case, verdict in second)
        assert any(len(verdict.path) > 2 for case, verdict in second if max(depths(case.tree.parents)) > 1)


def test_a_chain_of_eight_is_left_at_every_place() -> None:
    for name in ("chain", "block"):
        long = [c.expected for c in CASES if c.verifier == name and len(c.p) == 9]
        assert {len(verdict.path) for verdict in long if isinstance(verdict, Verdict)} == set(range(1, 10))


OWN = {
    "block: prefixes have their own weight": ("block", "if i == gamma else after_rejection(w[i], p[i], q[i])", ""),
    "block: the residual unweighted": ("block", "residual(w[i] * p[i], q[i])", "residual(p[i], q[i])"),
    "block: h = s": ("block", "return s / (s + (1 - weight))", "return s"),
    "traversal: the residual unweighted": (
        "traversal",
        "residual(before * owed, q_eff)",
        "residual(owed, q_eff)",
    ),
    "traversal: the weight stays": ("traversal", "after_rejection(before, owed, q_eff) if node", "before if node"),
    "kseq: rho = k": ("kseq", "smallest_rho(p[node], q, len(children))", "len(children)"),
    "kseq: the residual of one candidate": ("kseq", "taken * _chances(float(taken.sum()), len(children))", "q"),
    "kseq: u = 0 accepts": ("kseq", "u * q_x < p_x", "u * q_x <= p_x"),
    "match: the last of equals": ("match", "found = child\n                break", "found = child"),
    "tree: q not renormalised": ("tree", "q_eff = without(q, earlier)", "q_eff = q"),
    "tree: the wrong emit coin": ("tree", "pick(p_eff, emit_coins[len(path) - 1])", "pick(p_eff, emit_coins[0])"),
    "onehot: as it was drawn": ("onehot", "replace(draft, draws=draws)", "draft"),
    "lenient: strict": ("lenient", "lenience * float(q[token])", "float(q[token])"),
    "relaxed: one token fewer": ("relaxed", "float(largest[top])", "float(largest[top - 1])"),
    "typical: the wrong bound": ("typical", "min(epsilon, delta * float", "max(epsilon, delta * float"),
}


@pytest.mark.parametrize("name", ["M01", "M02", "M03", "M05", "M10", "M12", "M16", "M18", "M25", *OWN])
def test_a_planted_bug_fails(name: str) -> None:
    def plant() -> AbstractContextManager[Package]:
        if name not in OWN:
            return mutants.get(name).plant()
        file, old, new = OWN[name]
        return planted(f"verify/{file}.py", old, new)

    with plant() as package:
        report = vectors.check(answers(package))
    guilty = OWN[name][0] if name in OWN else "tree" if name == "M25" else "chain"
    tally = report.tallies[guilty]
    assert not report.ok and tally.failed > 0
    assert tally.first is not None and tally.first[0].verifier == guilty


def test_another_language_answers_from_the_document_alone(node: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"```js\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "answer.mjs"
    script.write_text(program, encoding="utf-8")
    run = subprocess.run([node, str(script), str(vectors.FILE)], capture_output=True, check=True, timeout=60)
    report = vectors.check(read_answers(run.stdout), verifiers=("chain", "tree"))
    assert report.ok, [t.first for t in report.tallies.values() if t.first]
    assert min(t.passed for t in report.tallies.values()) > 50


def test_what_is_missing_is_not_right() -> None:
    given = answers()
    report = vectors.check(given[1:])
    assert not report.ok and report.tallies["match"].missing == 1
    chain = [a for a in given if a["id"].startswith("chain")]
    assert vectors.check(chain, verifiers=["chain"]).ok
    assert not vectors.check(chain).ok


def test_an_accepted_count_stands_for_the_path_of_a_chain() -> None:
    def counted(answer: dict[str, Any]) -> dict[str, Any]:
        return {"accepted" if k == "path" else k: len(v) - 1 if k == "path" else v for k, v in answer.items()}

    chain = [counted(a) for a in answers() if a["id"].startswith("chain")]
    assert vectors.check(chain, verifiers=["chain"]).ok
    tree = next(case for case in CASES if case.verifier == "tree" and not case.draft().is_chain)
    with pytest.raises(InputError, match="whose draft is a tree"):
        vectors.check([{"id": tree.id, "accepted": 1, "token": 0}])


def test_only_a_small_margin_excuses() -> None:
    near = next(case for case in CASES if case.boundary())
    far = next(case for case in CASES if isinstance(case.expected, Verdict) and not case.boundary())
    assert isinstance(near.expected, Verdict) and isinstance(far.expected, Verdict)
    for case, float32, failed, excused in ((near, True, 0, 1), (near, False, 1, 0), (far, True, 1, 0)):
        assert isinstance(case.expected, Verdict)
        wrong = {"id": case.id, "path": list(case.expected.path), "token": case.expected.token + 1}
        tally = vectors.check([wrong], float32=float32).tallies[case.verifier]
        assert (tally.failed, tally.excused) == (failed, excused)


BAD = {
    "empty": b"",
    "blank": b" \n\n",
    "no answers": b"[]",
    "not JSON": b"path, token",
    "cut off": b'[{"id": "chain-001", "path": [0], "tok',
    "bytes": b"\xff\xfe\x00",
    "NaN": b'{"id": "chain-001", "path": [0], "token": NaN}',
    "a float": b'{"id": "chain-001", "path": [0], "token": 1.0}',
    "a boolean": b'{"id": "chain-001", "path": [0], "token": true}',
    "a string": b'{"id": "chain-001", "path": "0", "token": 1}',
    "an unknown field": b'{"id": "chain-001", "path": [0], "token": 1, "tokn": 1}',
    "no token": b'{"id": "chain-001", "path": [0]}',
    "two answers in one": b'{"id": "chain-001", "path": [0], "token": 1, "error": "not_a_law"}',
    "a token beside an error": b'{"id": "chain-001", "token": 1, "error": "not_a_law"}',
    "path and accepted": b'{"id": "chain-001", "path": [0], "accepted": 0, "token": 1}',
    "a negative count": b'{"id": "chain-001", "accepted": -1, "token": 1}',
    "a huge count": b'{"id": "chain-001", "accepted": 99999999999999999999, "token": 1}',
    "an id twice": b'{"id": "chain-001", "path": [0], "token": 1}\n{"id": "chain-001", "path": [0], "token": 1}',
    "an unknown id": b'{"id": "chain-\x1b[31m", "path": [0], "token": 1}'.replace(b"\x1b", b"\\u001b"),
    "nested too deep": b"[" * 100_000,
    "too many values": b"[" + b"1," * 500_000 + b"1]",
    "too large": b" " * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_answers_are_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.json"
    file.write_bytes(BAD[name])
    assert cli.execute(["vectors", "check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specdecode: error: expected ") and err.count("\n") == 1
    assert err.rstrip("\n").isprintable() and len(err) < 700


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.update(format="specdec-vectors/2"),
        lambda file: file["cases"].append(file["cases"][0]),
        lambda file: file["cases"][0]["p"].append([1.0]),
        lambda file: file["cases"][0]["accept_coins"].append(0.5),
        lambda file: file["cases"][0]["tree"].update(tokens=[99]),
        lambda file: file["cases"][0]["tree"].update(parents=[0]),
        lambda file: file["cases"][0].update(margin=float("inf")),
        lambda file: file["cases"][0].update(p=[]),
        lambda file: file.update(cases=[]),
        lambda file: file.pop("cases"),
    ],
    ids=["version", "twice", "rows", "coins", "token", "parents", "infinity", "no-rows", "no-cases", "no-field"],
)
def test_bad_vectors_are_refused(spoil: Callable[[dict[str, Any]], Any]) -> None:
    file = json.loads(vectors.FILE.read_text(encoding="utf-8"))
    file["cases"] = file["cases"][:3]
    read_cases(json.dumps(file).encode())
    spoil(file)
    with pytest.raises(InputError):
        read_cases(json.dumps(file).encode())


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, given = tmp_path / "vectors.json", answers()
    file.write_bytes(vectors.FILE.read_bytes())
    right, wrong = tmp_path / "right.jsonl", tmp_path / "wrong.json"
    right.write_text("\n".join(map(json.dumps, given)), encoding="utf-8")
    given[0]["token"] += 1
    wrong.write_text(json.dumps(given), encoding="utf-8")
    assert cli.execute(["vectors", "check", str(right), "--vectors", str(file)]) == 0
    assert "all right" in capsys.readouterr().out
    assert cli.execute(["vectors", "check", str(wrong)]) == 1
    out = capsys.readouterr().out
    assert f"{CASES[0].id} failed: {CASES[0].why}" in out and '"accept_coins"' in out
    assert cli.execute(["vectors", "check", str(wrong), "--json", "--float32"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verifiers"]["match"]["first"]["came"] == given[0]
    assert found["verifiers"]["chain"] == {
        "lossless": True,
        "passed": sum(case.verifier == "chain" for case in CASES),
        "excused": 0,
        "failed": 0,
        "missing": 0,
        "first": None,
    }
    assert cli.execute(["vectors", "check", str(right), "--verifier", "nobody"]) == 2
    assert cli.execute(["vectors", "check", str(tmp_path)]) == 2
    assert cli.execute(["vectors", "check", str(tmp_path / "none")]) == 2


def test_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(making, "text", lambda: "the vectors\n")
    file = tmp_path / "vectors.json"
    assert cli.execute(["vectors", "write", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == "the vectors\n" and list(tmp_path.iterdir()) == [file]
    assert cli.execute(["vectors", "write"]) == 0
    assert capsys.readouterr().out == "the vectors\n"
    assert cli.execute(["vectors", "write", str(tmp_path / "none" / "file")]) == 2
