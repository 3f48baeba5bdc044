"""A trace run again gives its own drafts, and on them every verifier's expected length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdecode_ref import verify
from specdecode_ref.decode import autoregressive, speculative
from specdecode_ref.drafters import early_exit
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.hybrid import Hybrid
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import Dynamic
from specdecode_ref.errors import InputError, SpecDecodeError, TraceError
from specdecode_ref.fidelity.compare import on_rounds
from specdecode_ref.fidelity.cube import accepted, verdicts
from specdecode_ref.fidelity.replay import replayed
from specdecode_ref.fidelity.suite import transformer
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace import Trace

TARGET = TableModel.random(5, seed=0)
DRAFT = TableModel.random(5, seed=1)
SMALL = transformer()
DRAFTERS: dict[str, Any] = {
    "ngram": NGram(3, 2, 1),
    "model": ModelDrafter(DRAFT, (1, 1)),
    "tree": ModelDrafter(DRAFT, (2, 1), "with_replacement"),
    "ranked": ModelDrafter(DRAFT, Dynamic(3, 2, 4, 0.01)),
    "one tree": Hybrid(NGram(3, 2, 2), ModelDrafter(DRAFT, Dynamic(3, 2, 4))),
    "in turn": First([NGram(3, 2, 2), ModelDrafter(DRAFT, (2, 2))]),
}


def trace(drafter: Any, model: Any = TARGET, **settings: Any) -> Trace:
    rule = SamplingRule(temperature=0.9, frequency_penalty=0.2, logit_bias=((1, 0.3),), eos=(4,))
    return speculative(model, drafter, [0, 1, 0, 1], rule=rule, seed=3, max_new_tokens=12, **settings).trace


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_trace_gives_its_drafts_again(name: str) -> None:
    recorded = trace(DRAFTERS[name])
    again = list(replayed(recorded, TARGET, lambda: DRAFT))
    assert [draft.tokens for draft, _ in again] == [r.nodes.token for r in recorded.rounds]
    for (draft, p), r in zip(again, recorded.rounds, strict=True):
        assert all(float(p[draft.parents[t.node]][draft.tokens[t.node]]) == r.nodes.p[t.node] for t in r.tests)


@pytest.mark.parametrize("verifier", [v for v in verify.VERIFIERS if v not in ("kseq",)])
def test_traces_of_every_verifier(verifier: str) -> None:
    recorded = trace(DRAFTERS["model"], verifier=verifier)
    assert len(list(replayed(recorded, TARGET, lambda: DRAFT))) == len(recorded.rounds)


def test_early_exit_is_cut_where_it_was() -> None:
    recorded = trace(early_exit(SMALL, (2, 1), 1), SMALL)
    assert len(list(replayed(recorded, SMALL))) == len(recorded.rounds)


def test_what_cannot_be_replayed_is_refused() -> None:
    recorded = trace(DRAFTERS["model"])
    with pytest.raises(TraceError, match="as it was recorded"):
        list(replayed(recorded, TableModel.random(5, seed=7), lambda: DRAFT))
    with pytest.raises(InputError, match="draft model"):
        list(replayed(recorded, TARGET))
    with pytest.raises(TraceError, match="level 0"):
        list(replayed(trace(DRAFTERS["model"], level=0), TARGET, lambda: DRAFT))
    plain = autoregressive(TARGET, [0, 1], max_new_tokens=4).trace
    with pytest.raises(TraceError, match="plain decoding"):
        on_rounds(replayed(plain, TARGET))
    strange = replace(recorded, header=replace(recorded.header, method="oracle"))
    with pytest.raises(SpecDecodeError):
        list(replayed(strange, TARGET, lambda: DRAFT))


@pytest.mark.parametrize("name", verify.VERIFIERS)
def test_expected_length_is_that_of_the_exact_law(name: str) -> None:
    """The short way, through coins alone, against the whole law of verdicts."""
    verifier = verify.get(name)
    for draft, p in replayed(trace(DRAFTERS["tree"]), TARGET, lambda: DRAFT):
        if verifier.objection(draft):
            continue
        laws = {node: torch.as_tensor(p[node]) for node in range(len(draft))}
        whole = sum(mass * (len(path) - 1) for (path, _), mass in verdicts(verifier, draft, laws).items())
        assert accepted(verifier, draft, p) == pytest.approx(whole, abs=1e-12)


def test_rows_of_a_comparison() -> None:
    rows = on_rounds(replayed(trace(DRAFTERS["tree"]), TARGET, lambda: DRAFT))
    assert [row.verifier for row in rows] == list(verify.VERIFIERS)
    assert {row.verifier for row in rows if row.objection} == {"chain", "block", "lenient"}
    assert all(row.accepted is not None and row.tv is None for row in rows if not row.objection)
