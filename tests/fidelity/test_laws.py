"""R0: the exact law of whole generations out of the real decode loop, EOS and the length limit included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.laws import definition, sequences, tv
from specdecode_ref.fidelity.loop import generated
from specdecode_ref.fidelity.suite import COMBINED, EXACT, RULES, setup
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context

EVERY: dict[str, Any] = {**RULES, **COMBINED}


@pytest.mark.parametrize("rule", EVERY)
@pytest.mark.parametrize("drafter", ["chain", "ngram", "hybrid"])
def test_every_rule_keeps_the_law(drafter: str, rule: str) -> None:
    case = setup(drafter, EVERY[rule])
    exact = generated(case)
    assert sum(exact.law.values()) == pytest.approx(1, abs=EXACT)
    assert tv(exact.law, case.target) < EXACT


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("tree with replacement", "plain"),
        ("tree without replacement", "plain"),
        ("tree with replacement", "all rules"),
        ("tree without replacement", "all rules, vllm"),
        ("siblings with replacement", "cool"),
        ("siblings with replacement", "top-k"),
        ("siblings with replacement", "frequency"),
        ("siblings with replacement", "greedy"),
        ("siblings without replacement", "greedy"),
        ("siblings without replacement", "top-p"),
        ("siblings without replacement", "min-p"),
        ("siblings without replacement", "presence"),
        ("siblings without replacement", "bad words"),
    ],
)
def test_trees_keep_the_law(drafter: str, rule: str) -> None:
    case = setup(drafter, EVERY[rule], seed=1)
    assert tv(generated(case).law, case.target) < EXACT


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [("chain", "plain"), ("chain", "all rules"), ("chain", "frequency"), ("ngram", "cool"), ("siblings", "presence")],
)
def test_match_keeps_the_law(drafter: str, rule: str) -> None:
    case = setup(drafter, EVERY[rule], verifier="match", seed=2)
    assert tv(generated(case).law, case.target) < EXACT


@pytest.mark.parametrize(
    ("drafter", "verifier", "rule"),
    [
        ("chain", "block", "plain"),
        ("chain", "block", "all rules"),
        ("ngram", "block", "plain"),
        ("chain", "traversal", "frequency"),
        ("siblings with replacement", "traversal", "plain"),
        ("siblings without replacement", "traversal", "presence"),
        ("siblings with replacement", "kseq", "plain"),
        ("chain", "onehot", "plain"),
        ("siblings without replacement", "onehot", "all rules, vllm"),
    ],
)
def test_every_lossless_verifier_keeps_the_law(drafter: str, verifier: str, rule: str) -> None:
    """Over several rounds, where coins that were looked at beyond the accepted path must not come back."""
    case = setup(drafter, EVERY[rule], verifier=verifier, seed=5)
    assert tv(generated(case, search=verifier == "kseq").law, case.target) < EXACT


@pytest.mark.parametrize("verifier", ["typical", "relaxed", "lenient"])
def test_lossy_verifiers_do_not(verifier: str) -> None:
    case = setup("chain", verifier=verifier, seed=5)
    assert tv(generated(case).law, case.target) > 0.01


@pytest.mark.parametrize(
    ("drafter", "stop"),
    [("chain", ("ab",)), ("chain", ("b", "aa")), ("ngram", ("ba",)), ("siblings with replacement", ("ab", "c"))],
)
def test_stop_strings_keep_the_law(drafter: str, stop: tuple[str, ...]) -> None:
    """A string may be completed inside an accepted draft, or over two rounds."""
    case = replace(setup(drafter, {"eos": ()}, seed=6), stop=stop)
    assert len({len(tokens) for tokens in case.target}) > 1
    assert tv(generated(case).law, case.target) < EXACT


def test_a_larger_vocabulary() -> None:
    case = setup("chain", vocab=5)
    exact = generated(case)
    assert len(exact.law) == 1 + 4 + 4 * 4 * 5
    assert tv(exact.law, case.target) < EXACT


def test_the_rule_for_trees_on_a_chain() -> None:
    case = setup("chain", verifier="tree", seed=3)
    assert tv(generated(case).law, case.target) < EXACT


def test_no_end_of_text() -> None:
    case = setup("chain", {"eos": ()}, seed=4)
    exact = generated(case)
    assert len(exact.law) == 3**3
    assert tv(exact.law, case.target) < EXACT


@pytest.mark.parametrize("rule", EVERY)
def test_every_rule_changes_the_law(rule: str) -> None:
    """Otherwise the tests above would say nothing about it."""
    if rule != "plain":
        assert tv(setup("ngram", EVERY[rule]).target, setup("ngram").target) > 0.01


def test_rules_of_one_name_mean_different_things_in_the_two_orders() -> None:
    assert tv(*(setup("ngram", rule).target for rule in COMBINED.values())) > 1e-3


def test_the_drafts_matter_to_the_rounds_and_not_to_the_law() -> None:
    results = [generated(setup(name)) for name in ("chain", "ngram", "hybrid")]
    assert all(1 < r.rounds < 3 and r.accepted > 0 for r in results)
    assert len({round(r.rounds, 6) for r in results}) == 3


def test_the_target_is_the_product_of_its_conditionals() -> None:
    model = TableModel.random(3, order=2, seed=0)
    law = sequences(definition(model, (0,), SamplingRule()), 3, eos=(2,))
    first = model.logits_after([0]).softmax(-1)
    second = model.logits_after([0, 1]).softmax(-1)
    assert law[1, 2] == pytest.approx(float(first[1] * second[2]))
    assert (2,) in law and (1, 2, 0) not in law and sum(law.values()) == pytest.approx(1)


def test_a_coin_of_another_round_is_refused() -> None:
    """Keys that ignore the round would couple rounds that must be independent."""

    class Proposer:
        def propose(self, context: Context, coins: Any) -> DraftTree:
            coins.draft(4, 1)
            return DraftTree.bare(context.root)

        def observe(self, *args: Any) -> None: ...

    class Stubborn(NGram):
        """Reads the first round's coin in every round."""

        def start(self, *args: Any) -> Any:
            return Proposer()

    with pytest.raises(FidelityError, match="round"):
        generated(replace(setup("ngram"), drafter=Stubborn()))
