"""R1: the exact law of every verifier, and of the machinery that computes it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from specdecode_ref import verify
from specdecode_ref.errors import FidelityError
from specdecode_ref.fidelity.conformance.cases import Make, certain, contextual, holes, skewed, smooth
from specdecode_ref.fidelity.cube import Lazy, Reader, Result, explore, verdicts
from specdecode_ref.fidelity.laws import Next, drafts, emitted, sequences, tv
from specdecode_ref.sampling import point_mass
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw, Verdict

EXACT = 1e-12
WITH, WITHOUT, CERTAIN = "with_replacement", "without_replacement", "deterministic"


def laws(make: Make, seed: int, vocab: int = 3) -> Next:
    """A law for every context, drawn when it is first asked for, from a generator of its own."""
    return contextual(make, seed, vocab)


def flat(rng: np.random.Generator, vocab: int) -> np.ndarray:
    return np.ones(vocab)


SHAPES: dict[str, tuple[tuple[Draw, ...], ...]] = {
    "nothing": (),
    "chain, certain": ((CERTAIN,), (CERTAIN,)),
    "chain": ((WITH,), (WITH,)),
    "chain, without": ((WITHOUT,), (WITHOUT,)),
    "long chain": ((WITH,),) * 3,
    "siblings": ((WITH, WITH),),
    "distinct siblings": ((WITHOUT, WITHOUT),),
    "likeliest siblings": ((CERTAIN, CERTAIN),),
    "many siblings": ((WITH, WITH, WITH, WITH),),
    "all of the vocabulary": ((WITHOUT, WITHOUT, WITHOUT),),
    "certain, then drawn": ((CERTAIN, WITH),),
    "drawn, then certain": ((WITHOUT, CERTAIN),),
    "all three": ((CERTAIN, WITH, WITHOUT),),
    "interleaved": ((WITH, WITHOUT, WITH, WITHOUT),),
    "two levels": ((WITH, WITH), (WITH,)),
    "two levels, distinct": ((WITHOUT, WITHOUT), (WITHOUT,)),
    "two levels, mixed": ((CERTAIN, WITHOUT), (WITH,)),
}
VALUES: dict[str, tuple[Make, Make]] = {
    "smooth": (smooth, smooth),
    "zeros in p": (holes, smooth),
    "zeros in q": (smooth, holes),
    "zeros in both": (holes, holes),
    "one-hot p": (certain, smooth),
    "one-hot q": (smooth, certain),
    "temperature 0": (certain, certain),
    "flat": (flat, flat),
    "skewed": (skewed, skewed),
}


LOSSLESS = [name for name, verifier in verify.VERIFIERS.items() if verifier.lossless]


def applicable(verifiers: Iterable[str], shapes: Iterable[str] = tuple(SHAPES)) -> list[tuple[str, str]]:
    """Pairs of verifier and shape, without those that the verifier would refuse."""
    q = laws(smooth, 0)
    some = {shape: next(iter(drafts(q, SHAPES[shape])))[1] for shape in shapes}
    return [(v, shape) for v in verifiers for shape, draft in some.items() if not verify.get(v).objection(draft)]


@pytest.mark.parametrize(("verifier", "shape"), applicable(LOSSLESS))
def test_the_emitted_law_is_the_targets(verifier: str, shape: str) -> None:
    draws = SHAPES[shape]
    for name in (
        VALUES if verifier in ("chain", "tree", "block", "traversal") else ("smooth", "zeros in both", "skewed")
    ):
        makes = VALUES[name]
        p, q = (laws(make, seed) for seed, make in enumerate(makes))
        law = emitted(verify.get(verifier), p, drafts(q, draws))
        assert sum(law.values()) == pytest.approx(1, abs=EXACT), name
        assert tv(law, sequences(p, len(draws) + 1)) < EXACT, name


@pytest.mark.parametrize(
    ("verifier", "shape"),
    applicable(
        ["chain", "tree", "block", "traversal", "kseq"], ["chain", "siblings", "distinct siblings", "two levels"]
    ),
)
def test_equal_laws_are_always_accepted(verifier: str, shape: str) -> None:
    p = laws(smooth, 0)
    for _, draft in drafts(p, SHAPES[shape]):
        rows = {node: p(draft.history(node)) for node in range(len(draft))}
        law = verdicts(verify.get(verifier), draft, rows)
        assert sum(mass for (path, _), mass in law.items() if len(path) == draft.depth + 1) == pytest.approx(1)


@pytest.mark.parametrize("verifier", ["chain", "tree", "block", "traversal", "kseq"])
@pytest.mark.parametrize("seed", range(5))
def test_acceptance_is_the_overlap_of_the_laws(verifier: str, seed: int) -> None:
    """The second oracle: alpha = sum min(p, q), for a larger vocabulary."""
    p, q = laws(smooth, 2 * seed, 9), laws(smooth, 2 * seed + 1, 9)
    accepted = 0.0
    for weight, draft in drafts(q, ((WITH,),)):
        rows = {node: p(draft.history(node)) for node in range(len(draft))}
        law = verdicts(verify.get(verifier), draft, rows)
        accepted += weight * sum(mass for (path, _), mass in law.items() if len(path) == 2)
    assert accepted == pytest.approx(float(torch.minimum(p(()), q(())).sum()), abs=EXACT)


def test_an_empty_program_is_one_box() -> None:
    assert list(explore(lambda read: Result("x"), lambda key, detail: [])) == [(1.0, Result("x"))]


def two_coins(read: Reader) -> Result:
    return Result("low" if read("a") < 0.3 else read("b") < 0.25)


def test_volumes_are_exact_and_coins_are_split_only_where_they_are_read() -> None:
    boxes = list(explore(two_coins, lambda key, detail: [0.3] if key == "a" else [0.25]))
    assert {box.result.outcome: box.volume for box in boxes} == pytest.approx({"low": 0.3, True: 0.175, False: 0.525})
    assert len(boxes) == 3


@pytest.mark.parametrize("edge", [None, 0.3 + 1e-12, 0.3 - 1e-12, 0.9])
def test_a_missing_or_shifted_breakpoint_is_seen(edge: float | None) -> None:
    with pytest.raises(FidelityError, match="throughout"):
        list(explore(two_coins, lambda key, detail: [edge] if key == "a" and edge else [0.25]))


def test_search_finds_breakpoints_to_the_last_bit() -> None:
    third = 1 / 3

    def stairs(read: Reader) -> Result:
        u = read("a")
        return Result((u >= 0.1) + (u >= third) + (u >= 0.9))

    boxes = explore(stairs, lambda key, detail: [], search=True)
    assert {box.result.outcome: box.volume for box in boxes} == pytest.approx(
        {0: 0.1, 1: third - 0.1, 2: 0.9 - third, 3: 0.1}, abs=1e-15
    )


def test_a_coin_that_hides_behind_a_later_one_is_seen() -> None:
    """Both ends of `a` look alike while `b` is held at a value that overrules it."""

    def hidden(read: Reader) -> Result:
        a, b = read("a") < 0.5, read("b")
        return Result(a and b < 0.95)

    for seed in range(20):
        with pytest.raises(FidelityError):
            list(explore(hidden, lambda key, detail: [0.95] if key == "b" else [], seed=seed))


def test_lazy_coins_are_a_sequence() -> None:
    asked: list[int] = []
    coins = Lazy(3, lambda i: asked.append(i) or i / 4)
    assert (coins[1], asked) == (0.25, [1])
    assert list(coins) == [0, 0.25, 0.5] and coins[-1] == 0.5 and coins[1:] == [0.25, 0.5]
    with pytest.raises(IndexError):
        coins[3]


def test_a_verifier_that_reads_all_coins_at_once_has_the_same_law() -> None:
    """Foreign code may copy the coins first."""
    p, q = laws(smooth, 0), laws(smooth, 1)

    def eager(draft: DraftTree, rows: dict[int, Tensor], accept: Lazy, emit: Lazy) -> Verdict:
        return verify.get("tree")(draft, rows, list(accept), list(emit))

    law = emitted(eager, p, drafts(q, SHAPES["all three"]))
    assert tv(law, sequences(p, 2)) < EXACT


def test_a_verifier_of_no_known_rule_gets_its_exact_law_by_search() -> None:
    """A wrong one: it accepts everything with probability 1/2 and otherwise emits token 0."""

    def careless(draft: DraftTree, rows: dict[int, Tensor], accept: Lazy, emit: Lazy) -> Verdict:
        if accept[1] < 0.5:
            return Verdict((0, 1), 1, "bonus", (), rows[1])
        return Verdict((0,), 0, "target", (), rows[0])

    draft = DraftTree.chain(0, (2,))
    rows = {0: torch.full((3,), 1 / 3, dtype=torch.float64), 1: point_mass(1, torch.zeros(3, dtype=torch.float64))}
    with pytest.raises(FidelityError):
        verdicts(careless, draft, rows)
    assert verdicts(careless, draft, rows, search=True) == pytest.approx({((0, 1), 1): 0.5, ((0,), 0): 0.5})
