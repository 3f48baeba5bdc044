"""The decode loop: what it writes, where it stops, and what it refuses before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdecode_ref.coins import Coins
from specdecode_ref.decode import Generation, Session, autoregressive, speculative
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.errors import InputError, NotApplicableError, UnknownNameError
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule, law, pick
from specdecode_ref.stream import Stream
from specdecode_ref.trace_file import read_trace
from specdecode_ref.tree import DraftTree, depths
from specdecode_ref.types import Context

V = 7
TARGET = TableModel.random(V)
NEAR = TableModel(
    TARGET.table + 0.3 * TableModel.random(V, seed=9).table, TARGET.tilt
)  # a draft model that often agrees
PROMPT = [1, 2, 3, 1, 2]
RULE = SamplingRule(temperature=0.9, repetition_penalty=1.1, frequency_penalty=0.2)

DRAFTERS: dict[str, Any] = {
    "plain": None,
    "ngram": NGram(gamma=4, longest=2, shortest=1),
    "chain": ModelDrafter(NEAR, (1, 1, 1, 1)),
    "the target": ModelDrafter(TARGET, (1, 1, 1, 1)),
    "tree": ModelDrafter(NEAR, (3, 2, 1)),
    "iid tree": ModelDrafter(NEAR, (2, 2), "with_replacement"),
    "hybrid": First([NGram(gamma=3, longest=2, shortest=2), ModelDrafter(NEAR, (2, 1))]),
}
everyone = pytest.mark.parametrize("name", DRAFTERS)


class Letters:
    """Token i is the i-th letter; the last one is a control token, which is no text."""

    def token_bytes(self, token: int) -> bytes:
        return b"<end>" if token == V - 1 else b"abcdef"[token : token + 1]

    def text_bytes(self, token: int) -> bytes:
        return b"" if token == V - 1 else self.token_bytes(token)


def written_out(prompt: Sequence[int], rule: SamplingRule, seed: int, count: int, sequence: int = 0) -> tuple[int, ...]:
    """Plain decoding by its definition, without a cache, a loop of rounds or a stop."""
    tokens = list(prompt)
    for _ in range(count):
        p = law(TARGET.logits_after(tokens), rule, tokens, len(prompt))
        tokens.append(pick(p, Coins(seed, sequence).emit(len(tokens))))
    return tuple(tokens[len(prompt) :])


def valid(generation: Generation, ended: str | None = None) -> Generation:
    """A generation whose trace is a valid file that says the same."""
    data = "".join(generation.trace.lines()).encode()
    read = read_trace(data)
    assert read == generation.trace
    if read.header.level:
        assert read.tokens == generation.tokens
    assert ended is None or read.footer.finish_reason == ended
    return generation


@pytest.mark.parametrize("prompt", [PROMPT, [0], [6, 6]], ids=str)
def test_plain_decoding_is_its_definition(prompt: list[int]) -> None:
    for seed in range(5):
        assert autoregressive(TARGET, prompt, rule=RULE, seed=seed, max_new_tokens=20).tokens == written_out(
            prompt, RULE, seed, 20
        )


@everyone
@pytest.mark.parametrize("prompt", [PROMPT, [0]], ids=str)
def test_match_is_token_for_token_plain_decoding(name: str, prompt: list[int]) -> None:
    for seed in range(4):
        settings: dict[str, Any] = {"rule": RULE, "seed": seed, "max_new_tokens": 24, "verifier": "match"}
        result = valid(Session(TARGET, [prompt], DRAFTERS[name], **settings).run()[0], "length")
        assert result.tokens == written_out(prompt, RULE, seed, 24)


@everyone
def test_greedy_is_greedy_with_every_verifier(name: str) -> None:
    rule = SamplingRule(temperature=0, repetition_penalty=1.3)
    for prompt in (PROMPT, [0], [4, 5]):
        for verifier in ("auto", "match", "tree"):
            result = Session(TARGET, [prompt], DRAFTERS[name], rule=rule, verifier=verifier, max_new_tokens=20).run()[0]
            assert valid(result).tokens == written_out(prompt, rule, 0, 20)


@everyone
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_length_limit_is_exact(name: str, limit: int) -> None:
    for seed in range(4):
        result = Session(TARGET, [PROMPT], DRAFTERS[name], rule=RULE, seed=seed, max_new_tokens=limit).run()[0]
        assert len(valid(result, "length").tokens) == limit
        for r in result.trace.rounds:
            assert max(depths(r.nodes.parent)) < len(PROMPT) + limit - r.committed, "no draft that could not be used"
        longer = Session(TARGET, [PROMPT], DRAFTERS[name], rule=RULE, seed=seed, max_new_tokens=limit + 9).run()[0]
        if name == "plain":
            assert longer.tokens[:limit] == result.tokens


@everyone
def test_the_context_ends_a_generation(name: str) -> None:
    short = TableModel(TARGET.table, TARGET.tilt)
    short.context_length = len(PROMPT) + 4
    result = Session(short, [PROMPT], DRAFTERS[name], rule=RULE, max_new_tokens=1000).run()[0]
    assert len(valid(result, "length").tokens) == 4
    with pytest.raises(InputError, match="a prompt shorter than the context"):
        Session(short, [[1] * short.context_length])


@everyone
@pytest.mark.parametrize("verifier", ["auto", "match"])
def test_an_end_of_text_inside_an_accepted_path_ends_it_there(name: str, verifier: str) -> None:
    """Before it, the tokens are those of a run that knows no end."""
    inside = 0
    for seed in range(12):
        settings: dict[str, Any] = {"seed": seed, "max_new_tokens": 16, "verifier": verifier}
        free = Session(TARGET, [PROMPT], DRAFTERS[name], rule=SamplingRule(), **settings).run()[0]
        result = valid(Session(TARGET, [PROMPT], DRAFTERS[name], rule=SamplingRule(eos=(2, 5)), **settings).run()[0])
        ends = [i for i, token in enumerate(free.tokens) if token in (2, 5)]
        assert result.tokens == (free.tokens[: ends[0] + 1] if ends else free.tokens)
        assert result.trace.footer.finish_reason == ("eos" if ends else "length")
        last = result.trace.rounds[-1]
        inside += last.cut is not None and last.cut.kept < len(last.path)
    assert inside > 0 or name == "plain"


@everyone
@pytest.mark.parametrize("stop", [("ab",), ("c", "cd"), ("de", "d"), "ea"], ids=str)
def test_a_stop_string_inside_an_accepted_path_ends_it_there(name: str, stop: Any) -> None:
    letters, seen = Letters(), set()
    for seed in range(8):
        settings: dict[str, Any] = {"rule": SamplingRule(), "seed": seed, "max_new_tokens": 20, "tokenizer": letters}
        free = Session(TARGET, [PROMPT], DRAFTERS[name], **settings).run()[0]
        session = Session(TARGET, [PROMPT], DRAFTERS[name], stop=stop, **settings)
        streamed = "".join(piece.text for step in session for piece in step.pieces)
        result = valid(session.generation())
        stream = Stream(letters.text_bytes, [stop] if isinstance(stop, str) else stop)
        text, count = "", 0
        for token in free.tokens:
            text, count = text + "".join(piece.text for piece in stream.push(token)), count + 1
            if stream.stopped:
                break
        text += "".join(piece.text for piece in stream.finish())
        assert result.text == streamed == text
        assert result.tokens == free.tokens[:count]
        assert not any(s in result.text for s in ([stop] if isinstance(stop, str) else stop))
        seen.add(result.trace.footer.finish_reason)
    assert "stop" in seen


def test_an_end_of_text_wins_over_the_limit_and_over_a_stop_string() -> None:
    always = TableModel(torch.full((2, 1), 0.0), None)
    letters: Any = type("A", (), {"token_bytes": lambda self, t: b"a", "text_bytes": lambda self, t: b"a"})()
    settings: dict[str, Any] = {"tokenizer": letters, "stop": ["a"], "max_new_tokens": 1}
    for rule, reason in ((SamplingRule(eos=(0,)), "eos"), (SamplingRule(), "stop")):
        result = valid(autoregressive(always, [0], rule=rule, **settings), reason)
        assert len(result.tokens) == 1 and result.text == ""
    assert valid(autoregressive(always, [0], max_new_tokens=1), "length").tokens == (0,)


def test_min_new_tokens_holds_inside_a_draft() -> None:
    rule = SamplingRule(eos=(0, 1, 2, 3), min_new_tokens=6)
    for name, drafter in DRAFTERS.items():
        for seed in range(3):
            result = Session(TARGET, [PROMPT], drafter, rule=rule, seed=seed, max_new_tokens=40).run()[0]
            assert len(valid(result, "eos").tokens) > 6, name


@everyone
def test_the_level_of_the_trace_changes_no_token(name: str) -> None:
    results = [
        Session(TARGET, [PROMPT], DRAFTERS[name], rule=RULE, seed=4, max_new_tokens=30, level=level).run()[0]
        for level in range(4)
    ]
    assert len({valid(result).tokens for result in results}) == 1


def test_a_drafter_that_ignores_the_room_is_cut() -> None:
    class Long:
        name, features, vocab_size, settings = "long", (), None, {}

        def start(self, prompt: Any, rule: Any, features: Any = ()) -> Any:
            return self

        def propose(self, context: Context, coins: Coins) -> DraftTree:
            tokens = list(context.tokens)
            for _ in range(6):
                tokens.append(int(TARGET.logits_after(tokens).argmax()))
            return DraftTree.chain(context.root, tuple(tokens[-6:]))

        def observe(self, verdict: Any, features: Any) -> None: ...

    drafter: Any = Long()
    rule = SamplingRule(temperature=0)
    for limit in range(1, 16):
        result = valid(speculative(TARGET, drafter, PROMPT, rule=rule, max_new_tokens=limit), "length")
        assert result.tokens == written_out(PROMPT, rule, 0, limit)
        assert sum(r.kept for r in result.trace.rounds) == limit


def test_prompts_of_arrays_and_tensors_are_prompts() -> None:
    expected = autoregressive(TARGET, PROMPT, max_new_tokens=5)
    for prompt in (np.array(PROMPT), torch.tensor(PROMPT), tuple(PROMPT)):
        result: Any = valid(autoregressive(TARGET, prompt, max_new_tokens=5))
        assert result.tokens == expected.tokens and result.trace.header.prompt == tuple(PROMPT)


def test_the_header_says_which_rule_judged() -> None:
    for name, verifier, expected in (
        ("plain", "auto", "chain"),
        ("chain", "auto", "chain"),
        ("tree", "auto", "tree"),
        ("tree", "match", "match"),
        ("chain", "tree", "tree"),
    ):
        trace = Session(TARGET, [PROMPT], DRAFTERS[name], verifier=verifier, max_new_tokens=9).run()[0].trace
        assert trace.header.verifier == expected


@pytest.mark.parametrize(
    "prompts, settings, error",
    [
        ([], {}, InputError),
        ([[]], {}, InputError),
        ([[1], []], {}, InputError),
        ([[V]], {}, InputError),
        ([[-1]], {}, InputError),
        ([[1]], {"max_new_tokens": 0}, InputError),
        ([[1]], {"max_new_tokens": -3}, InputError),
        ([[1]], {"level": 4}, InputError),
        ([[1]], {"verifier": "greedy"}, UnknownNameError),
        ([[1]], {"stop": ["a"]}, InputError),
        ([[1]], {"stop": [""], "tokenizer": Letters()}, InputError),
        ([[1]], {"seed": -1}, InputError),
        ([[1]], {"seed": 2**64}, InputError),
        ([[1], [2]], {"sequences": [0]}, InputError),
        ([[1]], {"sequences": [-1]}, InputError),
        ([[1]], {"rule": SamplingRule(eos=(V,))}, InputError),
        ([[1]], {"rule": SamplingRule(bad_words=((1, V),))}, InputError),
        ([[1]], {"drafter": ModelDrafter(TableModel.random(V + 1))}, InputError),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_input_is_refused_before_the_model_runs(
    prompts: Any, settings: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the model ran")

    monkeypatch.setattr(TARGET, "prefill", never)
    monkeypatch.setattr(TARGET, "forward", never)
    with pytest.raises(error, match=r"expected .*; got .*; "):
        Session(TARGET, prompts, **settings)


def test_a_rule_for_chains_refuses_a_tree() -> None:
    with pytest.raises(NotApplicableError):
        Session(TARGET, [PROMPT], DRAFTERS["tree"], verifier="chain").run()
