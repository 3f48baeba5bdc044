"""R3: same coins, same tokens, same state; for every drafter, chain and tree, in a batch and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdecode_ref.decode import Session
from specdecode_ref.drafters import early_exit
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.coupling import check_coupled, check_states, checked_run
from specdecode_ref.fidelity.suite import COMBINED, NEARLY, RULES, transformer
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule

V = 6
TARGET = TableModel.random(V, seed=0, name="target")
CLOSE = TableModel(TARGET.table * 0.8, TARGET.tilt, "close")
"""A draft model that is often right, so that long paths are accepted."""

PROMPTS = [(0, 1, 2, 0, 1, 2), (3,), (1, 4, 1, 4), (2, 2, 2)]

WITH, WITHOUT = "with_replacement", "without_replacement"
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "ngram": lambda q: NGram(4, 3, 1),
    "chain": lambda q: ModelDrafter(q, (1, 1, 1, 1)),
    "tree, with": lambda q: ModelDrafter(q, (3, 2, 1), WITH),
    "tree, without": lambda q: ModelDrafter(q, (3, 2, 1), WITHOUT),
    "ngram+chain": lambda q: First([NGram(4, 3, 2), ModelDrafter(q, (1, 1, 1))]),
    "ngram+tree": lambda q: First([NGram(4, 3, 2), ModelDrafter(q, (2, 2), WITHOUT)]),
}

MORE_RULES = {
    "hot": {"temperature": 1.7},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", [*RULES, *COMBINED, *MORE_RULES])
def test_tokens_are_those_of_plain_decoding(drafter: str, rule: str) -> None:
    settings = {"eos": (5,), **{**RULES, **COMBINED, **MORE_RULES}[rule]}
    check_coupled(TARGET, DRAFTERS[drafter](CLOSE), PROMPTS, rule=SamplingRule(**settings), max_new_tokens=12)


def test_rows_end_at_different_times() -> None:
    """Otherwise the batches above would not be ragged."""
    outputs = Session(TARGET, PROMPTS, rule=SamplingRule(eos=(5,)), max_new_tokens=12).run()
    assert len({len(out.tokens) for out in outputs}) > 2


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_length_limit(drafter: str, limit: int) -> None:
    plain = check_coupled(TARGET, DRAFTERS[drafter](CLOSE), PROMPTS, max_new_tokens=limit)
    assert {len(tokens) for tokens in plain} == {limit}


@pytest.mark.parametrize("verifier", ["auto", "tree", "match"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_states_equal_a_fresh_prefill_after_every_round(drafter: str, verifier: str) -> None:
    """Under rejection sampling too, where tokens are not those of plain decoding."""
    accepted = rounds = 0
    for seed in range(2):
        session = Session(
            TARGET,
            PROMPTS,
            DRAFTERS[drafter](CLOSE),
            verifier=verifier,
            seed=seed,
            rule=SamplingRule(eos=(5,), frequency_penalty=0.2),
            max_new_tokens=30,
        )
        checked_run(session)
        accepted += sum(r.kept - 1 for row in range(4) for r in session.trace(row).rounds)
        rounds += sum(len(session.trace(row).rounds) for row in range(4))
    assert accepted > rounds / 10


@pytest.mark.parametrize("verifier", ["auto", "match"])
def test_a_batch_is_the_sum_of_its_rows(verifier: str) -> None:
    """Rejection sampling: the same numbers of sequences give the same tokens in any batch and any order."""
    drafter = DRAFTERS["tree, without"](CLOSE)
    settings: dict[str, Any] = {"verifier": verifier, "seed": 7, "max_new_tokens": 20, "rule": SamplingRule(eos=(5,))}
    together = [out.tokens for out in Session(TARGET, PROMPTS, drafter, **settings).run()]
    for order in ([0], [3], [2, 0], [3, 1, 2, 0], [1, 3]):
        session = Session(TARGET, [PROMPTS[i] for i in order], drafter, sequences=order, **settings)
        assert [out.tokens for out in session.run()] == [together[i] for i in order]


def test_sequences_of_one_prompt_differ() -> None:
    outputs = Session(TARGET, [(0, 1)] * 4, DRAFTERS["chain"](CLOSE), max_new_tokens=20).run()
    assert len({out.tokens for out in outputs}) == 4


def test_a_cancelled_row_leaves_the_others_alone() -> None:
    settings: dict[str, Any] = {"verifier": "match", "max_new_tokens": 20}
    plain = [out.tokens for out in Session(TARGET, PROMPTS, **settings).run()]
    session = Session(TARGET, PROMPTS, DRAFTERS["chain"](CLOSE), **settings)
    for number, _ in enumerate(session):
        if number == 5:
            session.cancel(1)
        check_states(session)
    outputs = [session.generation(row).tokens for row in range(4)]
    assert [outputs[i] for i in (0, 2, 3)] == [plain[i] for i in (0, 2, 3)]
    assert outputs[1] == plain[1][: len(outputs[1])] and len(outputs[1]) < 20


SMALL = transformer()
TRANSFORMER_DRAFTERS: dict[str, Callable[[], Any]] = {
    "ngram": lambda: NGram(4, 3, 1),
    "early-exit chain": lambda: early_exit(SMALL, (1, 1, 1), 2),
    "early-exit tree": lambda: early_exit(SMALL, (3, 2), 2),
    "model tree": lambda: ModelDrafter(transformer(seed=1), (2, 2), WITH),
    "ngram+early-exit": lambda: First([NGram(4, 3, 2), early_exit(SMALL, (2, 1), 2)]),
}


@pytest.mark.parametrize("drafter", TRANSFORMER_DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_transformer_in_float64(drafter: str, temperature: float) -> None:
    """Keys, values and logits to `NEARLY`, tokens exactly."""
    check_coupled(
        SMALL,
        TRANSFORMER_DRAFTERS[drafter](),
        [(1, 2, 3, 1, 2), (4,), (7, 8)],
        tolerance=NEARLY,
        rule=SamplingRule(temperature=temperature, eos=(9,), frequency_penalty=0.1),
        max_new_tokens=20,
    )


@pytest.mark.parametrize("verifier", ["auto", "match"])
@pytest.mark.parametrize("drafter", TRANSFORMER_DRAFTERS)
def test_a_transformers_state_after_every_round(drafter: str, verifier: str) -> None:
    session = Session(
        SMALL, [(1, 2, 3, 1, 2), (4,)], TRANSFORMER_DRAFTERS[drafter](), verifier=verifier, max_new_tokens=24
    )
    checked_run(session, NEARLY)


def test_a_foreign_token_in_the_cache_is_seen() -> None:
    session = Session(TARGET, [(0, 1, 2)], max_new_tokens=5)
    next(iter(session))
    check_states(session)
    session._cache.planes[0][0, 1] = 5
    with pytest.raises(FidelityError, match="plane 0"):
        check_states(session)


def test_a_small_difference_of_keys_is_seen() -> None:
    session = Session(SMALL, [(1, 2, 3)], max_new_tokens=5)
    next(iter(session))
    check_states(session, NEARLY)
    session._cache.planes[0][0, 1, 0, 1, 2, 3] += 2 * NEARLY
    with pytest.raises(FidelityError, match="plane 0"):
        check_states(session, NEARLY)


def test_other_tokens_are_seen() -> None:
    """A drafter that changed the law would be caught by the tokens alone: here, another model as the yardstick."""
    other = TableModel.random(V, seed=9)

    def session(model: Any, prompts: Any, drafter: Any = None, **settings: Any) -> Session:
        return Session(model if drafter else other, prompts, drafter, **settings)

    with pytest.raises(FidelityError, match="different from token"):
        check_coupled(TARGET, NGram(4, 3, 1), PROMPTS, session=session, max_new_tokens=10)


def test_the_last_token_is_the_root_and_not_cached() -> None:
    session = Session(TARGET, [(0, 1, 2)], DRAFTERS["chain"](CLOSE), max_new_tokens=9)
    for step in session:
        if session._live:
            assert session._cache.lengths == [step.round.committed + step.round.kept - 1]
    assert torch.equal(session._cache.planes[1][0, :3], torch.arange(3))
