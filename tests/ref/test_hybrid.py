"""The hybrid: a lookup as a hint in the head's tree, or alone; what it learns; and that it loses nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.decode import autoregressive, speculative
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.growth import Hint
from specdecode_ref.drafters.hybrid import PRIOR, PRIOR_WEIGHT, Hybrid
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import Dynamic, chain
from specdecode_ref.errors import InputError
from specdecode_ref.fidelity import setups
from specdecode_ref.fidelity.laws import tv
from specdecode_ref.fidelity.loop import Setup, generated
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict

V = 6
GREEDY = SamplingRule(temperature=0)
TEXT = [1, 2, 3, 4, 0, 1, 2]
"""Ends in (1, 2), which stood before: the lookup finds 3, 4, 0, 1, 2 behind a match of two tokens, prior 0.4."""


def head(law: Sequence[float], shape: Dynamic) -> ModelDrafter:
    """A draft model that says the same after every token."""
    table = torch.tensor(law, dtype=torch.float64).log().expand(V + 1, V)
    return ModelDrafter(TableModel(table), shape)


def proposed(drafter: Hybrid, tokens: Sequence[int] = TEXT, room: int = 9) -> DraftTree:
    return drafter.start(tokens, GREEDY).propose(Context(tokens, 1, room), Coins(0))


def shown(tree: DraftTree) -> list[tuple[int, ...]]:
    """The paths of a tree, as tokens below the root."""
    return [tuple(tree.history(node)) for node in range(1, len(tree))]


class TestHints:
    """How a lookup competes for places in the head's tree."""

    UNSURE = (0.25, 0.05, 0.02, 0.05, 0.05, 0.3)
    """Best guesses 5 and 0 (without what is missing to 1, they are 0.417 and 0.347)."""

    def test_a_hint_takes_the_places_it_deserves(self) -> None:
        law = [p / sum(self.UNSURE) for p in self.UNSURE]
        tree = proposed(Hybrid(NGram(), head(law, Dynamic(1, 2, 5))))
        # 5: 0.417, 3: the hint's 0.4, 0: 0.347; behind 3 hang 4 (0.16) and 0 (0.064), which the head never looked at
        assert shown(tree) == [(5,), (3,), (0,), (3, 4), (3, 4, 0)]
        assert set(tree.draws[1:]) == {"deterministic"}
        assert shown(proposed(Hybrid(NGram(), head(law, Dynamic(1, 2, 2))))) == [(5,), (3,)]

    def test_a_hint_that_the_head_shares_is_not_doubled(self) -> None:
        sure = (0.05, 0.05, 0.05, 0.6, 0.05, 0.2)
        tree = proposed(Hybrid(NGram(), head(sure, Dynamic(2, 2, 6))))
        # 3 has the head's 0.6, the better of the two; below it 3 again, then the hint's 4 with 0.4 of it, and 5
        assert shown(tree) == [(3,), (5,), (3, 3), (3, 4), (3, 5), (5, 3)]
        assert shown(proposed(Hybrid(NGram(), head(sure, Dynamic(2, 2, 6, 0.3))))) == [(3,), (3, 3)]

    def test_the_hint_goes_through_levels_that_the_head_opens(self) -> None:
        law = [p / sum(self.UNSURE) for p in self.UNSURE]
        tree = proposed(Hybrid(NGram(longest=2), head(law, Dynamic(2, 3, 40))))
        paths = shown(tree)
        assert len(paths) == len(set(paths))
        assert all(tuple(TEXT[2 : 2 + n]) in paths for n in range(1, 6))
        assert {(3, 4), (3, 5), (3, 0), (5, 5), (5, 0)} <= set(paths)  # the head guesses beside the hint

    @pytest.mark.parametrize("room", range(7))
    def test_room_limits_the_hint(self, room: int) -> None:
        law = [p / sum(self.UNSURE) for p in self.UNSURE]
        tree = proposed(Hybrid(NGram(), head(law, Dynamic(1, 2, 20))), room=room)
        assert tree.depth == min(room, 5)

    @pytest.mark.parametrize(("floor", "kept"), [(0.0, 5), (0.03, 3), (0.1, 2), (0.39, 1), (0.41, 0)])
    def test_a_floor_holds_for_hints_too(self, floor: float, kept: int) -> None:
        law = [p / sum(self.UNSURE) for p in self.UNSURE]
        paths = shown(proposed(Hybrid(NGram(), head(law, Dynamic(1, 2, 20, floor)))))
        assert [path for path in paths if path[0] == 3] == [tuple(TEXT[2 : 2 + n]) for n in range(1, kept + 1)]

    def test_without_a_lookup_the_head_drafts_alone(self) -> None:
        law = [p / sum(self.UNSURE) for p in self.UNSURE]
        drafter, text = head(law, Dynamic(2, 2, 4)), [1, 2, 3]
        expected = drafter.start(text, GREEDY).propose(Context(text, 1, 9), Coins(0))
        assert proposed(Hybrid(NGram(), drafter), text) == expected


class Spy:
    """A head that remembers what it was asked and told."""

    vocab_size, name, settings = V, "spy", {"tree": "dynamic:2,2,3"}

    def __init__(self, shape: Any = None, features: tuple[int, ...] = (1, 2)) -> None:
        self.shape, self.features = shape or Dynamic(2, 2, 3), features
        self.asked: list[Hint | None] = []
        self.told: list[tuple[Verdict, Sequence[Tensor]]] = []

    def start(self, prompt: Sequence[int], rule: SamplingRule, features: Sequence[Tensor] = ()) -> Any:
        self.seen = features
        return self

    def propose(self, context: Context, coins: Coins, hint: Hint | None = None) -> DraftTree:
        self.asked.append(hint)
        return DraftTree.bare(context.root)

    def observe(self, verdict: Verdict, features: Sequence[Tensor]) -> None:
        self.told.append((verdict, features))


VERDICT = Verdict((0,), 2, "target", (), torch.zeros(V))


class TestShares:
    """How often lookups were right, and what follows from it."""

    def test_a_lookup_that_is_right_often_takes_the_round(self) -> None:
        spy: Any = Spy(Dynamic(2, 2, 4))
        proposer = Hybrid(NGram(), spy, alone=0.4).start(TEXT, GREEDY)
        tree = proposer.propose(Context(TEXT, 1, 9), Coins(0))
        assert tree.tokens == (2, 3, 4, 0, 1) and tree.is_chain and spy.asked == []
        proposer.observe(VERDICT, (torch.zeros(1, 2), torch.zeros(1, 2)))
        assert spy.told[0][0] is VERDICT and len(spy.told[0][1]) == 2
        for room in (0, 1, 2):
            chained = Hybrid(NGram(), spy, alone=0.4).start(TEXT, GREEDY).propose(Context(TEXT, 1, room), Coins(0))
            assert chained.depth == room
        Hybrid(NGram(), spy, alone=0.41).start(TEXT, GREEDY).propose(Context(TEXT, 1, 9), Coins(0))
        ((tokens, logs),) = spy.asked
        assert tokens == [3, 4, 0, 1, 2] and logs == pytest.approx([math.log(0.4)] * 5)

    def test_a_text_shows_how_often_its_lookups_are_right(self) -> None:
        proposer = Hybrid(NGram(), Spy()).start(TEXT, GREEDY)
        assert [proposer.share(n) for n in (1, 2, 3, 4, 9)] == [*PRIOR.values(), PRIOR[4]]
        proposer.propose(Context(TEXT, 1, 9), Coins(0))
        text = [*TEXT, 3, 4, 5, 1]  # 3 and 4 right, 0 wrong, and the 1 is on another path
        proposer.propose(Context(text, 1, 9), Coins(0))
        share = (PRIOR[2] * PRIOR_WEIGHT + 2) / (PRIOR_WEIGHT + 3)
        assert proposer.share(2) == pytest.approx(share)
        assert [proposer.share(n) for n in (1, 3, 4)] == [PRIOR[n] for n in (1, 3, 4)]
        text += [5, 5, 5]  # nothing was found before, so nothing is learnt
        proposer.propose(Context(text, 1, 9), Coins(0))
        assert proposer.share(2) == pytest.approx(share)

    def test_rounds_that_end_early_count_for_what_they_show(self) -> None:
        proposer = Hybrid(NGram(longest=6), Spy()).start(TEXT, GREEDY)
        text = [*range(6), 5, *range(6)]
        proposer.propose(Context(text, 1, 9), Coins(0))  # six tokens found again count as four
        proposer.propose(Context([*text, 5], 1, 9), Coins(0))
        assert proposer.share(4) == pytest.approx((PRIOR[4] * PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 1))


def test_only_a_dynamic_tree_takes_hints() -> None:
    with pytest.raises(InputError, match="a dynamic tree for a hybrid; got chain:4"):
        Hybrid(NGram(), Spy(chain(4)))


def test_the_trace_s_header_names_both() -> None:
    drafter = Hybrid(NGram(), Spy())
    assert drafter.name == "hybrid" and drafter.features == (1, 2) and drafter.shape == Dynamic(2, 2, 3)
    assert drafter.settings == {"ngram": {"gamma": 6, "longest": 4, "shortest": 2}, "spy": {"tree": "dynamic:2,2,3"}}


def test_all_proposers_of_a_sequence_hear_every_verdict() -> None:
    """Each of its own features, whoever drafted."""
    spies = [Spy(features=(3,)), Spy(features=()), Spy(features=(1, 2))]
    features = [torch.full((1, 2), float(i)) for i in range(3)]
    first = First(spies)
    assert first.features == (3, 1, 2)
    proposer = first.start(TEXT, GREEDY, features)
    assert [[f[0, 0].item() for f in spy.seen] for spy in spies] == [[0], [], [1, 2]]
    proposer.propose(Context(TEXT, 1, 9), Coins(0))
    assert [len(spy.asked) for spy in spies] == [1, 1, 1]
    proposer.observe(VERDICT, features)
    assert [[f[0, 0].item() for f in spy.told[0][1]] for spy in spies] == [[0], [], [1, 2]]


@pytest.mark.parametrize("alone", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_text_is_that_of_plain_decoding(seed: int, alone: float) -> None:
    target = TableModel.random(5, order=2, period=1, seed=seed)
    draft = TableModel(target.table + torch.randn(target.table.shape, dtype=torch.float64), target.tilt)
    drafter = Hybrid(NGram(), ModelDrafter(draft, Dynamic(3, 2, 5, 0.05)), alone)
    plain = autoregressive(target, [0, 1, 2], rule=GREEDY, max_new_tokens=60)
    made = speculative(target, drafter, [0, 1, 2], rule=GREEDY, max_new_tokens=60)
    assert made.tokens == plain.tokens
    assert len(made.trace.rounds) < 45


EXACT = [("plain", 0.0), ("plain", 1.0), ("cool", 0.4), ("top-k", 1.0), ("repetition", 0.45)]


@pytest.mark.parametrize(("rule", "alone"), EXACT)
def test_the_law_of_a_whole_generation_is_the_target_s(rule: str, alone: float) -> None:
    """Exact: every outcome of every coin, over the real loop; the prompt repeats itself, so that lookups find."""
    target, draft = (TableModel.random(3, order=2, scale=1.0, seed=seed) for seed in (4, 5))
    drafter = Hybrid(NGram(2, 3, 1), ModelDrafter(draft, Dynamic(2, 2, 3)), alone)
    made = SamplingRule(eos=(2,), **setups.RULES[rule])
    exact = generated(case := Setup(target, drafter, rule=made, new_tokens=3))
    assert tv(exact.law, case.target) < setups.EXACT
    assert exact.accepted > 0.1
    other = replace(case, drafter=ModelDrafter(draft, Dynamic(2, 2, 3)))
    assert generated(other).accepted != pytest.approx(exact.accepted)
