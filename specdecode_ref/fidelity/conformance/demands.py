"""Rung D of the conformance kit: what holds for every lossless verifier, whatever its rule, at the edges of float64.

`boundaries` asks the same of this package's own rules and may ask for more. Here nothing is assumed of the rule: a
token that the target excludes never comes out, a certain target has its way, a row of NaN becomes no token, and the
same input has the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from specdecode_ref.fidelity.conformance.adapters import Engine
from specdecode_ref.fidelity.conformance.cases import CERTAIN, WITH
from specdecode_ref.fidelity.conformance.contract import (
    Answer,
    Asker,
    Breach,
    Question,
    Refusal,
    shuffle_global_generators,
)
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw

NAN = float("nan")


class Demand(NamedTuple):
    """One question, and what to say if the answer is not allowed."""

    name: str
    due: str
    question: Question
    allowed: Callable[[Answer], bool]


def _law(*mass: float) -> torch.Tensor:
    return torch.tensor(mass, dtype=torch.float64)


def _possible(question: Question) -> Callable[[Answer], bool]:
    """Every token that comes out has mass under the target's law at its place."""

    def allowed(answer: Answer) -> bool:
        tokens = answer.tokens(question.draft)
        return all(float(question.p[node][x]) > 0 for node, x in zip(answer.path, tokens, strict=True))

    return allowed


def _asked(draft: DraftTree, p: Sequence[torch.Tensor], u: float, emit: float) -> Question:
    rows = torch.stack([p[min(node, len(p) - 1)] for node in range(len(draft))])
    return Question(draft, rows, (0.5, *[u] * (len(draft) - 1)), (emit,) * (draft.depth + 1))


def demands(last: float, draws: Sequence[Draw]) -> Iterator[Demand]:
    """All demands on chains of at most one token. last: the largest coin there is."""
    never = "the target excludes it"
    for emit in (0.0, last):
        for p in (_law(0, 0.3, 0.7, 0), _law(0.3, 0.7), _law(*[0.1] * 10), _law(0, 0, 1, 0)):
            question = _asked(DraftTree.bare(0), [p], 0.5, emit)
            yield Demand("emits the impossible", never, question, _possible(question))
    tiny = 1e-31
    pairs = [
        (_law(0, 0.25, 0.75), _law(0.5, 0.5, 0), (0, 1)),
        (_law(0.1, 0.2, 0.7), _law(0.1, 0.2, 0.7), (0, 1, 2)),
        (_law(0.5, 0.25, 0.25), _law(0, 1, 0), (1,)),
        (_law(0, 0.5, 0.5 - 2.0**-53), _law(0, 0.5, 0.5), (1, 2)),
        (_law(0, 1 - 2.0**-53, 2.0**-54), _law(0, 1, 0), (1,)),
        (_law(0, 1, tiny), _law(0, 1, 0), (1,)),
        (_law(0, 0.5, 0.5), _law(0, 0.5 + tiny, 0.5), (1, 2)),
    ]
    for u in (0.0, last):
        for emit in (0.0, 0.5, last):
            for p, q, tokens in pairs:
                for x in tokens:
                    for law in ((q,), None):
                        if (WITH if law else CERTAIN) in draws:
                            question = _asked(DraftTree.chain(0, (x,), law), [p, p], u, emit)
                            yield Demand("emits the impossible", never, question, _possible(question))
            if WITH in draws:
                yield from _certainty(u, emit)
            if CERTAIN in draws:
                a, b = _law(0, 1, 0), _law(0, 0, 1)
                for x in (0, 1, 2):
                    question = _asked(DraftTree.chain(0, (x,)), [a, b], u, emit)
                    yield Demand("emits the impossible", "the target is certain", question, _possible(question))


def _certainty(u: float, emit: float) -> Iterator[Demand]:
    """One-hot laws: agreement and disagreement."""
    a, b = _law(0, 1, 0), _law(0, 0, 1)
    for p in ([a, b], [b, a]):
        question = _asked(DraftTree.chain(0, (1,), (a.clone(),)), p, u, emit)
        yield Demand("emits the impossible", "the target is certain", question, _possible(question))


def check_demands(asker: Asker, last: float, draws: Sequence[Draw]) -> int:
    """Raises Breach at the first demand that is not met; how many there were."""
    count = 0
    for demand in demands(last, draws):
        try:
            (answer,) = asker.ask([demand.question])
        except Refusal:
            continue
        count += 1
        if not demand.allowed(answer):
            emitted = list(answer.tokens(demand.question.draft))
            raise Breach(demand.name, f"tokens {emitted} came out, though {demand.due}", demand.question, answer.said)
    return count


def nan_becomes_a_token(asker: Asker, draws: Sequence[Draw]) -> str | None:
    """A remark where a row of NaN becomes a token; any exception is as good as a refusal."""
    nan, good = _law(NAN, NAN, NAN), _law(0.2, 0.3, 0.5)
    questions = [_asked(DraftTree.bare(0), [nan], 0.5, 0.5)]
    if WITH in draws:
        questions.append(_asked(DraftTree.chain(0, (1,), (good,)), [nan, good], 0.5, 0.5))
    if CERTAIN in draws:
        questions.append(_asked(DraftTree.chain(0, (1,)), [nan, good], 0.5, 0.5))
    for question in questions:
        try:
            (answer,) = asker.ask([question])
        except (Breach, Refusal):
            continue
        emitted = list(answer.tokens(question.draft))
        return f"NaN becomes a token: {emitted} came out of a row of NaN, which had better raise (min(1, nan) is 1)"
    return None


def check_repeatable(asker: Asker, asked: Sequence[tuple[Question, Answer]], seed: int = 0) -> None:
    """Ask again what was asked before, in another order and with other states of the global generators.

    Raises Breach where an answer differs: the verifier has randomness of its own, or remembers something.
    """
    order = sorted(range(len(asked)), key=lambda i: (i * 7919 + seed) % 10007)
    for i in order:
        question, before = asked[i]
        shuffle_global_generators(seed + i)
        (now,) = asker.ask([question])
        if now.outcome == before.outcome:
            continue
        came = set()
        for k in range(6):
            shuffle_global_generators(seed + 31 * i + k)
            came.add(asker.ask([question])[0].outcome)
        both = f"{before.outcome} came first, then {now.outcome}"
        if len(came) > 1:
            raise Breach("hidden randomness", f"the same input has several answers: {both}", question, now.said)
        raise Breach("state across calls", f"the answer depends on earlier calls: {both}", question, now.said)


def check_rows(engine: Engine, questions: Sequence[Question], laws: bool) -> None:
    """Raises Breach where a row of a batch answers otherwise alone, in another batch, or behind other padding."""
    n = len(questions)
    together = engine.batch(questions, laws)
    order = sorted(range(n), key=lambda i: (i * 7919) % 10007)
    others = dict(zip(order, engine.batch([questions[i] for i in order], laws, width=6), strict=True))
    for i, question in enumerate(questions):
        width = len(question.draft) - 1
        alone = {engine.batch([question], laws, width=w)[0].outcome for w in (width, width, width + 2, width + 2)}
        found = {together[i].outcome, others[i].outcome, *alone}
        if len(alone) > 1:
            came = f"the same row, alone, has the answers {sorted(alone)}, with K = {width} and with K = {width + 2}"
            raise Breach("reads the padding", came, question)
        if len(found) > 1:
            came = f"the same row has the answers {sorted(found)} in different batches"
            raise Breach("mixes rows", came, question)
    for turn in range(1, n, max(1, n // 12)):  # another row comes first, and another last
        turned = engine.batch([questions[(i + turn) % n] for i in range(n)], laws)
        for i, answer in enumerate(turned):
            if answer.outcome != together[(i + turn) % n].outcome:
                came = f"the same row has the answers {together[(i + turn) % n].outcome} and {answer.outcome}"
                raise Breach("mixes rows", f"{came} at other places of a batch", questions[(i + turn) % n])
