"""Rung R1 of the conformance kit: the exact law on every case, and what is to be said where it is wrong.

The laws come from `survey`. The smallest case that fails gives the example, and telling ones the name of the bug.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import torch

from specdecode_ref import verify as rules
from specdecode_ref.fidelity.conformance import cases
from specdecode_ref.fidelity.conformance.cases import CERTAIN, Case, Shape
from specdecode_ref.fidelity.conformance.contract import Breach, OutOfTime, Question, Refusal
from specdecode_ref.fidelity.conformance.naming import best_fit
from specdecode_ref.fidelity.conformance.state import EXACT, MIXED, ROUNDED, State, random_question
from specdecode_ref.fidelity.conformance.survey import Found, Surveyor, surveyed
from specdecode_ref.fidelity.laws import Law, add_completed, sequences, tv
from specdecode_ref.tree import DraftTree

WIDE = 20
"""With more tokens than this, a law that cannot be resolved says nothing about the others."""

ENOUGH = 2.0
"""Seconds that are spent on further cases, for a larger distance, once one has failed."""

TELLING = 9
"""So many drafts tell the known bugs apart, and are not too many to try them all on."""


def plan_cases(state: State, kinds: Sequence[str]) -> Iterator[Case]:
    """The cases of rung R1 in their order: all small ones first."""
    plan = state.plan
    wanted = list(cases.chains(plan.vocab, plan.gamma, plan.draws))
    if "tree" in kinds:
        wanted += cases.trees(plan.vocab, plan.draws)
    if state.asker.chains_only:
        wanted = [w for w in wanted if len(set(w[0].draws[1:])) < 2]
    engine = state.asker.chains_only
    if state.reads_all or engine:  # where all coins count as read, each one multiplies the boxes
        wanted = [
            (shape, values, v if CERTAIN in shape.draws else min(v, 17))
            for shape, values, v in wanted
            if shape.depth < 7 or (engine and CERTAIN in shape.draws)
        ]
    if not engine:  # a verifier that copies its emit coins has a box for every pair of tokens
        wanted = [(shape, values, min(v, 31)) for shape, values, v in wanted]
    first = (Shape.chain(plan.draws[0]), "smooth", 5)  # says whether the verifier rounds to float32
    for number, (shape, values, vocab) in enumerate([first, *wanted]):
        if number == 0 or plan.mine(number):
            yield cases.case(shape, values, vocab, plan.seed * 1000 + number)


def exact_law(state: State, case: Case) -> tuple[Law, list[tuple[float, DraftTree]], list[Found]]:
    """The law of one round on a case, completed by the target, with what was found on each draft."""
    proposals = case.drafts()
    rng = random.Random(state.plan.seed * 7919 + state.cases)
    found: dict[int, Found] = {}
    for grid, settings in ((4, 2) if state.reads_all else (6, 3), (16, 4)):
        todo = [i for i in range(len(proposals)) if i not in found or found[i].unresolved]
        if not todo:
            break
        starts = [(i, random_question(case, proposals[i][1], rng)) for i in todo]
        finer = state.cases % len(proposals)  # one draft of each case is looked at more closely
        surveys = [
            Surveyor(state.asker, start, rng, state.sources, 32 if i == finer else grid, settings).run()
            for i, start in starts
        ]
        found |= dict(zip(todo, surveyed(state.asker, surveys), strict=True))
    state.asker.check_inputs()
    law: Law = {}
    length = case.shape.depth + 1
    for i, (weight, draft) in enumerate(proposals):
        for (path, token), volume in found[i].law.items():
            tokens = (*(draft.tokens[node] for node in path[1:]), token)
            add_completed(law, case.p, length, weight * volume, tokens)
    return law, proposals, [found[i] for i in range(len(proposals))]


def check_spent(state: State, draft: DraftTree, found: Found) -> None:
    """Raises Breach where the outcome depends on an emit coin that the next round reads again.

    Given any outcome, such a coin must still be uniform.
    """
    shares: dict[Any, list[tuple[float, float, float]]] = {}
    for box in found.boxes:
        for key, span in box.spans.items():
            if key >= len(draft) and state.asker.unspent(key, box.answer, draft):
                shares.setdefault((box.answer.outcome, key), []).append((span.left, span.right, box.volume))
    for (outcome, key), spans in shares.items():
        ends = sorted({end for left, right, _ in spans for end in (left, right)})
        total = sum(volume for _, _, volume in spans)
        off = 1.0 - (ends[-1] - ends[0])
        for left, right in pairwise(ends):
            mass = sum(v * (right - left) / (b - a) for a, b, v in spans if a <= left and right <= b)
            off += abs(mass / total - (right - left))
        if off > 1e-6 and total > 1e-6 and found.unresolved == 0:
            box = next(b for b in found.boxes if b.answer.outcome == outcome and key in b.spans)
            coins = [box.spans[k].u if k in box.spans else 0.5 for k in range(len(draft) + draft.depth + 1)]
            depth = key - len(draft)
            raise Breach(
                "correlates rounds",
                f"the outcome {outcome} depends on the emit coin {depth}, which the next round reads again",
                Question(draft, torch.empty(0), tuple(coins[: len(draft)]), tuple(coins[len(draft) :])),
            )


def measure(state: State, case: Case) -> bool:
    """R1 on one case: True where its law is the target's."""
    law, proposals, found = exact_law(state, case)
    target = sequences(case.p, case.shape.depth + 1)
    distance = tv(law, target)
    unresolved = sum(w * f.unresolved for (w, _), f in zip(proposals, found, strict=True))
    width = sum(w * f.width for (w, _), f in zip(proposals, found, strict=True))
    for (_, draft), one in zip(proposals, found, strict=True):
        try:
            check_spent(state, draft, one)
        except Breach as breach:
            assert breach.question is not None
            q = breach.question
            breach.question = Question(draft, case.rows(draft), q.accept, q.emit)
            raise
    if unresolved > MIXED and case.vocab > WIDE:
        state.notes.append(f"too many boxes for an exact law: {case}")
        return True
    state.cases += 1
    state.judged[str(case.shape)] = None
    state.width, state.unresolved = max(state.width, width), max(state.unresolved, unresolved)
    if case.values == "smooth" and EXACT < distance <= ROUNDED:
        state.tolerance = ROUNDED
    wrong = unresolved <= MIXED and distance - unresolved > max(
        state.tolerance, ROUNDED if state.asker.chains_only else 0
    )
    if distance > state.tv:
        state.tv, state.largest = distance, (distance, str(case))
    if wrong:
        state.worst = state.worst or worst_cells(law, target)
        state.failed.append((case, law, proposals, found))
    return not wrong


def worst_cells(law: Law, target: Law) -> list[dict[str, Any]]:
    """The five sequences that are furthest from what is due."""
    cells = sorted(law.keys() | target.keys(), key=lambda c: (-abs(law.get(c, 0.0) - target.get(c, 0.0)), c))
    return [{"tokens": list(c), "came": law.get(c, 0.0), "due": target.get(c, 0.0)} for c in cells[:5]]


def smallest_example(state: State) -> dict[str, Any] | None:
    """The input of the largest box of the first failing case on which the reference answers otherwise."""
    case, law, proposals, found = state.failed[0]
    target = sequences(case.p, case.shape.depth + 1)
    best: tuple[float, dict[str, Any]] | None = None
    for (weight, draft), one in zip(proposals, found, strict=True):
        rows = case.rows(draft)
        for box, share in product(one.boxes, (0.5, 0.1, 0.9)):  # a coin that it ignores may be one that matters
            coins = [
                box.spans[k].left + share * (box.spans[k].right - box.spans[k].left) if k in box.spans else share
                for k in range(len(draft) + draft.depth + 1)
            ]
            question = Question(draft, rows, tuple(coins[: len(draft)]), tuple(coins[len(draft) :]))
            answer = due(question)
            came = {"path": list(box.answer.path), "token": box.answer.token}
            if answer == came:
                continue
            tokens = box.answer.tokens(draft)
            ahead = sum(m - target.get(c, 0.0) for c, m in law.items() if c[: len(tokens)] == tokens)
            score = weight * box.volume * (2.0 if ahead > 0 else 1.0)
            if best is None or score > best[0]:
                best = score, {**question.data(), "came": came, "due": answer}
    return best[1] if best else None


def name_the_bug(state: State) -> str | None:
    """The known bug whose laws on some of the failing cases are those that came."""
    small = [(c, law) for c, law, drafts, _ in state.failed if len(c.shape.parents) > 1 and len(drafts) < 30]
    small.sort(key=lambda found: abs(len(found[0].drafts()) - TELLING))
    return best_fit(small[:2], state.tolerance)


def rung_law(state: State, kinds: Sequence[str]) -> None:
    """R1 over all cases; those after the first failure only as long as there is time."""
    failed_at = 0.0
    state.asker.deadline.share = 0.6
    for case in plan_cases(state, kinds):
        if failed_at and time.monotonic() - failed_at > ENOUGH:
            return
        try:
            if not measure(state, case) and not failed_at:
                failed_at = time.monotonic()
            if state.unresolved > MIXED:
                state.notes.append("its coins are mixed too finely for an exact law: the verdict rests on samples")
                return
        except Refusal as refusal:
            state.refused[str(case.shape)] = str(refusal)
            whole_refusal(state, case)
        except OutOfTime:
            state.notes.append(f"out of time after {state.cases} exact laws")
            return
        except Breach:
            if failed_at:
                return
            raise


def whole_refusal(state: State, case: Case) -> None:
    """Raises Breach where only some drafts of a shape are refused: the tokens cannot be outside anyone's premises."""
    rng = random.Random(state.plan.seed)
    refused, judged = None, False
    for _, draft in case.drafts():
        if len(draft) == len(case.shape.parents):
            question = random_question(case, draft, rng)
            try:
                state.asker.ask([question])
                judged = True
            except Refusal:
                refused = question
    if refused and judged:
        raise Breach("refuses some drafts", f"of the shape: {case.shape}; others it judges", refused)


def due(question: Question) -> dict[str, Any] | None:
    """What recursive rejection, the rule of `chain` and `tree`, answers to the same input."""
    try:
        verdict = rules.get("tree")(question.draft, question.p, question.accept, question.emit)
    except Exception:
        return None
    return {"path": list(verdict.path), "token": verdict.token}
