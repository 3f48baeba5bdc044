"""Ties are real: flips between shapes in bfloat16 and float32. Defects are real: known bugs, planted and run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_ref.coins import Coins
from specdecode_ref.decode import autoregressive, speculative
from specdecode_ref.drafters import build
from specdecode_ref.errors import InputError
from specdecode_ref.fidelity import mutants, suite
from specdecode_ref.fidelity.divergence import Divergence, Run, explain
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.rounding import prefilled, walk
from specdecode_ref.models.table import TableModel
from specdecode_ref.models.zoo import Loaded
from specdecode_ref.sampling import SamplingRule

GREEDY = SamplingRule(temperature=0)


def tied(package: Package, seed: int) -> Any:
    """Logits of 0 and 1 only: nearly every step is an exact tie."""
    table = torch.randint(2, (6, 6, 5), generator=torch.Generator().manual_seed(seed))
    return package("models.table").TableModel(table.double())


class Oracle:
    """Drafts a tree at every depth of which the right token comes after a wrong one, so that branches lie scattered."""

    name, features, vocab_size, settings = "oracle", (), None, {}

    def __init__(self, package: Package, right: tuple[int, ...], vocab: int) -> None:
        self.package, self.right, self.vocab = package, right, vocab

    def start(self, prompt: Any, rule: Any, features: Any = ()) -> Oracle:
        return self

    def propose(self, context: Any, coins: Any) -> Any:
        tokens, parents, node = [context.root], [-1], 0
        at = len(context.tokens) - context.prompt_length
        for token in self.right[at : at + min(2, context.room)]:
            tokens += [(token + 1) % self.vocab, token]
            parents += [node, node]
            node = len(tokens) - 1
        draws = (None, *["deterministic"] * (len(tokens) - 1))
        return self.package("tree").DraftTree(tuple(tokens), tuple(parents), draws, (None,) * len(tokens))

    def observe(self, verdict: Any, features: Any) -> None:
        """Nothing to learn."""


def cases(package: Package, seed: int) -> Iterator[tuple[Any, Any, int]]:
    """(model, drafter, end token); no drafter stands for `Oracle`."""
    make = package("models.table").TableModel.random
    draft = make(5, order=2, scale=1.2, seed=seed)
    for name in ("chain", "ngram"):
        yield make(5, order=2, scale=1.0, seed=seed), suite.DRAFTERS[name](package, draft), 4
    yield make(5, order=2, scale=1.0, seed=seed), None, 4
    yield tied(package, seed), suite.DRAFTERS["ngram"](package, draft), 4
    small = suite.transformer(package, seed=seed)
    yield small, package("drafters").early_exit(small, (1, 1, 1), 2), 10
    yield small, None, 10


def explained(package: Package, seed: int, rule: dict[str, Any]) -> Iterator[Divergence]:
    """Plain output of the original beside speculative output of the package, judged by both."""
    for (model, drafter, end), (original, _, _) in zip(cases(package, seed), cases(Package(), seed), strict=True):
        settings = {"temperature": 0, "eos": (end,), **rule}
        prompt = (1, 2, 1, 2)
        plain = autoregressive(original, prompt, rule=SamplingRule(**settings), max_new_tokens=16).tokens
        theirs = package("sampling").SamplingRule(**settings)
        drafter = drafter or Oracle(package, plain, end + 1)
        try:
            fast = package("decode").speculative(model, drafter, prompt, rule=theirs, max_new_tokens=16).tokens
        except RuntimeError:  # a bug that leaves the cache too long for its mask shows itself
            continue
        found = explain(original, prompt, plain, fast, SamplingRule(**settings))
        assert (found.verdict == "same") == (plain == fast)
        own = package("fidelity.divergence").explain(model, prompt, plain, fast, theirs)
        assert own.verdict == found.verdict, "a bug in the package hides itself"
        yield found


BUGS = ["M11", "M12", "M29", "M30", "M31", "M32", "M36", "M37", "M38", "M41"]


@pytest.mark.parametrize("name", BUGS)
def test_known_bugs_are_defects(name: str) -> None:
    rule = {"frequency_penalty": 0.8} if name == "M38" else {}
    found: list[Divergence] = []
    with mutants.get(name).plant() as package:
        for seed in range(8):
            found += [d for d in explained(package, seed, rule) if d.verdict != "same"]
            if len(found) > 3:
                break
    assert found, "the bug was never seen"
    assert {d.verdict for d in found} == {"defect"}, found


@pytest.mark.parametrize("seed", range(2))
def test_the_original_has_none(seed: int) -> None:
    assert {found.verdict for found in explained(Package(), seed, {})} == {"same"}


def flipped(model: Any, prompt: list[int], width: int, length: int) -> tuple[SamplingRule, list[int], list[int]] | None:
    """A rule, and two outputs that part under it by rounding alone; None where this text has no such place.

    The rule's bias on the runner-up of one place lies between the place's gap in one row and in `width` rows, so the
    two shapes choose different tokens there.
    """
    output = list(autoregressive(model, prompt, rule=GREEDY, max_new_tokens=length).tokens)
    text, start = [*prompt, *output], len(prompt) - 1
    shapes = [list(walk(model, text[:-1], prefilled(model, text, start), w)) for w in (1, width)]
    places = []
    for k, (one, many) in enumerate(zip(*shapes, strict=True)):
        first, second = one.topk(2).indices.tolist()
        gaps = [float(row[first].double() - row[second].double()) for row in (one, many)]
        if gaps[0] != gaps[1] and min(gaps) > 0:
            places.append((max(gaps), sum(gaps) / 2, k, first, second))
    for _, bias, k, first, second in sorted(places):
        rule = SamplingRule(temperature=0, logit_bias=((second, bias),))
        plain = list(autoregressive(model, prompt, rule=rule, max_new_tokens=k + 1).tokens)
        if plain[:k] == output[:k]:
            return rule, plain, [*plain[:k], second if plain[k] == first else first]
    return None


def test_float32_ties() -> None:
    """Flips that rounding makes in float32 are ties there, and defects in float64."""
    ties = 0
    for seed in range(4):
        model, exact = suite.transformer(dtype=torch.float32, seed=seed), suite.transformer(seed=seed)
        prompt = [1, 2, 3, seed]
        if case := flipped(model, prompt, 4, 12):
            rule, plain, fast = case
            found = explain(model, prompt, plain, fast, rule)
            assert found.verdict == "tie", found
            assert found.threshold is not None and 0 < max(found.short) <= found.threshold < 1e-4
            assert explain(exact, prompt, plain, fast, rule).verdict == "defect"
            ties += 1
    assert ties > 1


@pytest.fixture(scope="module")
def bfloat16(embedded: Path) -> Loaded:
    """The embedded default in bfloat16."""
    from specdecode_ref.models import zoo

    return zoo.load("smollm2", dtype="bfloat16", device="cpu")


def test_a_bfloat16_tie_of_a_real_model(bfloat16: Loaded) -> None:
    """A tie is a tie in bfloat16, and a wrong token behind it is a defect all the same."""
    model, prompt = bfloat16.model, bfloat16.tokenizer.chat("Why is the sky blue?")
    case = flipped(model, prompt, 5, 6)
    assert case is not None
    rule, plain, fast = case
    found = explain(model, prompt, plain, fast, rule)
    assert found.verdict == "tie" and found.dtype == "bfloat16"
    assert found.places >= 12 and found.noise is not None and 0.05 < found.noise < 2
    behind = explain(model, prompt, plain, [*fast, 7], rule)
    assert behind.verdict == "defect" and behind.later == (len(fast), 1)


def real(loaded: Loaded, text: str, length: int) -> list[Divergence]:
    """Both decode paths for real, with two drafters."""
    ids, rule = loaded.tokenizer.chat(text), SamplingRule(temperature=0, eos=loaded.tokenizer.eos_ids)
    settings: dict[str, Any] = {"rule": rule, "max_new_tokens": length, "level": 1}
    plain = autoregressive(loaded.model, ids, **settings).tokens
    found = []
    for name, gamma in (("ngram", 8), ("early-exit", 4)):
        drafter = build(name, loaded.model, gamma=gamma)
        assert drafter is not None
        fast = speculative(loaded.model, drafter, ids, **settings).tokens
        found.append(explain(loaded.model, ids, plain, fast, rule))
    return found


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
def test_real_bfloat16_differences_are_ties(bfloat16: Loaded, shared_data: Path, number: int) -> None:
    names = ("spec_bench_dev.jsonl", "humaneval_dev.jsonl")
    lines = [line for name in names for line in (shared_data / name).read_text(encoding="utf-8").splitlines()]
    text = json.loads(lines[number * len(lines) // 10])["turns"][0]
    for found in real(bfloat16, text, 64):
        assert found.verdict in ("same", "tie"), found


def test_of_equal_maxima_the_last_is_a_defect() -> None:
    """Rounding moves this model's logits, but two tokens share one of them, so it can never part them."""
    model = suite.transformer(dtype=torch.float32)
    head = model.head
    model.head = lambda x: head(x)[..., [*range(9), 3, 10]]
    rule = SamplingRule(temperature=0, logit_bias=((3, 9.0), (9, 9.0)))
    found = explain(model, [1, 2, 3], [3, 3, 3], [3, 9, 3], rule)
    assert found.noise is not None and found.noise > 0 and found.short == (0, 0)
    assert found.verdict == "defect" and "B's token 9 ties exactly with token 3" in found.reason


TABLE = TableModel.random(5, order=2, seed=3)


def greedy(length: int, rule: SamplingRule = GREEDY) -> tuple[int, ...]:
    return autoregressive(TABLE, [1, 2], rule=rule, max_new_tokens=length).tokens


def test_ends() -> None:
    """Where an output ends is a matter of tokens, limits and stop strings; never of rounding."""
    whole = greedy(8)
    end = whole[5]
    at = whole.index(end) + 1
    rule = SamplingRule(temperature=0, eos=(end,))

    def verdict(a: Any, b: Any, rule: SamplingRule = GREEDY) -> tuple[str, str]:
        found = explain(TABLE, [1, 2], a, b, rule)
        return found.verdict, found.reason

    assert verdict(whole, whole)[0] == "same"
    for pair in ((whole, whole[:4]), (whole[:4], whole), (Run(whole[:4], 8, "stop"), Run(whole, 8, "length"))):
        assert verdict(*pair)[0] == "defect"
    assert "A goes on after the end token" in verdict(whole, whole[:at], rule)[1]
    early = [token for token in range(5) if token not in (whole[0], end)][:1]
    assert "A goes on after the end token" in verdict(whole, early, rule)[1]
    assert "B has 8 tokens where 7 are the limit" in verdict(Run(whole[:7], 7, "length"), Run(whole, 7, "length"))[1]
    assert verdict(Run(whole[:4], 8, "cancelled"), Run(whole, 8, "length"))[0] == "same"
    assert verdict(Run(whole[:4], 4, "length"), Run(whole, 8, "length"))[0] == "same"
    assert verdict(Run(whole[:4], 5, "length"), Run(whole, 8, "length"))[0] == "defect"


def test_an_end_token_in_both_is_not_the_difference() -> None:
    whole = greedy(8)
    other = [*whole[:7], (whole[7] + 1) % 5]
    found = explain(TABLE, [1, 2], whole, other, SamplingRule(temperature=0, eos=(whole[1],)))
    assert found.index == 7 and "below the maximum" in found.reason


def test_gaps_are_those_after_the_rule() -> None:
    """The same tokens, right under a rule and wrong without it; raw logits are reported beside."""
    rule = SamplingRule(temperature=0, frequency_penalty=1.5)
    plain, penalised = greedy(12), greedy(12, rule)
    with_rule = explain(TABLE, [1, 2], plain, penalised, rule)
    without = explain(TABLE, [1, 2], plain, penalised, GREEDY)
    assert with_rule.reason.startswith("A's token") and without.reason.startswith("B's token")
    assert with_rule.readings[0].logits == without.readings[0].logits != with_rule.readings[0].scores


def test_a_model_whose_passes_disagree() -> None:
    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(TABLE, name)

        def forward(self, tokens: Any, parents: Any, cache: Any, features: Any = ()) -> Any:
            out = TABLE.forward(tokens, parents, cache, features)
            return out._replace(logits=out.logits + torch.arange(5) * (tokens.shape[1] > 1))

    found = explain(Wrong(), [1, 2], [1, 2, 3], [1, 2, 4], GREEDY)  # type: ignore[arg-type]
    assert found.verdict == "defect" and "passes disagree" in found.reason


def test_drawn_tokens_are_held_to_their_coin() -> None:
    """With `match` and one seed, the coin must lie between the edges of both tokens, up to rounding."""
    rule, coins = SamplingRule(temperature=0.8), Coins(7)
    drafter = suite.DRAFTERS["chain"](Package(), TableModel.random(5, order=2, seed=4))
    settings: dict[str, Any] = {"rule": rule, "seed": 7, "max_new_tokens": 12}
    plain = autoregressive(TABLE, [1, 2], **settings).tokens
    fast = speculative(TABLE, drafter, [1, 2], verifier="match", **settings).tokens
    assert explain(TABLE, [1, 2], plain, fast, rule, coins=coins).verdict == "same"
    other = [*plain[:6], (plain[6] + 1) % 5]
    found = explain(TABLE, [1, 2], plain, other, rule, coins=coins)
    assert found.verdict == "defect" and found.short[0] == 0 and "B's token" in found.reason
    assert "away from the coin" in found.reason and found.readings[0].first == plain[6]
    with pytest.raises(InputError, match="temperature 0"):
        explain(TABLE, [1, 2], plain, other, rule)
    with pytest.raises(InputError, match="no top_k"):
        explain(TABLE, [1, 2], plain, other, SamplingRule(top_k=2), coins=coins)


def test_a_coin_at_an_edge_in_float32_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rule = suite.transformer(dtype=torch.float32), SamplingRule()
    (row,) = walk(model, [1, 2, 3], prefilled(model, [1, 2, 3], 2), 1)
    cdf = row.double().softmax(-1).cumsum(-1)
    monkeypatch.setattr(Coins, "emit", lambda self, position: float(cdf[4]) + 1e-9)
    found = explain(model, [1, 2, 3], [4], [5], rule, coins=Coins(0))
    assert found.verdict == "tie" and found.short[1] == 0 < found.short[0]
    assert explain(model, [1, 2, 3], [4], [6], rule, coins=Coins(0)).verdict == "defect"
    without = (row.double().index_fill(0, torch.tensor([5]), -torch.inf)).softmax(-1).cumsum(-1)
    monkeypatch.setattr(Coins, "emit", lambda self, position: float(without[4]) - 1e-9)
    forbidden = explain(model, [1, 2, 3], [4], [5], SamplingRule(bad_words=((5,),)), coins=Coins(0))
    assert forbidden.verdict == "defect" and "B's token 5 lies inf" in forbidden.reason


@pytest.mark.parametrize(
    ("prompt", "a", "b", "message"),
    [
        ([], [1], [2], "an empty one"),
        ([1], [], [2], "one token in A"),
        ([1], [1], [5], "5 to 5 in B"),
        ([1, -1], [1], [2], "-1 to 1 in the prompt"),
    ],
)
def test_what_cannot_be_judged(prompt: list[int], a: list[int], b: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        explain(TABLE, prompt, a, b, GREEDY)


def test_json_has_no_infinities() -> None:
    rule = SamplingRule(temperature=0, bad_words=((4,),))
    found = explain(TABLE, [1, 2], [greedy(1, rule)[0]], [4], rule)
    assert found.verdict == "defect" and json.loads(json.dumps(found.as_dict(), allow_nan=False))["short"][1] is None
