"""Drafters: what they propose, with which coins, and that a proposer that lived long proposes like a fresh one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdecode_ref import verify
from specdecode_ref.coins import Coins
from specdecode_ref.drafters import build
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import Dynamic, Shape, Static, chain
from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.models.base import Output
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule, law, pick, without
from specdecode_ref.tree import DraftTree, ancestors
from specdecode_ref.types import Context, Verdict

V = 6
RULE = SamplingRule(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3)


class Recorder:
    """Coins that remember which were asked for."""

    def __init__(self, seed: int = 0) -> None:
        self._coins = Coins(seed)
        self.asked: list[tuple[int, int]] = []

    def draft(self, base: int, node: int) -> float:
        self.asked.append((base, node))
        return self._coins.draft(base, node)


def recorder(seed: int = 0) -> Any:
    return Recorder(seed)


def looked_up(tokens: Sequence[int], gamma: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Prompt lookup by trying everything: the longest end of the text that stood before, at its latest place."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(tokens[-n:]):
                return tuple(tokens[end : end + gamma])
    return ()


@pytest.mark.parametrize("seed", range(20))
def test_ngram_is_a_brute_force_search(seed: int) -> None:
    """One proposer follows a growing text; a fresh one and a search by hand see each text for the first time."""
    rng = random.Random(seed)
    settings = NGram(gamma=rng.choice([1, 3, 8]), longest=rng.choice([1, 2, 3, 5]), shortest=1)
    settings = NGram(settings.gamma, settings.longest, rng.randint(1, settings.longest))
    tokens = [rng.randrange(rng.choice([2, 4, 30])) for _ in range(rng.randint(1, 12))]
    proposer = settings.start(tokens, RULE)
    for _ in range(40):
        room = rng.choice([0, 1, 2, 100])
        context = Context(tokens, 1, room)
        coins = recorder()
        tree = proposer.propose(context, coins)
        assert tree == settings.start(tokens, RULE).propose(context, coins)
        gamma = min(settings.gamma, room)
        assert tree.tokens == (tokens[-1], *looked_up(tokens, gamma, settings.longest, settings.shortest))
        assert tree.is_chain and set(tree.draws[1:]) <= {"deterministic"} and not coins.asked
        tokens += [rng.randrange(4) for _ in range(rng.randint(1, 4))]


def test_the_longest_match_wins_and_of_those_the_latest() -> None:
    text = [1, 2, 7, 0, 2, 8, 0, 1, 2, 9, 0, 2, 4, 1, 2]
    assert NGram(gamma=2, longest=2, shortest=1).start(text, RULE).propose(Context(text, 1, 9), recorder()).tokens == (
        2,
        9,
        0,
    )
    assert NGram(gamma=2, longest=1, shortest=1).start(text, RULE).propose(Context(text, 1, 9), recorder()).tokens == (
        2,
        4,
        1,
    )


@pytest.mark.parametrize(
    "wrong", [{"gamma": 0}, {"longest": 0}, {"shortest": 0}, {"shortest": 3, "longest": 2}], ids=str
)
def test_ngram_refuses_lengths_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        NGram(**wrong)


def drafter(
    branching: Shape | Sequence[int] = (2, 2, 1), draw: Any = "without_replacement", seed: int = 1
) -> ModelDrafter:
    return ModelDrafter(TableModel.random(V, seed=seed), branching, draw)


@pytest.mark.parametrize("draw", ["with_replacement", "without_replacement"])
@pytest.mark.parametrize("branching", [(1, 1, 1, 1), (3, 2), (2, 1, 2)])
def test_q_is_the_very_law_drawn_from(branching: tuple[int, ...], draw: Any) -> None:
    model = TableModel.random(V, seed=1)
    text = [1, 2, 3, 0, 5]
    for seed in range(10):
        coins = recorder(seed)
        tree = ModelDrafter(model, branching, draw).start(text[:3], RULE).propose(Context(text, 3, 9), coins)
        assert coins.asked == [(len(text), node) for node in range(1, len(tree))], "one coin a node, by its own key"
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            history = [*text, *(tree.tokens[i] for i in ancestors(tree.parents, parent)[1:])]
            q = tree.q[parent]
            assert q is not None
            assert torch.equal(q, law(model.logits_after(history), RULE, history, 3))
            earlier = [tree.tokens[s] for s in tree.children[parent] if s < node]
            q_eff = without(q, earlier) if draw == "without_replacement" else q
            assert tree.tokens[node] == pick(q_eff, Coins(seed).draft(len(text), node))
            assert tree.draws[node] == draw
        assert [len(tree.children[i]) for i in range(len(tree))] == [
            branching[d] if d < len(branching) else 0 for d in tree.depths
        ]
        assert all(q is None for q, below in zip(tree.q, tree.children, strict=True) if not below)


@pytest.mark.parametrize("rule, support", [(SamplingRule(top_k=2), 2), (SamplingRule(temperature=0), 1)])
def test_no_more_draws_than_there_are_tokens(rule: SamplingRule, support: int) -> None:
    context = Context([1, 2, 3], 3, 9)
    for seed in range(20):
        tree = drafter((5, 3)).start(context.tokens, rule).propose(context, recorder(seed))
        assert {len(below) for below in tree.children} == {support, 0}
        for below in tree.children:
            assert len({tree.tokens[c] for c in below}) == len(below)
        again = drafter((5, 3), "with_replacement").start(context.tokens, rule).propose(context, recorder(seed))
        assert len(again) == 1 + 5 + 15


@pytest.mark.parametrize("room", [0, 1, 2, 3, 50])
def test_a_draft_is_no_deeper_than_there_is_room(room: int) -> None:
    context = Context([1, 2, 3, 1, 2], 5, room)
    for some in (
        NGram(gamma=3, shortest=1),
        drafter((1, 1, 1)),
        drafter((2, 2, 2)),
        First([NGram(gamma=3, shortest=1), drafter()]),
    ):
        tree = some.start(context.tokens, RULE).propose(context, recorder())
        assert tree.depth == min(room, 3)
        assert tree.tokens[0] == context.root


def follow(draft: Any, fresh: Any, rounds: int, seed: int) -> list[DraftTree]:
    """Let the verdicts of a random target be observed, and compare each proposal with one of a fresh proposer."""
    target, coins = TableModel.random(V, seed=7), Coins(seed)
    prompt = [1, 2, 3]
    tokens, proposer, trees = list(prompt), draft.start(prompt, RULE), []
    for _ in range(rounds):
        context = Context(list(tokens), len(prompt), 20)
        tree = proposer.propose(context, coins)
        other = fresh.start(prompt, RULE).propose(context, coins)
        assert (tree.tokens, tree.parents, tree.draws) == (other.tokens, other.parents, other.draws)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(tree.q, other.q, strict=True))
        p = [law(target.logits_after(h := [*tokens, *tree.history(i)]), RULE, h, len(prompt)) for i in range(len(tree))]
        base = len(tokens)
        verdict: Verdict = verify.get("tree")(tree, p, coins.accept(base, len(tree)), coins.emits(base, tree.depth + 1))
        proposer.observe(verdict, ())
        tokens += [*(tree.tokens[i] for i in verdict.path[1:]), verdict.token]
        trees.append(tree)
    return trees


NARROW = Static(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))


@pytest.mark.parametrize(
    "branching", [(1, 1, 1, 1), (2, 2, 1), (1,), (3,), NARROW, Dynamic(3, 2, 5), Dynamic(4, 3, 9, 0.05)], ids=str
)
def test_a_model_drafter_that_lived_long_is_like_a_fresh_one(branching: Shape | tuple[int, ...]) -> None:
    """Its cache holds the committed text and nothing of the rejected branches, nor of nodes that were not kept."""
    follow(drafter(branching), drafter(branching), rounds=30, seed=1)
    follow(drafter(branching, seed=7), drafter(branching, seed=7), rounds=30, seed=2)  # the target itself: all accepted


def test_a_model_drafter_that_missed_rounds_is_like_a_fresh_one() -> None:
    trees = follow(
        First([NGram(longest=2, shortest=2), drafter()]), First([NGram(longest=2, shortest=2), drafter()]), 40, 3
    )
    kinds = {tree.draws[1] for tree in trees if len(tree) > 1}
    assert kinds == {"deterministic", "without_replacement"}, "both drafters took rounds"


def test_a_proposal_that_was_never_judged_leaves_nothing_behind() -> None:
    proposer = drafter().start([1, 2, 3], RULE)
    proposer.propose(Context([1, 2, 3, 4], 3, 9), recorder(1))
    context = Context([1, 2, 3, 4, 5, 0], 3, 9)
    fresh = drafter().start([1, 2, 3], RULE).propose(context, recorder(2))
    assert proposer.propose(context, recorder(2)).tokens == fresh.tokens


def test_first_tells_everyone_with_their_own_features() -> None:
    heard: list[str] = []

    class Named:
        vocab_size, features, settings = None, (1,), {"gamma": 1}

        def __init__(self, name: str, answers: bool) -> None:
            self.name, self.answers = name, answers

        def start(self, prompt: Any, rule: Any, features: Any = ()) -> Named:
            assert len(features) == 1
            return self

        def propose(self, context: Context, coins: Any) -> DraftTree:
            return DraftTree.chain(context.root, (1,) if self.answers else ())

        def observe(self, verdict: Any, features: Any) -> None:
            heard.append(f"{self.name} {float(features[0])}")

    both: Any = First([Named("a", False), Named("b", True)])  # type: ignore[list-item]
    assert both.name == "a+b" and both.features == (1, 1)
    assert both.settings == {"a": {"gamma": 1}, "b": {"gamma": 1}}
    proposer = both.start([1], RULE, (torch.tensor(1.0), torch.tensor(2.0)))
    proposer.propose(Context([1], 1, 5), recorder())
    proposer.observe(None, (torch.tensor(1.0), torch.tensor(2.0)))
    assert heard == ["a 1.0", "b 2.0"]
    with pytest.raises(InputError):
        First([])


class Short(TableModel):
    """A table that refuses positions beyond its context, as learned position embeddings would."""

    @classmethod
    def make(cls, context_length: int) -> Short:
        whole = TableModel.random(V, seed=1)
        short = cls(whole.table, whole.tilt)
        short.context_length = context_length
        return short

    def forward(self, tokens: Any, parents: Any, cache: Any, features: Any = ()) -> Output:
        out = super().forward(tokens, parents, cache, features)
        assert cache.lengths[0] + len(cache.pending[0]) <= self.context_length
        return out


def test_a_draft_model_with_a_shorter_context_stops_drafting() -> None:
    model = Short.make(8)
    tokens = [1, 2, 3]
    proposer = ModelDrafter(model, (1, 1, 1)).start(tokens, RULE)
    lengths = []
    for _ in range(8):
        tree = proposer.propose(Context(list(tokens), 3, 99), Coins(0))  # type: ignore[arg-type]
        proposer.observe(Verdict((0,), 1, "target", (), torch.zeros(1)), ())
        lengths.append(tree.depth)
        tokens.append(1)
    assert lengths == [3, 3, 3, 3, 2, 1, 0, 0]
    long = [1] * 20
    assert len(ModelDrafter(model).start(long, RULE).propose(Context(long, 20, 9), Coins(0))) == 1


@pytest.mark.parametrize(
    "branching, draw", [((), "with_replacement"), ((0,), "with_replacement"), ((1, -1), "with_replacement")]
)
def test_a_tree_without_children_is_refused(branching: tuple[int, ...], draw: Any) -> None:
    with pytest.raises(InputError, match="one child or more"):
        drafter(branching, draw)
    with pytest.raises(InputError, match="a random draw"):
        drafter((1,), "deterministic")


def test_build_makes_what_was_named() -> None:
    target = TableModel.random(V)
    assert build("none", target) is None and build("none+none", target) is None
    ngram: Any = build("ngram", target, gamma=5)
    assert ngram == NGram(gamma=5)
    both: Any = build("ngram+model", target, gamma=3, draft_model=lambda: TableModel.random(V, seed=1))
    assert both.name == "ngram+model" and both.drafters[1].shape == chain(3) and both.vocab_size == V
    tree: Any = build("model", target, tree=(3, 2), draft_model=lambda: TableModel.random(V, seed=1))
    assert tree.settings == {"tree": "sampled:3,2", "draft_model": "table"}


@pytest.mark.parametrize(
    "name, settings, error",
    [
        ("oracle", {}, UnknownNameError),
        ("ngram+", {}, UnknownNameError),
        ("", {}, UnknownNameError),
        ("ngram", {"gamma": 0}, InputError),
        ("none", {"gamma": -1}, InputError),
        ("ngram", {"tree": (2,)}, InputError),
        ("model", {}, InputError),
        ("model", {"draft_model": lambda: TableModel.random(V + 1)}, InputError),
        ("model", {"draft_model": lambda: TableModel.random(V), "tree": ()}, InputError),
        ("early-exit", {}, InputError),
    ],
)
def test_build_refuses_what_it_cannot_make(name: str, settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"expected .*; got .*; "):
        build(name, TableModel.random(V), **settings)
