"""Rung R2 on this package, on planted bugs and on lossless changes; and the command that runs it for longer."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from specdecode_ref import verify
from specdecode_ref.decode import Session
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.fidelity import mutants, pairs, sampled
from specdecode_ref.fidelity.betting import NONE_KNOWN, played
from specdecode_ref.fidelity.laws import tv
from specdecode_ref.fidelity.loop import Exact, generated
from specdecode_ref.fidelity.private import planted
from specdecode_ref.fidelity.sampled import check, configurations
from specdecode_ref.fidelity.sampled import long_run as command
from specdecode_ref.fidelity.sampled.configurations import Configuration
from specdecode_ref.fidelity.sampled.light import LightTable
from specdecode_ref.fidelity.statistics import samples_needed
from specdecode_ref.models.table import TableModel

ALL = configurations.covering()
SINGLE = Configuration("model", "single", "with_replacement", "chain", "plain")
CHAIN = Configuration("model", "chain", "with_replacement", "chain", "plain")
SIBLINGS = Configuration("model", "siblings", "with_replacement", "tree", "plain")
DISTINCT = Configuration("model", "siblings", "without_replacement", "tree", "plain")


def samples(configuration: Configuration) -> int:
    """What shows the bugs that the pair was mined for, where they would show as mined; a smoke test elsewhere."""
    as_mined = (configuration.kind, configuration.rule, configuration.tables) == ("model", "plain", "mined")
    return int(max(configuration.pair.needed.values())) if as_mined else 120


@pytest.mark.parametrize("number", range(len(ALL)), ids=[str(c).replace(" | ", ", ") for c in ALL])
def test_the_decoder_has_the_law_and_the_acceptance_that_theory_says(number: int) -> None:
    outcome = check(ALL[number], samples(ALL[number]), seed=number)
    assert outcome.passes, str(outcome)


@pytest.mark.parametrize("number", range(0, len(ALL), 4))
def test_the_acceptance_comes_from_a_law_that_is_right(number: int) -> None:
    c = ALL[number]
    setup = c.setup()
    exact = played(verify.get(c.verifier), setup.after, c.propose, c.length, setup.rule.eos)
    assert tv(exact.law, c.exact.law) < 1e-12


def test_every_two_choices_that_go_together_are_sampled_together() -> None:
    held = set().union(*map(configurations.pairs_in, ALL))
    lossless = {name for name, rule in verify.VERIFIERS.items() if rule.lossless}
    assert {c.verifier for c in ALL} == lossless
    factors = [
        ("kind", configurations.KINDS),
        ("rule", configurations.RULES),
        ("verifier", lossless),
        ("tables", configurations.TABLES),
    ]
    for (a, x), (b, y) in combinations(factors, 2):
        for pair in ((u, v) for u in x for v in y):
            refused = pair[1] == "kseq" and a == "kind" and pair[0] != "model"
            assert (((a, pair[0]), (b, pair[1])) in held or ((b, pair[1]), (a, pair[0])) in held) != refused
    assert not [c for c in ALL if c.shape in ("tree", "siblings") and c.verifier in ("chain", "block")]
    assert len(ALL) <= 45


def test_no_configuration_is_idle() -> None:
    """A law of one cell, or drafts that are never accepted, would pass whatever the code does."""
    assert [str(c) for c in ALL if len(c.exact.law) < 3 or c.exact.accepted < 0.1] == []


def test_a_chain_accepts_as_often_as_the_laws_overlap() -> None:
    """alpha = sum min(p, q), the closed form."""
    p, q = (law(()) for law in (SINGLE.pair.target, SINGLE.pair.draft))
    assert SINGLE.exact.accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("branching", [(1, 1), (2, 1)], ids=["chain", "tree"])
def test_a_light_model_drafts_what_the_table_would(branching: tuple[int, ...]) -> None:
    target, draft = (TableModel(TableModel.random(4, order=2, seed=s).table) for s in (0, 1))
    runs = []
    for p, q in ((target, draft), (target, LightTable(draft)), (LightTable(target), LightTable(draft))):
        drafter = ModelDrafter(q, branching)  # type: ignore[arg-type]
        session = Session(p, [(0, 1), (2,), (3, 1, 0)], drafter, max_new_tokens=9, seed=3)
        runs.append([generation.tokens for generation in session.run()])
    assert runs[0] == runs[1] == runs[2]


POWER = {"M01": SINGLE, "M02": SINGLE, "M16": SINGLE, "M10": CHAIN, "M12": CHAIN, "M25": SIBLINGS, "M24": DISTINCT}


@pytest.mark.parametrize("name", POWER)
def test_a_bug_is_rejected_with_the_samples_computed(name: str) -> None:
    configuration = POWER[name]
    n = int(configuration.pair.needed[name])
    with mutants.get(name).plant() as package:
        outcome = check(configuration, n, seed=1, package=package)
    assert n < 2000 and outcome.gate.rejects and not outcome.lossless


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of four, since finding the laws of all takes many seconds."""
    some = {name: mutants.get(name) for name in ("M02", "M16", "M48", "M50")}
    monkeypatch.setattr(mutants, "catalogue", lambda: some)


@pytest.mark.usefixtures("few")
def test_a_drafters_bug_is_rejected_too_and_named() -> None:
    """M48 sorts siblings: no verifier sees it, so its law comes out of the real loop."""
    siblings = replace(SIBLINGS, tables="first p")
    with mutants.get("M48").plant() as package:
        n = samples_needed(siblings.exact.law, generated(siblings.setup(package), search=True).law)
        assert n < 2000
        outcome = check(siblings, int(n), seed=2, package=package)
    assert not outcome.lossless
    assert outcome.best_fit == "M48"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("shape", "verifier"), [("single", "chain"), ("siblings", "tree")])
def test_a_token_chosen_by_rank_that_counts_as_drawn_is_rejected(shape: str, verifier: str) -> None:
    """EAGLE #110: the likeliest tokens make a fine tree, and dividing by q takes them for rarer than they are."""
    ranked = Configuration("static", shape, "with_replacement", verifier, "plain", "random")
    hung = "                at[*parent, rank] = node\n"
    drawn = hung + (
        '                sketch._draws[node] = "with_replacement"\n'
        "                sketch._q[at[parent]] = logits[parents.index(parent)].double().softmax(-1)\n"
    )
    with planted("drafters/growth.py", hung, drawn) as package:
        n = samples_needed(ranked.exact.law, generated(ranked.setup(package), search=True).law)
        assert n < 2000
        outcome = check(ranked, int(n), seed=6, package=package)
    assert not outcome.lossless


@pytest.mark.usefixtures("few")
def test_the_report_names_everything() -> None:
    with mutants.get("M02").plant() as package:
        report = str(check(SINGLE, 900, seed=7, package=package))
    for part in ("model | single", "seed 7: REJECTED", "G = ", "radius", "seen", "wealth", "bug: M02"):
        assert part in report, report


@pytest.mark.usefixtures("few")
def test_a_bug_outside_the_catalogue_is_rejected_without_a_name() -> None:
    """Nothing that rejects depends on knowing the bug: here the ratio p / q is squared."""
    with planted("verify/chain.py", "accepted = u * q_x < p_x", "accepted = u * q_x**2 < p_x**2") as package:
        outcome = check(SINGLE, 2000, seed=3, package=package)
    assert not outcome.lossless and outcome.best_fit == NONE_KNOWN


LOSSLESS = {
    "E01": CHAIN,
    "E02": CHAIN,
    "E03": Configuration("model", "single", "with_replacement", "auto", "plain"),
    "E04": Configuration("model", "siblings", "without_replacement", "tree", "plain"),
    "E05": CHAIN,
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_change_keeps_the_law(name: str) -> None:
    with mutants.get(name).plant() as package:
        assert check(LOSSLESS[name], 400, seed=4, package=package).lossless


def test_the_acceptance_sees_what_the_law_cannot() -> None:
    with mutants.get("E01").plant() as package:
        outcome = check(CHAIN, 400, seed=5, package=package)
    assert outcome.lossless and not outcome.accepts_as_expected and not outcome.passes
    assert "REJECTED" in str(outcome) and "bug" not in str(outcome)


def test_replay() -> None:
    setup = SINGLE.setup()
    whole = sampled.sample(setup, 60, seed=9)
    parts = [sampled.sample(setup, 30, seed=9, first=first) for first in (0, 30)]
    assert whole.counts == parts[0].counts + parts[1].counts
    assert whole.accepted == parts[0].accepted + parts[1].accepted
    assert sampled.sample(setup, 60, seed=10).counts != whole.counts


@pytest.mark.usefixtures("few")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One short run that passes, then the same samples held against another law."""
    file = tmp_path / "r2.json"
    arguments = ["--samples", "300", "--jobs", "1", "--only", "0", "--json", str(file)]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("seed ") and "fresh" in out[0] and out[-1] == "1 passed, 0 rejected"
    written = json.loads(file.read_text())
    assert written["whole"] and str(written["seed"]) in out[0]
    assert written["outcomes"][0]["n"] == 300 and written["outcomes"][0]["passes"]

    wrong = {cell: 1 / len(ALL[0].exact.law) for cell in ALL[0].exact.law}
    monkeypatch.setattr(Configuration, "exact", Exact(wrong, 1.0, ALL[0].exact.accepted))
    assert command.main([*arguments, "--seed", str(written["seed"])]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "given" in out[0] and any("REJECTED" in line for line in out)
    replayed = json.loads(file.read_text())["outcomes"][0]
    assert replayed["accepted"] == written["outcomes"][0]["accepted"] and not replayed["passes"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--samples", "0"],
        ["--samples", "many"],
        ["--jobs", "0"],
        ["--minutes", "0"],
        ["--seed", "-1"],
        ["--only", "99"],
        ["--json", "no/such/folder/x.json"],
        ["--loud"],
        ["mend"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and len(streams.err.splitlines()) == 1 and "expected" in streams.err


def test_a_limit_of_minutes_takes_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(command, "_seconds_each", lambda configuration: 0.5)
    monkeypatch.setattr(command, "_sample", lambda chosen, samples, *rest: asked.append(samples) or True)
    for minutes in ([], ["--minutes", "2"]):
        assert command.main(["--only", "0", "1", "--jobs", "2", *minutes]) == 0
    assert asked == [400_000, 240]


def test_mining_by_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(pairs, "mine", lambda name, seed: pairs.stored()[name] if seed == 3 else None)
    monkeypatch.setattr(pairs, "store", made.extend)
    assert command.main(["mine", "--seed", "3"]) == 0
    assert made == list(pairs.stored().values()) and "M16" in capsys.readouterr().out
