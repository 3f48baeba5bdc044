"""What `conformance.examine` does inside the child process: the rungs, one after another, until a verdict is certain.

First how the verifier reads its coins and what it judges; D: contract and boundaries; R1 is in `exact`; R2: sampled
generations over many rounds. Then everything that was kept is asked again in another order. The first rung that fails
gives the verdict.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdecode_ref.fidelity.boundaries import LAST
from specdecode_ref.fidelity.conformance import cases, demands, rounds
from specdecode_ref.fidelity.conformance.adapters import Engine
from specdecode_ref.fidelity.conformance.cases import CERTAIN, WITH, WITHOUT, Case, Shape
from specdecode_ref.fidelity.conformance.contract import Breach, OutOfTime, Question, Refusal
from specdecode_ref.fidelity.conformance.state import State, random_question
from specdecode_ref.fidelity.statistics import Gate
from specdecode_ref.tree import DraftTree


def both_kinds(state: State) -> list[str]:
    """Which of chains and trees are to be judged. Without an order, what the verifier does with trees decides."""
    kind = state.plan.kind
    if state.asker.chains_only or kind == "chain":
        return ["chain"]
    if kind in ("tree", "both"):
        return ["chain", "tree"]
    reason = _no_trees(state)
    if reason:
        state.notes.append(f"trees were not judged: {reason}; ask for kind='tree' to insist")
        return ["chain"]
    return ["chain", "tree"]


def _no_trees(state: State) -> str:
    """Why the verifier is taken for one of chains, or nothing: it refuses every tree, or reads its nodes as a chain."""
    law = torch.full((3,), 1 / 3, dtype=torch.float64)
    reasons = []
    for draw in state.plan.draws:
        for parents in ((-1, 0, 0), (-1, 0, 0, 1)):
            q = tuple(law if node in parents and draw != CERTAIN else None for node in range(len(parents)))
            draft = DraftTree((0, 1, 2, 0)[: len(parents)], parents, (None, *[draw] * (len(parents) - 1)), q)
            question = Question(draft, law.expand(len(parents), 3).contiguous(), (0.0,) * len(parents), (0.5,) * 3)
            try:
                state.asker.ask([question])
                return ""
            except Refusal as refusal:
                reasons.append(f"it refuses them ({refusal})")
            except Breach as breach:
                if breach.name not in ("raises", "not a path"):
                    return ""
                reasons.append(
                    f"it {breach.name if breach.name == 'raises' else 'reads a tree as a chain'} ({breach.detail})"
                )
    return reasons[0]


def reading(state: State) -> None:
    """Lazy coins if the verifier can do with any sequence; lists, all of them taken to be read, if not."""
    asker: Any = state.asker
    if not hasattr(asker, "lazy"):
        asker.settle()
        return
    rng = random.Random(state.plan.seed)
    drawn = [draw for draw in (WITH, CERTAIN) if draw in state.plan.draws] or [WITHOUT]
    whole: list[bool] = []
    for draw in drawn:
        case = cases.case(Shape.chain(draw, draw), "smooth", 3, 0)
        for _, draft in case.drafts():
            question = random_question(case, draft, rng)
            outcomes = []
            for asker.lazy in (True, False):
                try:
                    answer = asker.put(question)
                    outcomes.append(answer.outcome)
                    if asker.lazy:
                        whole.append(sum(key >= len(draft) for key in answer.reads) == draft.depth + 1)
                except (Breach, Refusal) as error:
                    outcomes.append((type(error), str(error)))
            if outcomes[0] != outcomes[1]:
                state.notes.append("it does not read the coins as a plain sequence: all of them count as read")
                state.reads_all = True
                return
    asker.lazy = True
    state.reads_all = all(whole)


def steady(state: State) -> None:
    """Raises Breach where the very first answers cannot be had again, or the laws have changed meanwhile."""
    rng = random.Random(state.plan.seed)
    for draw in state.plan.draws:
        case = cases.case(Shape.chain(draw, draw), "smooth", 3, 1)
        questions = [random_question(case, draft, rng) for _, draft in case.drafts() for _ in range(3)]
        try:
            answers = state.asker.ask(questions)
        except Refusal:
            continue
        state.asker.check_inputs()
        asked = list(zip(questions, answers, strict=True))
        demands.check_repeatable(state.asker, asked, state.plan.seed)
        state.kept += asked


def sample_cases(state: State, kinds: Sequence[str]) -> list[tuple[Case, int]]:
    """What rung R2 generates from, and how many tokens."""
    plan, out = state.plan, []
    drawn = [draw for draw in (WITH, WITHOUT, CERTAIN) if draw in plan.draws]
    first = drawn[0]
    shapes = [Shape.chain(first, first)]
    if "tree" in kinds:
        shapes.append(Shape.tree((0, 0, 1), drawn[-2:][0]))
    for number, shape in enumerate(shapes):
        if str(shape) not in state.refused:
            out.append((cases.case(shape, "smooth", min(plan.vocab, 3), plan.seed * 1000 + 900 + number), 4))
    return out


@dataclass(frozen=True)
class Sample:
    """R2 in numbers: the largest over its cases."""

    n: int = 0
    tv: float = 0.0
    radius: float = 0.0
    text: str = ""
    worst: tuple[dict[str, Any], ...] = ()


def in_numbers(gate: Gate, what: str) -> Sample:
    """A gate's verdict as the report has it."""
    cells = [{"tokens": list(c.cell), "came": c.seen / gate.n, "due": c.owed / gate.n} for c in gate.worst]  # type: ignore[call-overload]
    return Sample(gate.n, gate.tv, gate.radius, f"{what}\n{gate}", tuple(cells))


def rung_sampled(state: State, kinds: Sequence[str]) -> tuple[bool, Sample]:
    """R2: whether every sample may have the target's law, and its numbers."""
    worst = Sample()
    state.asker.deadline.share = 0.9
    wanted = sample_cases(state, kinds)
    for number, (case, length) in enumerate(wanted):
        if not state.plan.mine(number):
            continue
        usual = 3000 if state.unresolved <= state.tolerance else 40_000
        count = max(1000, (state.plan.samples or usual) // len(wanted))
        try:
            sampled = rounds.sampled(state.asker, case, length, count, state.plan.seed)
        except Refusal as refusal:
            state.refused[str(case.shape)] = str(refusal)
            continue
        except OutOfTime:
            state.notes.append("out of time before the samples were complete")
            return True, worst
        state.asker.check_inputs()
        state.kept += sampled.kept
        here = in_numbers(sampled.gate, str(case))
        worst = here if sampled.rejects else max(worst, here, key=lambda s: s.tv)
        if sampled.rejects:
            return False, worst
    return True, worst


def boundaries(state: State) -> None:
    """Rung D: raises Breach."""
    last = LAST if not state.asker.chains_only else 1 - 2.0**-24
    demands.check_demands(state.asker, last, state.plan.draws)


def rows_apart(state: State, engine: Engine) -> None:
    """Raises Breach where a row's answer depends on the rest of its batch or on what lies behind its draft."""
    rng = random.Random(state.plan.seed)
    for draw in state.plan.draws:
        questions = []
        for depth in (0, 1, 2, 3):
            case = cases.case(Shape.chain(*[draw] * depth), "smooth", 4, depth)
            questions += [random_question(case, draft, rng) for _, draft in case.drafts()[:40]]
        laws = draw == WITH
        demands.check_rows(engine, questions, laws)


def again(state: State) -> None:
    """What was kept, asked again: raises Breach where an answer is another one now."""
    state.asker.deadline.share = 1.0
    rng = np.random.default_rng(state.plan.seed)
    chosen = [state.kept[i] for i in rng.permutation(len(state.kept))[:300]]
    demands.check_repeatable(state.asker, chosen, state.plan.seed)
