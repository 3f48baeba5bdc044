"""The bets' own proof: a fair game for a right sampler, to rounding, and a sure win against a wrong one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.stats import binom

from specdecode_ref import verify
from specdecode_ref.fidelity import mutants, suite
from specdecode_ref.fidelity.betting import NONE_KNOWN, Bets, known_laws, model_drafts, played
from specdecode_ref.fidelity.laws import Law, definition, drafts, emitted, sequences, tv
from specdecode_ref.fidelity.loop import Setup, generated
from specdecode_ref.fidelity.statistics import gate
from specdecode_ref.sampling import SamplingRule

P: Law = {(0,): 0.5, (1,): 0.3, (2,): 0.2, (3,): 0.0}
KNOWN: dict[str, Law] = {"p again": {(0,): 0.35, (1,): 0.39, (2,): 0.26}, "never 2": {(0,): 0.6, (1,): 0.4}}


def all_samples(n: int) -> Iterator[tuple[float, dict[tuple[int, ...], int]]]:
    """Every sample of n by its counts, with its probability under P."""
    for a in range(n + 1):
        for b in range(n + 1 - a):
            c = n - a - b
            ways = math.comb(n, a) * math.comb(n - a, b)
            yield ways * 0.5**a * 0.3**b * 0.2**c, {(0,): a, (1,): b, (2,): c}


@pytest.mark.parametrize("known", [{}, KNOWN], ids=["unknowing", "knowing"])
@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_the_game_is_fair(known: dict[str, Law], n: int) -> None:
    """The expected wealth of a right sampler is 1: exactly, over all samples."""
    wealth = sum(chance * math.exp(Bets(P, known).after(counts).log_wealth) for chance, counts in all_samples(n))
    assert wealth == pytest.approx(1, abs=1e-9)


def draws(law: Law, n: int, rng: np.random.Generator) -> dict[tuple[int, ...], int]:
    masses = np.array(list(law.values()))
    return dict(zip(law, rng.multinomial(n, masses / masses.sum()).tolist(), strict=True))


def test_looking_often_does_not_win() -> None:
    """Ville: of 400 right samplers, each looked at 12 times, hardly any ever shows a wealth of 100."""
    rng = np.random.default_rng(0)
    won = 0
    for _ in range(400):
        bets = Bets(P, KNOWN)
        for _ in range(12):
            bets = bets.after(draws(P, 20, rng))
        won += bets.rejects(1e-2)
    assert won <= binom.isf(1e-9, 400, 1e-2)


def test_batches_make_no_difference() -> None:
    rng = np.random.default_rng(1)
    batches = [draws(KNOWN["p again"], 50, rng) for _ in range(6)]
    bets = Bets(P, KNOWN)
    seen = [0.0]
    for batch in batches:
        bets = bets.after(batch)
        seen.append(bets.log_wealth)
    once = Bets(P, KNOWN).after(sum(map(Counter, batches), Counter()))
    assert bets.log_wealth == pytest.approx(once.log_wealth, abs=1e-9)
    assert bets.peak == max(seen)


def test_the_peak_stays() -> None:
    bets = Bets(P, KNOWN).after({(0,): 350, (1,): 390, (2,): 260})
    assert bets.rejects()
    later = bets.after({(0,): 5150, (1,): 2610, (2,): 1740})
    assert later.log_wealth < bets.log_wealth and later.peak == bets.peak and later.rejects()


def test_a_known_bug_is_named() -> None:
    bets = Bets(P, KNOWN).after(draws(KNOWN["p again"], 2000, np.random.default_rng(2)))
    assert bets.rejects() and bets.best_fit() == "p again"
    assert Bets(P, KNOWN).best_fit() == Bets(P).after({(0,): 9}).best_fit() == NONE_KNOWN


@pytest.mark.parametrize("known", [{}, KNOWN], ids=["unknowing", "knowing"])
def test_an_unknown_bug_loses_too_and_gets_no_name(known: dict[str, Law]) -> None:
    bug = {(0,): 0.6, (1,): 0.15, (2,): 0.25}
    bets = Bets(P, known).after(draws(bug, 2000, np.random.default_rng(3)))
    assert bets.rejects() and bets.best_fit() == NONE_KNOWN


def test_a_sample_that_the_law_excludes_wins_at_once() -> None:
    for cell in ((3,), (9,)):
        bets = Bets(P, KNOWN).after({(0,): 5, cell: 1})
        assert bets.log_wealth == math.inf and bets.rejects()


def _laws(setup: Setup) -> list:
    rule = SamplingRule(eos=setup.rule.eos)
    return [definition(model, setup.prompt, rule) for model in (setup.model, setup.drafter.model)]


@pytest.mark.parametrize("name", [None, "M02", "M16"])
def test_played_is_what_the_real_loop_does(name: str | None) -> None:
    def compare(package) -> None:
        setup = suite.setup("chain", package=package)
        p, q = _laws(setup)
        propose = model_drafts(q, suite.CHAIN, 3)
        mine = played(package("verify").get("chain"), p, propose, 3, setup.rule.eos, search=True)
        real = generated(setup, search=True)
        assert tv(mine.law, real.law) < 1e-12
        assert (mine.rounds, mine.accepted) == pytest.approx((real.rounds, real.accepted), abs=1e-12)

    if name is None:
        compare(suite.Package())
    else:
        with mutants.get(name).plant() as package:
            compare(package)


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [("chain", (("with_replacement",),)), ("tree", suite.SIBLINGS), ("traversal", suite.DISTINCT)],
    ids=["chain", "tree", "traversal"],
)
def test_known_laws(verifier: str, tree: tuple) -> None:
    """For drafts of one step they are the laws of one round, and only bugs that show are in."""
    p, q = _laws(suite.setup("chain"))
    known = known_laws(p, q, tree, verifier=verifier)
    assert known is known_laws(p, q, tree, verifier=verifier)
    target = sequences(p, 2)
    assert ("M01" in known) == ("M16" in known) == (verifier == "chain")
    assert ("M25" in known) == (verifier == "tree")
    assert not any(mutants.get(name).lossless for name in known)
    for law in known.values():
        assert tv(law, target) > 1e-9 and sum(law.values()) == pytest.approx(1)
    with mutants.get("M02").plant() as package:
        law = emitted(package("verify").get(verifier), p, drafts(q, tree), search=True)
    assert tv(law, known["M02"]) < 1e-12
    assert tv(played(verify.get(verifier), p, model_drafts(q, tree, 2), 2).law, target) < 1e-12


def test_both_gates_agree_on_a_mined_bug() -> None:
    p, q = _laws(suite.setup("chain"))
    known = known_laws(p, q, suite.CHAIN)
    target = sequences(p, 3)
    counts = draws(known["M12"], 4000, np.random.default_rng(4))
    bets = Bets(target, known).after(counts)
    assert gate(counts, target).rejects and bets.rejects() and bets.best_fit() == "M12"
