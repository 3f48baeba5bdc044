"""Measuring: the texts, drafts and costs that a calibration is made of are those of the real target and drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from specdecode_ref.decode import Session
from specdecode_ref.drafters import measuring
from specdecode_ref.drafters.calibration import Calibration, Subject
from specdecode_ref.drafters.choice import forecast, resolve
from specdecode_ref.drafters.eagle import Eagle, EagleHead, Fusion
from specdecode_ref.drafters.hybrid import Hybrid
from specdecode_ref.drafters.measuring import calibrate
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import Auto, Dynamic, Shape
from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.setups import transformer
from specdecode_ref.models.base import Model
from specdecode_ref.models.layers import Layer, Weights
from specdecode_ref.models.linear import pack
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule

pytestmark = pytest.mark.usefixtures("short_calibration")

SUBJECT = Subject("org/target", "abc", "model", "123", "cpu", "float32", "2.0", 1)
V = 11


class Letters:
    """A tokenizer of a few tokens: a text is spelled by its letters, modulo the vocabulary."""

    def __init__(self, eos_ids: tuple[int, ...] = (), chat_template: str | None = None) -> None:
        self.eos_ids, self.chat_template = eos_ids, chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(c) % V for c in text]

    def chat(self, messages: str) -> list[int]:
        return [V - 1, *self.encode(messages)]


TARGET = TableModel.random(V, order=2, period=5, seed=0)


def rough(seed: int = 1, noise: float = 1.0) -> TableModel:
    """A draft model that often agrees with the target."""
    other = TableModel.random(V, order=2, period=5, seed=seed)
    return TableModel(TARGET.table + noise * other.table, TARGET.tilt)


DRAFT = rough()


def measured(make: Callable[[Shape], Any] = lambda shape: ModelDrafter(DRAFT, shape), **settings: Any) -> Calibration:
    target: Model = settings.pop("target", TARGET)
    return calibrate(target, make, settings.pop("tokenizer", Letters()), SUBJECT, **settings)


@cache
def standard() -> Calibration:
    """One that many tests read."""
    return measured()


def written() -> list[int]:
    """What the target writes after the first prompt."""
    prompt = Letters().encode(measuring.PROMPTS[0])
    return list(Session(TARGET, [prompt], rule=SamplingRule(temperature=0), max_new_tokens=40).run()[0].tokens)


def rounds(shape: Shape, lengths: list[int], target: Model = TARGET, make: Any = None) -> tuple[int, int]:
    """Rounds and tokens of the real loop at temperature 0, up to the round that reaches each text's length."""
    drafter = make(shape) if make else ModelDrafter(DRAFT, shape)
    total = tokens = 0
    for prompt, length in zip(measuring.PROMPTS, lengths, strict=True):
        session = Session(
            target, [Letters().encode(prompt)], drafter, rule=SamplingRule(temperature=0), max_new_tokens=length + 20
        )
        done = 0
        for step in session:
            total += 1
            done += step.round.kept
            if done >= length:
                break
        tokens += done
    return total, tokens


def test_a_text_ends_where_the_target_ends_it() -> None:
    plain = standard()
    eos = written()[5]
    ended = measured(tokenizer=Letters(eos_ids=(eos,)))
    assert len(ended.texts[0]) <= 6 < len(plain.texts[0])
    assert max(len(draft.path) - 1 + place for place, draft in enumerate(ended.texts[0])) <= len(ended.texts[0])


def test_a_chat_template_is_used_where_there_is_one() -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(TableModel):
        def prefill(self, prompts: Any, cache: Any, features: Any = ()) -> Any:
            seen.extend(map(tuple, prompts))
            return super().prefill(prompts, cache, features)

    measured(target=Watching(TARGET.table, TARGET.tilt), tokenizer=Letters(chat_template="x"), seconds=0.0)
    assert seen[0] == (V - 1, *Letters().encode(measuring.PROMPTS[0]))[:-1]


def test_without_time_a_little_is_measured_all_the_same() -> None:
    heard: list[tuple[float, str]] = []
    found = measured(seconds=0.0, progress=lambda share, what: heard.append((share, what)))
    assert [len(text) for text in found.texts] == [1, 1]
    assert set(found.rows) == {1, 4} and set(found.level) == {1, 2}
    assert (
        heard[0][0] == 0 and heard[-1][0] == 1 and [share for share, _ in heard] == sorted(share for share, _ in heard)
    )


def test_a_context_too_short_is_refused_before_anything_runs() -> None:
    short = TableModel(TARGET.table, TARGET.tilt)
    short.context_length = 49
    with pytest.raises(InputError, match="a context of 50 tokens or more"):
        measured(target=short)
    short.context_length = 55
    assert len(measured(target=short, seconds=0.0).texts) == 2


def test_a_drafter_that_never_drafts_cannot_be_calibrated() -> None:
    nowhere = rough()
    nowhere.context_length = 1
    with pytest.raises(InputError, match="a drafter that drafts"):
        measured(lambda shape: ModelDrafter(nowhere, shape), seconds=0.0)


def test_a_hybrid_can_be_calibrated() -> None:
    """Where its lookup took a round alone, no head was asked how sure it was."""

    def make(shape: Shape) -> Hybrid:
        return Hybrid(NGram(3, 3, 1), ModelDrafter(DRAFT, shape))

    found = measured(make)
    assert any(len(draft.scores) > 1 and not any(draft.scores) for text in found.texts for draft in text)
    best = resolve(Auto(), found, (Dynamic,))
    assert isinstance(best, Dynamic)
    total, tokens = rounds(Dynamic(4, 4, 9), [len(text) for text in found.texts], TARGET, make)
    assert forecast(Dynamic(4, 4, 9), found).tau == pytest.approx(tokens / total, rel=0.15)


def eagle_head(hidden: int, vocab: int, layers: tuple[int, ...]) -> EagleHead:
    """One random layer over the fused features of a tiny target."""
    config = dataclasses.replace(transformer(dtype=torch.float32).truncated(1).config, vocab_size=vocab)
    generator = torch.Generator().manual_seed(5)

    def random_linear(rows: int, columns: int) -> Any:
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return pack(weight, None, torch.float32, torch.device("cpu"))

    wide = (config.heads + 2 * config.kv_heads) * config.head_dim
    layer = Layer(
        attention_norm=torch.ones(hidden),
        qkv=random_linear(wide, 2 * hidden),
        q_norm=None,
        k_norm=None,
        output=random_linear(hidden, hidden),
        mlp_norm=torch.ones(hidden),
        gate_up=random_linear(2 * config.intermediate, hidden),
        down=random_linear(hidden, config.intermediate),
    )
    table = torch.randn(vocab, hidden, generator=generator)
    weights = Weights(table, [layer], torch.ones(hidden), random_linear(vocab, hidden))
    fusion = Fusion(layers, random_linear(hidden, len(layers) * hidden), torch.ones(hidden))
    return EagleHead(config, weights, fusion, "eagle", None)


def test_a_head_is_measured_on_the_features_it_decodes_with() -> None:
    """At every place where a real round began, its draft there was the very tree that is measured there."""
    target, head = transformer(dtype=torch.float32), eagle_head(16, V, (1, 2, 3))
    shape, proposed = Dynamic(4, 4, 12), {}

    class Noting(Eagle):
        def start(self, prompt: Any, rule: Any, features: Any = ()) -> Any:
            proposer = super().start(prompt, rule, features)
            propose = proposer.propose

            def noted(context: Any, coins: Any) -> Any:
                proposed[context.base] = propose(context, coins)
                return proposed[context.base]

            proposer.propose = noted  # type: ignore[method-assign, assignment]
            return proposer

    prompt, rule = Letters().encode(measuring.PROMPTS[0]), SamplingRule(temperature=0)
    session = Session(target, [prompt], Noting(head, shape), rule=rule, max_new_tokens=40)
    text = session.run()[0].tokens
    features = measuring._features(target, Eagle(head), [*prompt, *text])
    trees = list(measuring._proposals(Eagle(head, shape), prompt, text, features))
    begun = [base for base in proposed if base < len(prompt) + 40 - measuring.AHEAD]
    assert len(begun) > 8
    for base in begun:
        assert trees[base - len(prompt)].tokens == proposed[base].tokens


def test_a_calibrated_head_foretells_its_own_decoding() -> None:
    target, head = transformer(dtype=torch.float32), eagle_head(16, V, (1, 2, 3))
    found = measured(lambda shape: Eagle(head, shape), target=target)
    total, tokens = rounds(Dynamic(3, 4, 12), [len(t) for t in found.texts], target, lambda shape: Eagle(head, shape))
    assert forecast(Dynamic(3, 4, 12), found).tau == pytest.approx(tokens / total, rel=0.02)
    assert sum(map(sum, found.acceptance)) > 0
