"""The law that logits and a rule give, beside transformers' own processors, and the token that a law and a coin give.

The order of rules is never written down twice for transformers: its own `generate` machinery builds the list. vLLM's
order and its reading of bad words are from vllm/v1/sample/sampler.py (the docstring of `Sampler`, steps 4 to 7),
vllm/v1/sample/logits_processor/__init__.py (`BUILTIN_LOGITS_PROCESSORS`) and vllm/v1/sample/ops/bad_words.py.
"""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_ref.errors import InputError, NumericalError
from specdecode_ref.sampling import Laws, SamplingRule, law, pick, residual, without
from specdecode_ref.tree import DraftTree

transformers = pytest.importorskip("transformers")
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor  # noqa: E402
from transformers.generation import logits_process as hf  # noqa: E402

V = 97
PROMPT = [3, 5, 5, 11, 40, 2]
OUTPUT = [7, 7, 3, 9, 7, 40]
EOS = (0, 13)

RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.5},
    "top_k": {"top_k": 5},
    "top_k beyond V": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "top_p tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.08},
    "min_p of one": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.4},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.25},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    # transformers holds biases in float32, so these are exact in it.
    "bias": {"logit_bias": ((4, 2.5), (40, -1.75))},
    "bad words": {"bad_words": ((8,), (40, 21), (7, 40, 22), (2, 7, 7), (5, 5, 11))},
    "bad word longer than the text": {"bad_words": ((*PROMPT, *OUTPUT, 1, 2),)},
    "bad word as long as the text": {"bad_words": ((*PROMPT, *OUTPUT, 6),)},
    "min new tokens": {"min_new_tokens": len(OUTPUT) + 1, "eos": EOS},
    "min new tokens reached": {"min_new_tokens": len(OUTPUT), "eos": EOS},
}
TOGETHER: dict[str, Any] = {
    "temperature": 1.4,
    "top_k": 40,
    "top_p": 0.85,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((4, 2.5), (13, 4.0), (21, 3.0), (40, -1.75)),
    "bad_words": ((8,), (40, 21)),
    "min_new_tokens": 9,
    "eos": EOS,
}


class Published(LogitsProcessor):
    """mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence, as OpenAI's API reference defines it.

    c[j] counts how often token j was sampled before: the output, not the prompt.
    """

    def __init__(self, rule: SamplingRule, prompt_length: int) -> None:
        self.rule, self.prompt_length = rule, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt_length :].tolist()).items():
            scores[0, token] -= count * self.rule.frequency_penalty + float(count > 0) * self.rule.presence_penalty
        return scores


def processors(rule: SamplingRule, prompt_length: int) -> list[Any]:
    """What `generate` would run for this rule, in its own order, presence and frequency right after repetition."""
    config = GenerationConfig(
        do_sample=True,
        temperature=rule.temperature,
        top_k=rule.top_k,
        top_p=rule.top_p,
        min_p=rule.min_p or None,
        repetition_penalty=rule.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in rule.logit_bias] or None,
        bad_words_ids=[list(word) for word in rule.bad_words] or None,
        min_new_tokens=rule.min_new_tokens or None,
    )
    config._eos_token_tensor = torch.tensor(rule.eos) if rule.eos else None
    host = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda defaults, _custom: defaults,
    )
    found = list(GenerationMixin._get_logits_processor(host, config, prompt_length, device="cpu", model_kwargs={}))
    first = (hf.SequenceBiasLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor)
    after = sum(type(p) in first for p in found)
    return [*found[:after], Published(rule, prompt_length), *found[after:]]


def expected(logits: Tensor, found: list[Any], history: list[int]) -> Tensor:
    """The law that a list of processors gives."""
    scores, ids = logits.double()[None].clone(), torch.tensor([history])
    for processor in found:
        scores = processor(ids, scores)
    return scores[0].softmax(-1)


def logits(seed: int, scale: float = 2.0, size: int = V, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


def largest_gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_that_of_transformers(name: str) -> None:
    rule = SamplingRule(**RULES[name])
    for seed in range(10):
        row = logits(seed)
        found = processors(rule, len(PROMPT))
        for history in ([*PROMPT, *OUTPUT], PROMPT):
            got = law(row, rule, history, len(PROMPT))
            assert largest_gap(got, expected(row, found, history)) < 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_rules_together_are_those_of_transformers(seed: int) -> None:
    row, history = logits(seed), [*PROMPT, *OUTPUT]
    rule = SamplingRule(**TOGETHER)
    found = processors(rule, len(PROMPT))
    assert len(found) == 9, "each rule has its processor"
    assert largest_gap(law(row, rule, history, len(PROMPT)), expected(row, found, history)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_dtype_are_read_exactly(dtype: torch.dtype) -> None:
    rule = SamplingRule(temperature=0.7, repetition_penalty=1.3, top_k=20)
    row, history = logits(1, dtype=dtype), [*PROMPT, *OUTPUT]
    got = law(row, rule, history, len(PROMPT))
    assert got.dtype == torch.float64
    assert largest_gap(got, expected(row, processors(rule, len(PROMPT)), history)) < 1e-12
    assert row.dtype == dtype


@pytest.mark.parametrize("order", ["transformers", "vllm"])
def test_the_logits_are_left_alone(order: Any) -> None:
    row = logits(0)
    before = row.clone()
    law(row, SamplingRule(**TOGETHER, order=order), [*PROMPT, *OUTPUT], len(PROMPT))
    assert torch.equal(row, before)


def vllm(row: Tensor, rule: SamplingRule, history: list[int]) -> Tensor:
    """transformers' processors in vLLM's order; bad words see the output only, as vLLM's do."""
    ids, output, scores = torch.tensor([history]), torch.tensor([history[len(PROMPT) :]]), row.double()[None].clone()
    bad = hf.NoBadWordsLogitsProcessor([list(word) for word in rule.bad_words])
    steps: list[tuple[Any, Tensor]] = [
        (bad, output),
        (hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), rule.min_new_tokens, list(rule.eos)), ids),
        (hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in rule.logit_bias]), ids),
        (hf.RepetitionPenaltyLogitsProcessor(rule.repetition_penalty), ids),
        (Published(rule, len(PROMPT)), ids),
        (hf.TemperatureLogitsWarper(rule.temperature), ids),
        (hf.MinPLogitsWarper(rule.min_p), ids),
        (hf.TopKLogitsWarper(rule.top_k), ids),
        (hf.TopPLogitsWarper(rule.top_p), ids),
    ]
    for processor, seen in steps:
        scores = processor(seen, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize("seed", range(20))
def test_vllms_order(seed: int) -> None:
    row, history = logits(seed), [*PROMPT, *OUTPUT]
    settings = TOGETHER | {"min_p": 0.05, "top_k": 12, "top_p": 0.9, "bad_words": ((8,), (40, 21), (2, 7, 30))}
    rule = SamplingRule(**settings, order="vllm")
    assert largest_gap(law(row, rule, history, len(PROMPT)), vllm(row, rule, history)) < 1e-12


def test_the_two_orders_differ_where_they_should() -> None:
    row = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.10], dtype=torch.float64).log()
    # Top-p first keeps two tokens, of which both have half the largest; min-p first keeps four, top-p three of them.
    settings: dict[str, Any] = {"top_p": 0.5, "min_p": 0.5}
    ours = law(row, SamplingRule(**settings), [1], 1)
    theirs = law(row, SamplingRule(**settings, order="vllm"), [1], 1)
    assert ours.nonzero()[:, 0].tolist() == [0, 1]
    assert theirs.nonzero()[:, 0].tolist() == [0, 1]
    settings["top_p"] = 0.6
    assert law(row, SamplingRule(**settings), [1], 1).count_nonzero() == 3
    assert law(row, SamplingRule(**settings, order="vllm"), [1], 1).count_nonzero() == 2


def test_bad_words_begin_in_the_output_only_for_vllm() -> None:
    row, rule = logits(0), {"bad_words": ((2, 9), (4, 2, 8))}
    history = [4, 2]
    assert law(row, SamplingRule(**rule), history, 2)[[9, 8]].tolist() == [0, 0]
    assert law(row, SamplingRule(**rule, order="vllm"), history, 2)[[9, 8]].min() > 0
    assert law(row, SamplingRule(**rule, order="vllm"), history, 1)[9] == 0
    assert law(row, SamplingRule(**rule, order="vllm"), history, 1)[8] > 0


def test_an_end_of_text_may_be_a_bad_word() -> None:
    """transformers drops such a word without a sign; a user who forbids a token means it."""
    assert law(logits(0), SamplingRule(bad_words=((0,),), eos=(0,)), [1], 1)[0] == 0


def test_top_k_keeps_ties() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert law(row, SamplingRule(top_k=2), [0], 1).nonzero()[:, 0].tolist() == [1, 2, 3, 4]


def test_top_p_takes_ties_in_token_order() -> None:
    row = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]).log()
    assert law(row, SamplingRule(top_p=0.6), [0], 1).nonzero()[:, 0].tolist() == [0, 1, 2]
    assert law(row, SamplingRule(top_p=0.1), [0], 1).nonzero()[:, 0].tolist() == [0]


def test_top_p_reaches_the_mass_and_no_more() -> None:
    row = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    for top_p, kept in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (1.0, 4)):
        assert law(row, SamplingRule(top_p=top_p), [0], 1).count_nonzero() == kept
    for top_p, kept in ((0.25, 1), (0.5, 2), (0.75, 3)):  # a flat law has no rounding: mass reached is enough
        assert law(torch.zeros(4), SamplingRule(top_p=top_p), [0], 1).count_nonzero() == kept


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 12.0], ids=["flat", "random", "usual", "peaked"])
@pytest.mark.parametrize("top_p", [0.01, 0.9, 0.999999])
def test_a_partial_sort_is_a_full_sort(scale: float, top_p: float) -> None:
    row = logits(5, scale, size=49_152, dtype=torch.bfloat16)  # bfloat16: thousands of ties
    p = row.double().softmax(-1)
    ordered, tokens = p.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = torch.zeros(len(p), dtype=torch.bool)
    kept[tokens[before < top_p]] = True
    got = law(row, SamplingRule(top_p=top_p), [0], 1) > 0
    # The sums are the same up to rounding, so at most the token at the very edge may differ.
    assert int((got != kept).sum()) <= 1


def test_greedy_is_a_point_mass_on_the_first_maximum() -> None:
    row = torch.tensor([1.0, 4.0, 4.0, 2.0])
    rule = SamplingRule(temperature=0, top_k=3, top_p=0.5, min_p=0.9)
    assert law(row, rule, [0], 1).tolist() == [0, 1, 0, 0]
    assert law(row, SamplingRule(temperature=0, bad_words=((1,),)), [0], 1).tolist() == [0, 0, 1, 0]
    wide = torch.zeros(49_152)
    wide[[20_000, 30_000, 49_151]] = 1
    assert int(law(wide, SamplingRule(temperature=0), [0], 1).argmax()) == 20_000


@pytest.mark.parametrize("temperature", [1e-3, 1e-100, 1e-300, 5e-324])
def test_a_cold_law_is_a_point_mass(temperature: float) -> None:
    row = torch.tensor([-800.0, 30.0, 29.0, -1e5])
    assert law(row, SamplingRule(temperature=temperature), [0], 1).tolist() == [0, 1, 0, 0]


def test_a_hot_law_is_uniform() -> None:
    assert law(logits(0, size=4), SamplingRule(temperature=1e308), [0], 1).tolist() == [0.25] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": ((1, -math.inf),)},
        {"logit_bias": ((-1, 1.0),)},
        {"bad_words": ((),)},
        {"bad_words": ((1, -2),)},
        {"eos": (-1,)},
        {"min_new_tokens": -1},
        {"order": "alphabetical"},
    ],
    ids=str,
)
def test_a_rule_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"expected .*; got .*; "):
        SamplingRule(**wrong)


@pytest.mark.parametrize("wrong", [{"logit_bias": ((5, 1.0),)}, {"bad_words": ((1, 5),)}, {"eos": (5,)}], ids=str)
def test_a_token_outside_the_vocabulary_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="from 0 to 4"):
        law(torch.zeros(5), SamplingRule(**wrong), [1], 1)


@pytest.mark.parametrize(
    "rule",
    [{}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}, {"bad_words": ((2,),)}, TOGETHER],
    ids=str,
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_refused(rule: dict[str, Any], value: float) -> None:
    for order in ("transformers", "vllm"):
        row = logits(0)
        row[2] = value  # the bad word too: what is wrong with the model must not be hidden by a rule
        with pytest.raises(NumericalError, match="logits with a finite maximum"):
            law(row, SamplingRule(**rule, order=order), [*PROMPT, *OUTPUT], len(PROMPT))


def test_a_rule_that_leaves_nothing_is_refused() -> None:
    rule = SamplingRule(bad_words=tuple((t,) for t in range(4)))
    with pytest.raises(NumericalError, match="leaves a token"):
        law(torch.zeros(4), rule, [1], 1)
    with pytest.raises(NumericalError, match="leaves a token"):
        law(torch.zeros(2), SamplingRule(eos=(0, 1), min_new_tokens=1), [1], 1)


def test_logits_of_minus_infinity_are_tokens_that_never_come() -> None:
    row = torch.tensor([0.0, -math.inf, 0.0])
    for rule in (SamplingRule(), SamplingRule(top_k=3), SamplingRule(top_p=0.99), SamplingRule(repetition_penalty=1.2)):
        assert law(row, rule, [1], 1).tolist() == [0.5, 0, 0.5]


def test_a_text_may_be_empty() -> None:
    rule = SamplingRule(repetition_penalty=1.2, presence_penalty=1, bad_words=((1, 2),), min_new_tokens=1, eos=(0,))
    assert law(torch.zeros(3), rule, [], 0).tolist() == [0, 0.5, 0.5]


def test_penalties_count_each_nodes_own_path() -> None:
    """Siblings do not see each other, and the root is counted once."""
    rule = SamplingRule(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    committed, prompt_length = [1, 2, 3, 4], 2
    draft = DraftTree((4, 5, 6, 5), (-1, 0, 0, 1), (None, *["deterministic"] * 3), (None,) * 4)
    rows = torch.stack([logits(i, size=8) for i in range(4)])
    laws = Laws(rows, rule, lambda node: [*committed, *draft.history(node)], prompt_length)
    for node, path in enumerate(([], [5], [6], [5, 5])):
        history = [*committed, *path]
        assert not laws.known(node)
        assert largest_gap(laws[node], expected(rows[node], processors(rule, prompt_length), history)) < 1e-12
        assert laws.known(node)
        assert laws[node] is laws[node]


ALMOST_ONE = 1 - 2.0**-53


def test_pick_at_the_edges() -> None:
    assert [pick(torch.tensor([0.25, 0.5, 0.25]), u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, ALMOST_ONE)] == [
        *(0, 0, 1, 1, 2, 2)
    ]


def test_pick_never_takes_a_token_without_mass() -> None:
    for size in (4, 5, 100, 49_152):
        p = logits(size, size=size).softmax(-1)
        p[0] = p[-1] = p[size // 2] = 0
        for u in (0.0, 2.0**-53, 0.5, ALMOST_ONE):
            assert p[pick(p, u)] > 0


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 0.37, 1.0, 1 + 2.0**-52, 3.0, 1e300])
def test_pick_does_not_need_a_normalised_law(scale: float) -> None:
    p = torch.tensor([0.0, 0.25, 0.5, 0.25, 0.0], dtype=torch.float64) * scale
    assert [pick(p, u) for u in (0.0, 0.3, ALMOST_ONE)] == [1, 2, 3]


def test_pick_is_in_float64_whatever_the_law_is_in() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert pick(torch.tensor([0.5, 0.5], dtype=dtype), ALMOST_ONE) == 1


@pytest.mark.parametrize("wrong", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [0.0, 5e-324]], ids=str)
def test_pick_refuses_what_is_not_a_law(wrong: list[float]) -> None:
    with pytest.raises(NumericalError):
        pick(torch.tensor(wrong, dtype=torch.float64), ALMOST_ONE)


def test_pick_inverts_the_cumulative_law() -> None:
    p = logits(1, size=50).softmax(-1)
    cdf = [math.fsum(p[: i + 1].tolist()) for i in range(50)]
    for i in range(2000):
        u = (i + 0.5) / 2000
        assert pick(p, u) == next(t for t in range(50) if cdf[t] > u * cdf[-1])


def test_residual_and_without() -> None:
    p, q, one = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [1.0, 0, 0]))
    assert residual(p, q).tolist() == [1, 0, 0]
    assert residual(p, one).tolist() == pytest.approx([0, 0.6, 0.4], abs=1e-15)
    assert torch.equal(residual(p, p), p), "no mass is left, so it emits from p"
    assert without(q, []) is q
    assert without(q, [0, 2]).tolist() == [0, 1, 0]
    assert torch.equal(without(q, [0, 1, 2]), q)
    assert p.tolist() == [0.5, 0.3, 0.2] and q.tolist() == [0.2, 0.5, 0.3], "arguments are left alone"
