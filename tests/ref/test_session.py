"""A session: what the rows of a batch share, and what is left when it is interrupted."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_ref.coins import Coins
from specdecode_ref.decode import Session, Step
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.errors import NumericalError
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace_file import read_trace
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context
from tests.ref.test_decode import DRAFTERS, PROMPT, RULE, TARGET, Letters, everyone, valid

PROMPTS = [PROMPT, [0], [4, 4, 4, 4, 4, 4, 4, 4], [6, 5, 4], [3, 2]]


@everyone
@pytest.mark.parametrize("verifier", ["auto", "match"])
def test_a_batch_is_its_rows_alone(name: str, verifier: str) -> None:
    """Rows accept differently, end at different times and start at different lengths."""
    settings: dict[str, Any] = {
        "rule": SamplingRule(eos=(6,), repetition_penalty=1.2),
        "seed": 3,
        "max_new_tokens": 16,
        "verifier": verifier,
        "tokenizer": Letters(),
        "stop": ["abc"],
    }
    together = Session(TARGET, PROMPTS, DRAFTERS[name], **settings).run()
    alone = [
        Session(TARGET, [prompt], DRAFTERS[name], sequences=[i], **settings).run()[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    order = [3, 0, 4, 1, 2]
    shuffled = Session(TARGET, [PROMPTS[i] for i in order], DRAFTERS[name], sequences=order, **settings).run()
    for i, (a, b) in enumerate(zip(together, alone, strict=True)):
        c = shuffled[order.index(i)]
        assert a.tokens == b.tokens == c.tokens and a.text == b.text == c.text
        valid(a)
        assert [(r.path, r.tests, r.emitted, r.cut) for r in a.trace.rounds] == [
            (r.path, r.tests, r.emitted, r.cut) for r in b.trace.rounds
        ]
    assert len({len(a.trace.rounds) for a in together}) > 1


def test_a_cancelled_row_leaves_the_others_as_they_were() -> None:
    settings: dict[str, Any] = {"rule": RULE, "seed": 1, "max_new_tokens": 10, "tokenizer": Letters(), "stop": ["zz"]}
    for name, drafter in DRAFTERS.items():
        whole = Session(TARGET, PROMPTS, drafter, **settings).run()
        for when in (0, 1, 3):
            session = Session(TARGET, PROMPTS, drafter, **settings)
            if when == 0:
                session.cancel(1)
                session.cancel(4)
            for step in session:
                assert when or step.row not in (1, 4), name
                if when and step.row == 1 and step.round.index == when - 1:
                    session.cancel(1)
                    session.cancel(1)
                    session.cancel(4)
            for row, expected in enumerate(whole):
                got = valid(session.generation(row))
                if row in (1, 4):
                    assert got.tokens == expected.tokens[: len(got.tokens)] and expected.text.startswith(got.text)
                    assert len(got.trace.rounds) <= when or got.trace.footer.finish_reason != "cancelled"
                else:
                    assert got.tokens == expected.tokens, name


def test_everyone_may_be_cancelled() -> None:
    session = Session(TARGET, PROMPTS[:2], NGram(), max_new_tokens=5)
    for row in (0, 1):
        session.cancel(row)
    assert list(session) == []
    assert [valid(session.generation(row), "cancelled").tokens for row in (0, 1)] == [(), ()]


@everyone
def test_a_generation_may_be_asked_for_at_any_time(name: str) -> None:
    """What there is so far is the beginning of what there will be, and what was streamed is a beginning of its text."""
    settings: dict[str, Any] = {
        "rule": RULE,
        "seed": 2,
        "max_new_tokens": 20,
        "tokenizer": Letters(),
        "stop": ["abcabc"],
    }
    whole = Session(TARGET, PROMPTS[:2], DRAFTERS[name], **settings).run()
    session = Session(TARGET, PROMPTS[:2], DRAFTERS[name], **settings)
    assert valid(session.generation(), "cancelled").tokens == ()
    streamed = ["", ""]
    for step in session:
        streamed[step.row] += "".join(piece.text for piece in step.pieces)
        got = valid(session.generation(step.row))
        assert got.tokens == whole[step.row].tokens[: len(got.tokens)]
        assert whole[step.row].text.startswith(streamed[step.row])
        assert got.text == streamed[step.row]
    assert [session.generation(i).tokens for i in (0, 1)] == [result.tokens for result in whole]
    assert streamed == [result.text for result in whole]
    assert list(session) == [], "a session that ended stays ended"


def test_an_iteration_that_was_left_goes_on_where_it_was() -> None:
    for name, drafter in DRAFTERS.items():
        whole = Session(TARGET, [PROMPT], drafter, rule=RULE, max_new_tokens=20).run()[0]
        session = Session(TARGET, [PROMPT], drafter, rule=RULE, max_new_tokens=20)
        for _ in session:
            break
        for count, _ in enumerate(session):
            if count == 1:
                break
        assert session.run()[0].tokens == whole.tokens, name


class Fails:
    """A drafter that raises in its third round, when it proposes or when it observes."""

    name, features, vocab_size, settings = "fails", (), None, {}

    def __init__(self, error: BaseException, where: str) -> None:
        self.error, self.where = error, where

    def start(self, prompt: Any, rule: Any, features: Any = ()) -> Any:
        outer = self

        class Proposer:
            rounds = 0

            def propose(self, context: Context, coins: Coins) -> DraftTree:
                self.rounds += 1
                if outer.where == "propose" and self.rounds == 3:
                    raise outer.error
                return DraftTree.chain(context.root, (1, 2)[: context.room])

            def observe(self, verdict: Any, features: Any) -> None:
                if outer.where == "observe" and self.rounds == 3:
                    raise outer.error

        if self.where == "start":
            raise self.error
        return Proposer()


@pytest.mark.parametrize("where", ["start", "propose", "observe"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_what_was_decoded_before_an_error_is_a_valid_trace(error: BaseException, where: str) -> None:
    drafter: Any = Fails(error, where)
    session = Session(TARGET, PROMPTS[:3], drafter, rule=RULE, max_new_tokens=30, tokenizer=Letters())
    with pytest.raises(type(error)):
        session.run()
    rounds = 0 if where == "start" else 2
    for row in range(3):
        trace = session.generation(row).trace
        read = read_trace("".join(trace.lines()).encode())
        assert read == trace and len(read.rounds) == rounds and read.footer.finish_reason == "cancelled"
    if where != "start":
        assert list(session) == [], "no round can follow one that was torn apart"


def test_an_interrupt_between_two_steps_loses_nothing() -> None:
    def interrupted(session: Session) -> None:
        for count, _ in enumerate(session):
            if count == 4:
                raise KeyboardInterrupt

    whole = Session(TARGET, PROMPTS, DRAFTERS["tree"], rule=RULE, max_new_tokens=20).run()
    session = Session(TARGET, PROMPTS, DRAFTERS["tree"], rule=RULE, max_new_tokens=20)
    with pytest.raises(KeyboardInterrupt):
        interrupted(session)
    for row in range(len(PROMPTS)):
        valid(session.generation(row), "cancelled")
    assert [result.tokens for result in session.run()] == [result.tokens for result in whole]


def test_logits_that_break_down_leave_a_valid_trace() -> None:
    table = TARGET.table.clone()
    table[:, :, 0] = float("nan")  # whatever follows token 0
    session = Session(TableModel(table, TARGET.tilt), [[1, 2]], DRAFTERS["chain"], max_new_tokens=500, seed=1)
    with pytest.raises(NumericalError):
        session.run()
    assert valid(session.generation(), "cancelled").tokens[-1:] != ()


@everyone
def test_the_state_after_each_round_is_a_fresh_prefill(name: str) -> None:
    settings: dict[str, Any] = {"rule": RULE, "seed": 6, "max_new_tokens": 18}
    session = Session(TARGET, PROMPTS, DRAFTERS[name], **settings)
    for _ in session:
        tokens, positions = session._cache.planes
        for b, i in enumerate(session._live):
            committed = session._rows[i].tokens[:-1]
            assert session._cache.lengths[b] == len(committed)
            assert tokens[b, : len(committed)].tolist() == committed
            assert positions[b, : len(committed)].tolist() == list(range(len(committed)))


def test_a_step_is_a_round_of_one_row() -> None:
    steps: list[Step] = list(Session(TARGET, PROMPTS[:2], NGram(), max_new_tokens=6))
    for row in (0, 1):
        assert [s.round.index for s in steps if s.row == row] == list(range(sum(s.row == row for s in steps)))
