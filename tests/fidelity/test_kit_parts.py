"""Parts of the conformance kit on their own: which finding wins, how a law is called, and what must be asked."""

from __future__ import annotations

import pytest

from specdecode_ref.fidelity import mutants
from specdecode_ref.fidelity.conformance import cases, exact, examine, naming
from specdecode_ref.fidelity.conformance.report import NOT, Report, joined
from specdecode_ref.fidelity.laws import emitted, sequences, tv
from specdecode_ref.fidelity.private import planted


def test_a_wrong_law_outweighs_what_the_boundaries_say() -> None:
    """Processes share the cases: one that saw only the boundary must not hide what another saw."""
    fine, edge = Report("lossless", laws=3), Report("emits the impossible", rung="D")
    law, slow = Report(NOT, rung="D", tv=0.2, laws=4), Report("too slow", rung="R2")
    assert joined([fine, slow]).verdict == "too slow"
    assert joined([slow, edge]).verdict == "emits the impossible"
    found = joined([edge, fine, law])
    assert (found.verdict, found.tv, found.laws) == (NOT, 0.2, 7)


def test_a_law_is_called_by_its_bug_or_by_none() -> None:
    case = cases.case(cases.Shape.chain(cases.WITH), "smooth", 3, 0)
    with mutants.get("M02").plant() as package:
        wrong = emitted(package("verify").get("chain"), case.p, case.drafts(), search=True)
    name = naming.best_fit([(case, wrong)])
    assert name is not None and name.startswith("M02")
    right = sequences(case.p, 2)
    strange = dict(zip(right, reversed(right.values()), strict=True))
    assert tv(strange, right) > 0.1 and naming.best_fit([(case, strange)]) == "none of the known ones"


@pytest.mark.parametrize(
    ("shape", "vocab", "old", "new"),
    [
        (
            cases.Shape.tree((0, 1, 1), cases.WITHOUT),
            3,
            "for child in draft.children[node]:",
            "for child in draft.children[node][:: -1 if node else 1]:",
        ),
        (
            cases.Shape.tree((0, 0, 0), cases.WITHOUT),
            4,
            "p_eff = residual(p_eff, q_eff)",
            "p_eff = residual(p_eff, q_eff) if child < 3 else p_eff",
        ),
    ],
    ids=["siblings reversed below the root", "p not updated after the third sibling"],
)
def test_second_levels_and_third_siblings_show_their_bugs(shape: cases.Shape, vocab: int, old: str, new: str) -> None:
    """With fewer tokens, what is left after the rejections is a point mass, and both would pass."""
    asked = {(s, v) for s, _, v in cases.trees(5, (cases.WITH, cases.WITHOUT, cases.CERTAIN))}
    assert (shape, vocab) in asked
    distances = []
    with planted("verify/tree.py", old, new) as package:
        for seed in range(3):
            case = cases.case(shape, "smooth", vocab, seed)
            law = emitted(package("verify").get("tree"), case.p, case.drafts(), search=True)
            distances.append(tv(law, sequences(case.p, shape.depth + 1)))
    assert max(distances) > 1e-3


def test_a_bug_that_ignores_a_coin_has_an_example() -> None:
    with mutants.get("M05").plant() as package:
        report = examine(package("verify.chain").verify, kind="chain", draws=("with_replacement",), samples=1000)
    assert report.example is not None and report.example["came"] != report.example["due"]


def test_the_worst_cells_come_first() -> None:
    worst = exact.worst_cells({(0,): 0.5, (1,): 0.5}, {(0,): 0.4, (1,): 0.35, (2,): 0.25})
    assert [cell["tokens"] for cell in worst] == [[2], [1], [0]]
