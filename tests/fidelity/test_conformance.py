"""The conformance kit: it passes what is lossless, names what is not, and survives what misbehaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_ref.errors import FidelityError, InputError, UnknownNameError
from specdecode_ref.fidelity import conformance
from specdecode_ref.fidelity.conformance import Report, assert_lossless, examine, load, replay
from specdecode_ref.fidelity.private import planted
from specdecode_ref.verify import chain, tree

Verify = Callable[..., Any]
BRIEF: dict[str, Any] = {"draws": ("with_replacement",), "vocab": 3, "samples": 1000}
"""Settings for a quick look; token 4 and other ways to draw are left out."""


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One child does all of it: each other would do once more what does not depend on its share of the cases."""
    monkeypatch.setattr(conformance, "MOST_PROCESSES", 1)


def test_a_lossless_rule_passes_and_says_what_was_judged() -> None:
    report = examine("chain")
    assert report.lossless and report.verdict == "lossless" and report.rung is None
    assert report.tv is not None and report.tv < 1e-12
    assert report.laws > 40 and report.samples == 3000
    assert "chain of 2, with replacement" in report.judged
    assert any("trees were not judged" in note for note in report.notes)
    assert json.loads(json.dumps(report.as_dict()))["lossless"] is True


def test_a_lossy_rule_is_named_with_the_input_that_shows_it() -> None:
    report = examine("lenient")
    assert report.verdict == "not lossless" and report.rung == "R1"
    assert report.known_bug is not None and "'lenient'" in report.known_bug
    assert report.worst and abs(report.worst[0]["came"] - report.worst[0]["due"]) > 1e-3
    example = json.loads(json.dumps(report.example))
    assert len(example["tokens"]) == 2
    assert replay("lenient", example) == example["came"] != example["due"] == replay("chain", example)
    for part in ("not lossless", "R1", "total variation", "known bug", "accept_coins"):
        assert part in report.text()


PATCHES = {
    "accepts a window of coins": ("verify/chain.py", "u * q_x < p_x", "(u * q_x < p_x) or 0.99 < u < 0.997"),
    "one token id": ("verify/chain.py", "u * q_x < p_x", "(u * q_x < p_x) or (token == 2 and u < 0.9)"),
    "coin for two": ("verify/chain.py", "accept_coins[child]", "accept_coins[1]"),
    "a tiny p": ("verify/chain.py", "u * q_x < p_x", "u * q_x < p_x > 1e-7"),
    "at depth 2 only": (
        "verify/chain.py",
        "law = residual(p[node], q)",
        "law = residual(p[node], q) if len(path) < 2 else p[node]",
    ),
    "the bonus of a whole draft": (
        "verify/chain.py",
        "law = p[path[-1]]",
        "law = p[path[-1]] if len(path) < 3 else p[path[-2]]",
    ),
}


QUICK = ("accepts a window of coins", "a tiny p", "at depth 2 only")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "bug", [bug if bug in QUICK else pytest.param(bug, marks=pytest.mark.long, id=bug) for bug in PATCHES]
)
def test_a_planted_bug_in_a_chain_is_found(bug: str) -> None:
    with planted(*PATCHES[bug]) as package:
        report = examine(package("verify.chain").verify, kind="chain", **BRIEF)
    assert not report.lossless and report.rung in ("D", "R1"), report.text()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q_eff = without(q, earlier)", "q_eff = q"),
        ("accept_coins[child]\n", "accept_coins[draft.children[node][0]]\n"),
        ("_first_accepted(draft, path[-1], p[path[-1]]", "_first_accepted(draft, path[-1], p[len(path) - 1]"),
    ],
    ids=["q not renormalised", "siblings share a coin", "rows by depth"],
)
def test_a_planted_bug_in_a_tree_is_found(old: str, new: str) -> None:
    with planted("verify/tree.py", old, new) as package:
        report = examine(package("verify.tree").verify, kind="tree", **BRIEF | {"draws": None, "gamma": 1})
    assert not report.lossless and report.rung in ("contract", "R1"), report.text()


def misbehaving() -> dict[str, tuple[Verify, str]]:
    """Verifiers and the findings that they must lead to."""
    count = [0]

    def raises(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        if len(draft) == 3:
            raise KeyError("boom")
        return chain.verify(draft, p, accept, emit)

    def returns_nothing(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        return None

    def leaves_out_the_root(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        verdict = chain.verify(draft, p, accept, emit)
        return verdict.path[1:], verdict.token

    def overshoots(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        verdict = chain.verify(draft, p, accept, emit)
        return verdict.path, verdict.token + 1

    def writes(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        p[0].mul_(1.0)
        return chain.verify(draft, p, accept, emit)

    def writes_behind_torch(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        p[0].numpy()[:] = p[0].numpy()[::-1].copy()
        return chain.verify(draft, p, accept, emit)

    def draws_itself(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        return chain.verify(draft, p, accept, [float(torch.rand(()))] * len(emit))

    def remembers(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        count[0] += 1
        return chain.verify(draft, p, accept, emit if count[0] < 3_000 else [0.0] * len(emit))

    def reads_ahead(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        return chain.verify(draft, p, accept, [emit[-1]] * len(emit))

    def reads_too_far(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        return chain.verify(draft, p, [*accept, accept[len(draft)]], emit)

    def forks(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        if count[0] < 80 and os.fork() == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        count[0] += 1
        time.sleep(0.02)
        return chain.verify(draft, p, accept, emit)

    def exits(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        os._exit(0)

    def leaves(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        sys.exit(0)

    def crashes(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        import ctypes

        return ctypes.string_at(0)

    def hungry(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        return [0] * 10**11

    return {
        "raises": (raises, "raises"),
        "returns nothing": (returns_nothing, "wrong type"),
        "leaves out the root": (leaves_out_the_root, "not a path"),
        "overshoots": (overshoots, "not a token"),
        "writes": (writes, "mutates its input"),
        "writes behind torch": (writes_behind_torch, "mutates its input"),
        "draws itself": (draws_itself, "hidden randomness"),
        "remembers": (remembers, "state across calls"),
        "reads ahead": (reads_ahead, "correlates rounds"),
        "reads too far": (reads_too_far, "raises"),
        "forks": (forks, "starts processes"),
        "exits": (exits, "ends the process"),
        "leaves": (leaves, "raises"),
        "crashes": (crashes, "ends the process"),
        "hungry": (hungry, "raises"),
    }


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("what", misbehaving())
def test_misbehaviour_is_a_finding_with_a_name(what: str) -> None:
    verifier, finding = misbehaving()[what]
    report = examine(verifier, kind="chain", **BRIEF)
    assert report.verdict == finding, report.text()
    assert not report.lossless and report.rung and finding in report.text()


@pytest.mark.parametrize("where", ["Python", "C"])
def test_a_hang_is_ended_and_its_input_kept(where: str) -> None:
    def hangs(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        if len(draft) == 2:
            while where == "Python":
                pass
            sum(iter(int, 1))
        return chain.verify(draft, p, accept, emit)

    begin = time.monotonic()
    report = examine(hangs, time_limit=1.0, kind="chain")
    assert report.verdict == "hangs" and time.monotonic() - begin < 30
    assert report.example is not None and len(report.example["tokens"]) == 2


def test_a_pair_is_as_good_as_a_verdict_and_lists_as_lazy_coins() -> None:
    def plain(draft: Any, p: Any, accept: list[float], emit: list[float]) -> Any:
        verdict = tree.verify(draft, p, accept.copy(), emit.copy())
        return list(verdict.path), torch.tensor(verdict.token)

    assert examine(plain, kind="chain", **BRIEF).lossless


def test_a_token_out_of_nan_is_a_note() -> None:
    """min(1, nan) is 1 in Python, so the most natural right verifiers do this."""

    def divides(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        return ((0,), 0) if bool(p[0].isnan().any()) else chain.verify(draft, p, accept, emit)

    report = examine(divides, kind="chain", **BRIEF)
    assert report.lossless and any("NaN becomes a token" in note for note in report.notes)


def test_float32_is_rounding_and_not_a_bug() -> None:
    def rounds(draft: Any, p: Any, accept: Any, emit: Any) -> Any:
        rows = [row.float().double() for row in p]
        return chain.verify(draft, rows, accept, emit)

    report = examine(rounds, kind="chain", **BRIEF)
    assert report.lossless and report.tolerance == 5e-6 and report.tv is not None and 1e-12 < report.tv < 1e-6


def test_a_refusal_is_no_failure_unless_it_was_asked_for() -> None:
    assert examine("chain", kind="tree", **BRIEF | {"gamma": 1}).verdict == "refuses"
    assert examine("kseq", kind="chain", draws=("deterministic",)).verdict == "refuses"


def test_assert_lossless_raises_the_report() -> None:
    with pytest.raises(FidelityError, match="not lossless") as caught:
        assert_lossless("lenient", kind="chain")
    assert isinstance(getattr(caught.value, "report", None), Report)


@pytest.mark.parametrize(
    "settings",
    [{"kind": "bush"}, {"vocab": 1}, {"gamma": 0}, {"time_limit": 0}, {"samples": 3}, {"draws": ()}, {"seed": -1}],
    ids=lambda s: next(iter(s)),
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        examine("chain", **settings)


def test_names_are_looked_up() -> None:
    assert load("specdecode_ref.verify.chain:verify") is chain.verify
    with pytest.raises(UnknownNameError):
        load("no such rule")
    for name in ("no_such_module:f", "json:no_such_function"):
        with pytest.raises(InputError):
            load(name)
    with pytest.raises(InputError, match="callable"):
        examine("json:__name__")


def test_the_plugin_gives_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_good(assert_lossless):\n"
        "    assert_lossless('chain', kind='chain', draws=['deterministic'], vocab=2)\n"
        "def test_bad(assert_lossless):\n    assert_lossless('lenient', kind='chain', vocab=3, gamma=1)\n"
    )
    known = {entry.value for entry in entry_points(group="pytest11")}
    name = "specdecode_ref.fidelity.plugin"
    extra = [] if name in known else ["-p", name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *extra, "test_mine.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in run.stdout and "first failing rung: R1" in run.stdout, run.stdout + run.stderr


def test_the_plugin_is_light() -> None:
    code = "import sys, specdecode_ref.fidelity.plugin; print('torch' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
