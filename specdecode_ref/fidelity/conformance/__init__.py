"""The conformance kit: is this verifier lossless? For code that is not ours; start here.

    from specdecode_ref.fidelity.conformance import assert_lossless
    assert_lossless(my_verify)

`examine` gives a `Report`: the verdict, the distance from the target's law with its bound, the first rung that fails,
and the smallest input that shows it. A verifier that raises, hangs, crashes, answers nonsense or has randomness of its
own is a finding with a name; it is run in child processes, one a core, so that it cannot take this one along.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from specdecode_ref import verify as rules
from specdecode_ref.errors import FidelityError, InputError
from specdecode_ref.fidelity.betting import Bets
from specdecode_ref.fidelity.conformance import demands, exact, examination, generators, isolation
from specdecode_ref.fidelity.conformance.adapters import Engine, roles
from specdecode_ref.fidelity.conformance.cases import CERTAIN, WITH, WITHOUT
from specdecode_ref.fidelity.conformance.contract import (
    Breach,
    Caller,
    Deadline,
    OutOfTime,
    Question,
    Refusal,
    Watch,
    shown,
)
from specdecode_ref.fidelity.conformance.naming import known_bugs
from specdecode_ref.fidelity.conformance.report import LOSSLESS, NOT, Report, joined
from specdecode_ref.fidelity.conformance.state import EXACT, ROUNDED, Plan, State
from specdecode_ref.types import Draw

Kind = Literal["chain", "tree", "both"]
MOST_PROCESSES = 4


def examine(
    verifier: Callable[..., Any] | str,
    *,
    kind: Kind | None = None,
    batched: bool = False,
    vocab: int = 5,
    gamma: int = 2,
    seed: int = 0,
    time_limit: float = 10.0,
    samples: int | None = None,
    draws: Sequence[Draw] | None = None,
    isolated: bool | None = None,
    name: str | None = None,
) -> Report:
    """Find out whether a verifier keeps the target's law.

    What must hold: the law of what is emitted; no token that the target excludes, at the edges of float64 either; the
    contract (inputs unchanged, coins of later rounds untouched, same input same answer). That a row of NaN becomes a
    token is a note and no failure: it is no law, but an engine had better refuse it.

    verifier:   verify(draft, p, accept_coins, emit_coins) -> Verdict or (path, token), see `verify.Verifier`; a name
                out of `verify.VERIFIERS` or "module:function"; with `batched` a function as in `adapters`.
    kind:       what it judges; "both" makes a refusal of chains or trees a finding. None: chains, and trees unless it
                refuses them.
    vocab, gamma: 2 to 64 tokens, chains of 1 to 8. Trees have at most 5 tokens and 5 nodes.
    time_limit: seconds that one call may take, after which it "hangs". The whole takes at most about three times as
                long, or 60 s if that is more.
    samples:    sequences of rung R2, 3,000 unless told; 800,000 for a function that takes a generator or a seed.
    draws:      how siblings may be drawn; all three ways unless told.
    isolated:   in a child process; None: where that is possible (POSIX, and CUDA not yet in use). Without it a crash
                or a hang is not survived.
    name:       what the report calls the verifier.

    Raises InputError for arguments that make no sense.
    """
    plan = _plan(kind, vocab, gamma, seed, samples, draws)
    if not 0 < time_limit < float("inf"):
        raise InputError("a time limit above 0 s", time_limit, "give seconds")
    function = load(verifier) if isinstance(verifier, str) else verifier
    if not callable(function):
        raise InputError("a callable verifier", shown(function), "pass a function, or a name of verify.VERIFIERS")
    if batched:
        if plan.kind in ("tree", "both"):
            raise InputError("kind 'chain' for a batched function", plan.kind, "leave kind out")
        roles(function)
    budget = max(60.0, 3 * time_limit)
    if name is None:
        name = verifier if isinstance(verifier, str) else getattr(verifier, "__qualname__", type(verifier).__name__)

    def work(part: int, parts: int, watch: Watch) -> Report:
        return _examined(function, replace(plan, part=part, parts=parts), batched, watch, Deadline(budget))

    begin = time.monotonic()
    if isolation.available() if isolated is None else isolated:
        parts = 1 if batched else min(_cores(), MOST_PROCESSES)
        works = [partial(work, part, parts) for part in range(parts)]
        reports = [_of_the_dead(found) for found in isolation.apart(works, time_limit)]
    else:
        reports = [isolation.here(partial(work, 0, 1))]
    return replace(joined(reports), verifier=str(name), seconds=round(time.monotonic() - begin, 3))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _of_the_dead(found: Any) -> Report:
    """The report on a child that did not come back."""
    if isinstance(found, isolation.Death):
        return Report(found.name, found.detail, "contract", example=found.question)
    report: Report = found
    return report


def assert_lossless(verifier: Callable[..., Any] | str, **settings: Any) -> Report:
    """`examine`, raising FidelityError with the whole report unless the verdict is "lossless". Settings as there."""
    report = examine(verifier, **settings)
    if not report.lossless:
        raise NotLosslessError(report)
    return report


class NotLosslessError(FidelityError):
    """A verifier that is not lossless; `report` says why."""

    def __init__(self, report: Report) -> None:
        super().__init__("a lossless verifier", f"'{report.verdict}'", "read the report")
        self.report = report

    def __str__(self) -> str:
        return self.report.text()


def replay(verifier: Callable[..., Any] | str, example: dict[str, Any], *, batched: bool = False) -> dict[str, Any]:
    """What the verifier answers to the example of a report: {"path", "token"}. Raises Breach as the contract does."""
    function = load(verifier) if isinstance(verifier, str) else verifier
    make: Any = Engine if batched else Caller
    asker = make(function, isolation.Unwatched(), Deadline(1e6))
    if batched:
        asker.settle()
    else:
        asker.lazy = False
    (answer,) = asker.ask([Question.of(example)])
    return {"path": list(answer.path), "token": answer.token}


def load(name: str) -> Any:
    """The verifier of that name, or "module:function". Raises InputError, or UnknownNameError for a name."""
    module, colon, attribute = name.partition(":")
    if not colon:
        return rules.get(name)
    try:
        found: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(
            f"a module {module!r} that can be imported",
            f"{type(error).__name__}: {error}"[:300],
            "mend it, or name another",
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"a function {attribute!r} in {module}", "none of that name", "check the spelling")
        found = getattr(found, part)
    return found


def _plan(
    kind: str | None, vocab: int, gamma: int, seed: int, samples: int | None, draws: Sequence[Draw] | None
) -> Plan:
    everything = (WITH, WITHOUT, CERTAIN)
    if kind not in (None, "chain", "tree", "both"):
        raise InputError("kind 'chain', 'tree' or 'both'", repr(kind), "or leave it out")
    for what, value, low, high in (("vocab", vocab, 2, 64), ("gamma", gamma, 1, 8), ("seed", seed, 0, 2**32)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{what} from {low} to {high}", repr(value), "choose a whole number in that range")
    if samples is not None and not 1000 <= samples <= 10**8:
        raise InputError("samples from 1000 to 10^8", samples, "leave it out for the usual number")
    chosen = tuple(everything if draws is None else draws)
    if not chosen or set(chosen) - set(everything):
        raise InputError(f"draws out of {', '.join(everything)}", list(chosen), "leave it out for all of them")
    return Plan(kind, vocab, gamma, seed, samples, chosen)


def _examined(function: Callable[..., Any], plan: Plan, batched: bool, watch: Watch, deadline: Deadline) -> Report:
    """The report, made where the verifier runs."""
    asker: Any = (Engine if batched else Caller)(function, watch, deadline)
    state = State(plan, asker, tolerance=ROUNDED if batched else EXACT)
    if batched:
        can = (WITH,) if asker.laws_required else (WITH, CERTAIN) if asker.takes_laws else (CERTAIN,)
        state.plan = plan = replace(plan, draws=tuple(draw for draw in can if draw in plan.draws) or can)
        if not asker.takes_coins:
            return _sampled_only(state, asker)
    rung, sample = "contract", examination.Sample()
    try:
        examination.reading(state)
        kinds = examination.both_kinds(state)
        if batched:
            examination.rows_apart(state, asker)
        rung = "repeat"
        examination.steady(state)
        found: Breach | None = None
        try:
            rung = "D"
            examination.boundaries(state)
        except Breach as breach:
            if breach.name != "emits the impossible":
                raise
            found = breach
        if not batched and (warning := demands.nan_becomes_a_token(asker, plan.draws)):
            state.notes.append(warning)
        rung = "R1"
        exact.rung_law(state, kinds)
        if state.failed:
            rung = "repeat"
            examination.again(state)  # a law may be wrong because the verifier remembers something
            report = _not_lossless(state, "D" if found else "R1", sample)
            return replace(report, notes=(*report.notes, str(found))) if found else report
        rung = "R2"
        fine, sample = examination.rung_sampled(state, kinds)
        rung = "repeat"
        examination.again(state)
        if not fine:
            report = _not_lossless(state, "R2", sample)
            return replace(report, notes=(*report.notes, str(found))) if found else report
        return _finding(state, found, "D", sample) if found else _passed(state, sample)
    except Breach as breach:
        repeated = breach.name in ("hidden randomness", "state across calls")
        return _finding(state, breach, "repeat" if repeated else "contract", sample)
    except OutOfTime:
        return _report(state, "too slow", f"{state.asker.calls} calls were not enough for a verdict", rung, sample)
    except Refusal as refusal:
        return _report(state, "refuses", str(refusal), rung, sample)


def _sampled_only(state: State, engine: Engine) -> Report:
    """The report on a function that draws its own coins."""
    plan, sample = state.plan, examination.Sample()
    total = plan.samples or 800_000
    try:
        planned = list(generators.plan(plan.vocab, plan.gamma, plan.draws, plan.seed))
        generators.check_seeded(engine, planned[0], plan.seed)
        for number, case in enumerate(planned):
            for mixed in (False, True):
                for found in generators.sampled(engine, case, total // (2 * len(planned)), mixed, plan.seed + number):
                    here = examination.in_numbers(found.gate, f"{case}, the law {found.what}")
                    if found.rejects:
                        report = _not_lossless(state, "R2", here)
                        bugs = known_bugs(case) if found.what == "of a row" and not mixed else {}
                        named = Bets(found.bets.law, bugs, found.counts).best_fit() if bugs else None
                        return replace(
                            report, detail=f"the sampled law {found.what} is wrong on: {case}", known_bug=named
                        )
                    if found.what == "of a row":
                        sample = max(sample, here, key=lambda s: s.radius)
            state.judged[str(case.shape)] = None
    except OutOfTime:
        state.notes.append("out of time before the samples were complete")
    except Breach as breach:
        return _finding(state, breach, "R2", sample)
    except Refusal as refusal:
        return _report(state, "refuses", str(refusal), "R2", sample)
    return _passed(state, sample)


def _passed(state: State, sample: examination.Sample) -> Report:
    """The verdict where nothing was found: it must have judged something, and all that was asked for."""
    if not any(shape != "no draft" for shape in state.judged):
        reason = next(iter(state.refused.values()), "nothing was judged in time")
        return _report(state, "refuses" if state.refused else "too slow", reason, "contract", sample)
    if not sample.n and state.plan.part == 0:
        return _report(state, "too slow", "not even a sample was complete in time", "R2", sample)
    if state.plan.kind in ("tree", "both") and not any("tree" in s and s not in state.refused for s in state.judged):
        return _report(state, "refuses", next(iter(state.refused.values()), "trees"), "contract", sample)
    return _report(state, LOSSLESS, "", None, sample)


def _finding(state: State, breach: Breach, rung: str, sample: examination.Sample) -> Report:
    example = None
    if breach.question is not None:
        example = {**breach.question.data(), "came": shown(breach.came), "due": exact.due(breach.question)}
    return replace(_report(state, breach.name, breach.detail, rung, sample), example=example)


def _not_lossless(state: State, rung: str, sample: examination.Sample) -> Report:
    if not state.failed:
        report = _report(state, NOT, "the sampled law is not the target's", rung, sample)
        return replace(report, worst=sample.worst, notes=(*report.notes, *sample.text.splitlines()))
    detail = f"the law is wrong on: {state.failed[0][0]}; largest distance on: {state.largest[1]}"
    report = _report(state, NOT, detail, rung, sample)
    return replace(
        report,
        worst=tuple(state.worst),
        known_bug=exact.name_the_bug(state),
        example=exact.smallest_example(state),
    )


def _report(state: State, verdict: str, detail: str, rung: str | None, sample: examination.Sample) -> Report:
    return Report(
        verdict,
        detail,
        rung,
        tv=state.tv if state.cases else None,
        bound=state.width + state.unresolved if state.cases else None,
        tolerance=state.tolerance,
        samples=sample.n,
        sampled_tv=sample.tv if sample.n else None,
        radius=sample.radius if sample.n else None,
        judged=tuple(state.judged),
        refused=tuple(f"{shape} ({reason})" for shape, reason in state.refused.items()),
        notes=tuple(state.notes),
        laws=state.cases,
        calls=state.asker.calls,
    )
