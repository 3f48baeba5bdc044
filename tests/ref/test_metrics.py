"""The figures, on traces small enough to count by hand."""

from __future__ import annotations

import json

import pytest

from specdecode_ref.decode import autoregressive, speculative
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.metrics import FIGURES, Metrics, Seconds
from specdecode_ref.models.table import TableModel
from specdecode_ref.trace import CutRound, Emitted, Footer, Header, ModelInfo, Nodes, Round, Trace, counts

CHAIN = (-1, 0, 1, 2)
BARE = (-1,)


def trace(*rounds: tuple[tuple[int, ...], tuple[int, ...], CutRound | None], prefill: int = 0, total: int = 0) -> Trace:
    """A level 0 trace of (parents, path, cut); every round drafts for 1 ms, verifies for 4 and samples for 2."""
    made = []
    for index, (parents, path, cut) in enumerate(rounds):
        draws = (None, *["deterministic"] * (len(parents) - 1))
        ns = {"draft": 1_000_000, "verify": 4_000_000, "sample": 2_000_000}
        nodes = Nodes(parents, draws)  # type: ignore[arg-type]
        made.append(Round(index, 1, nodes, path, Emitted(None, "target"), cut=cut, ns=ns))  # type: ignore[arg-type]
    header = Header({}, "hand", "match", ModelInfo("t"), None, {}, 0, 0, {}, 9, (1,), 0)
    return Trace(header, tuple(made), Footer("length", counts(made), {"prefill": prefill, "total": total}))


FOUR_ROUNDS = trace(
    (CHAIN, (0, 1, 2, 3), None),  # all three accepted, and a bonus
    (CHAIN, (0, 1), None),  # the second is rejected
    (BARE, (0,), None),  # nothing drafted
    (CHAIN, (0,), None),  # the first is rejected
    prefill=3_000_000,
    total=35_000_000,
)


def test_a_chain_by_hand() -> None:
    m = Metrics.of(FOUR_ROUNDS)
    assert (m.rounds, m.drafts, m.drafted, m.accepted, m.emitted) == (4, 3, 9, 4, 8)
    assert m.acceptance_rate == 4 / 9
    assert m.tau == 8 / 4
    assert m.tau_without_bonus == 4 / 4
    assert m.mean_acceptance_length == 1 + 4 / 3
    assert m.accepted_per_position == (2, 1, 1)
    assert m.tested_per_position == (3, 2, 1)
    assert m.unconditional_rates == (2 / 3, 1 / 3, 1 / 3)
    assert m.conditional_rates == (2 / 3, 1 / 2, 1 / 1)


def test_seconds_by_hand() -> None:
    m = Metrics.of(FOUR_ROUNDS)
    assert m.seconds == Seconds(prefill=0.003, draft=0.004, verify=0.016, sample=0.008, total=0.035)
    assert m.tokens_per_second == pytest.approx(8 / 0.032)
    assert m.cost_ratio == pytest.approx(1 / 4)
    assert m.overhead_share == pytest.approx(12 / 32)
    assert m.draft_share == pytest.approx(4 / 32) and m.verify_share == pytest.approx(16 / 32)


@pytest.mark.parametrize(
    ("kept", "accepted", "tested"),
    [
        (1, (1,), (1,)),  # the first accepted token ended the text; the other two decided nothing
        (3, (1, 1, 1), (1, 1, 1)),
        (4, (1, 1, 1), (1, 1, 1)),  # the bonus ended it
    ],
)
def test_what_lies_beyond_the_end_is_drafted_and_never_accepted(
    kept: int, accepted: tuple[int, ...], tested: tuple[int, ...]
) -> None:
    m = Metrics.of(trace((CHAIN, (0, 1, 2, 3), CutRound("eos", kept))))
    assert (m.drafted, m.accepted, m.emitted) == (3, min(kept, 3), kept)
    assert m.accepted_per_position == accepted
    assert m.tested_per_position == tested


def test_an_accepted_token_that_ends_the_text_leaves_the_next_position_untested() -> None:
    m = Metrics.of(trace((CHAIN, (0, 1, 2), CutRound("stop", 1))))  # the verifier went on; the text did not
    assert (m.accepted, m.emitted, m.tested_per_position) == (1, 1, (1,))


def test_the_end_of_the_text_inside_a_rejected_draft() -> None:
    m = Metrics.of(trace((CHAIN, (0, 1), CutRound("eos", 2))))  # the residual's token was the EOS
    assert (m.accepted, m.emitted, m.tested_per_position) == (1, 2, (1, 1))


def test_positions_of_a_tree_are_depths() -> None:
    tree = (-1, 0, 0, 2, 2)
    m = Metrics.of(trace((tree, (0, 2, 4), None), (tree, (0, 1), None)))
    assert (m.drafted, m.accepted) == (8, 3)
    assert m.accepted_per_position == (2, 1)
    assert m.tested_per_position == (2, 1)  # node 1 has no children, so nothing was tested below it


def test_several_traces_are_weighted_by_their_rounds() -> None:
    short = trace((CHAIN, (0,), None), prefill=1_000_000, total=8_000_000)
    both = Metrics.of(FOUR_ROUNDS, short)
    assert (both.rounds, both.emitted, both.tau) == (5, 9, 9 / 5)
    assert both.seconds.total == pytest.approx(0.043)


def test_nothing_to_divide_by_is_none_not_a_crash() -> None:
    for m in (Metrics.of(), Metrics.of(trace((BARE, (0,), None)))):
        assert m.acceptance_rate is None
        assert m.mean_acceptance_length is None
        assert m.tokens_per_second is None
        assert m.unconditional_rates == m.conditional_rates == ()
        json.dumps(m.as_dict(), allow_nan=False)


def test_identities_on_a_real_decode() -> None:
    model = TableModel.random(4, seed=3)
    m = Metrics.of(speculative(model, NGram(gamma=5), [1, 2, 3], max_new_tokens=200).trace)
    assert m.emitted == 200
    assert m.drafts < m.rounds
    assert m.accepted + m.rounds == m.emitted  # no round was cut inside its draft
    assert sum(m.accepted_per_position) == m.accepted
    assert sum(m.unconditional_rates) == pytest.approx((m.mean_acceptance_length or 0) - 1)
    assert m.tested_per_position[0] == m.drafts
    assert all(a <= t for a, t in zip(m.accepted_per_position, m.tested_per_position, strict=False))
    assert m.seconds.draft + m.seconds.verify + m.seconds.sample <= m.seconds.total


def test_plain_decoding_emits_one_a_round() -> None:
    m = Metrics.of(autoregressive(TableModel.random(4), [1], max_new_tokens=7).trace)
    assert (m.rounds, m.drafts, m.emitted, m.tau) == (7, 0, 7, 1.0)


def test_every_figure_has_a_name_and_a_value() -> None:
    found = Metrics.of(FOUR_ROUNDS).as_dict()
    assert found.keys() == FIGURES.keys() | {"seconds"}
    assert all(figure.definition for figure in FIGURES.values())
