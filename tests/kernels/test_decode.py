"""The loop on the device, through the interpreter on a small model: the same tokens as the loop in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from specdecode_kernels import decode
from specdecode_kernels.round import Round
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdecode_ref.backends import Job, resolve
from specdecode_ref.batched.records import Drafts, Rules
from specdecode_ref.coins import Coins
from specdecode_ref.decode import Generation, Session
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.eagle import rms_norm
from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.medusa import Medusa, MedusaHeads
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import parse
from specdecode_ref.errors import NotApplicableError, NumericalError, UnknownNameError
from specdecode_ref.models.linear import pack
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace_file import read_trace

LONG = pytest.mark.long
V, HIDDEN, HEADS, HEAD_DIM, LAYERS = 29, 24, 2, 64, 1
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [2])
SAMPLED, GREEDY = SamplingRule(temperature=0.8), SamplingRule(temperature=0)
CUT = SamplingRule(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02)


def random_model(seed: int = 5, context: int = 64, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    config = CONFIG | {"max_position_embeddings": context} | changes
    width, inner, q, kv = HIDDEN, 32, HEADS * config["head_dim"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], width), "model.norm": (width,)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.q_proj": (q, width), f"{at}self_attn.o_proj": (width, q)}
        shapes |= {f"{at}self_attn.k_proj": (kv, width), f"{at}self_attn.v_proj": (kv, width)}
        shapes |= {at + "mlp.gate_proj": (inner, width), at + "mlp.up_proj": (inner, width)}
        shapes |= {at + "mlp.down_proj": (width, inner)}
        shapes |= {at + "input_layernorm": (width,), at + "post_attention_layernorm": (width,)}
        if config["model_type"] == "qwen3":
            shapes |= dict.fromkeys((at + "self_attn.q_norm", at + "self_attn.k_norm"), (config["head_dim"],))
    weights = {f"{n}.weight": torch.randn(shape, generator=generator) * 0.5 for n, shape in shapes.items()}
    return Transformer.load(config, weights, dtype)


def reduced_model(words: Words) -> Transformer:
    """Reads the whole vocabulary, and guesses some of it: as the shipped draft model does."""
    model = random_model(8)
    model.head = pack(model.table[words.ids], None, torch.float32, torch.device("cpu"))
    return model


def medusa_heads(words: Words | None = None) -> MedusaHeads:
    generator = torch.Generator().manual_seed(1)

    def product(*shape: int) -> Any:
        return pack(torch.randn(*shape, generator=generator) * 0.4, None, torch.float32, torch.device("cpu"))

    blocks = [[product(HIDDEN, HIDDEN)] for _ in range(3)]
    size = len(words.ids) if words else V
    return MedusaHeads(blocks, [product(size, HIDDEN)], rms_norm(torch.ones(HIDDEN), 1e-5), LAYERS, V, words)


TARGET = random_model()
FEWER = Words(torch.tensor([1, 2, 3, 4, 5, 7, 9, 11, 13, 20, 21, 27, 28]), V)
DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "ngram": NGram(gamma=3, longest=3, shortest=1),
    "model": ModelDrafter(random_model(6), parse("chain:3")),  # type: ignore[arg-type]
    "short": ModelDrafter(random_model(6, context=16), parse("chain:3")),  # type: ignore[arg-type]
    "words": ModelDrafter(reduced_model(FEWER), parse("chain:2"), words=FEWER),  # type: ignore[arg-type]
    "medusa": Medusa(medusa_heads(), parse("static:0.1.2.00.10.000")),  # type: ignore[arg-type]
    "itself": ModelDrafter(TARGET, (1, 1, 1)),
    "reduced": Medusa(medusa_heads(FEWER), parse("static:0.00.1.000")),  # type: ignore[arg-type]
}


def generations(backend: str, drafter: str, rule: SamplingRule, **settings: Any) -> list[Generation]:
    settings = {"max_new_tokens": 4, "seed": 11} | settings
    model, prompts = settings.pop("model", TARGET), settings.pop("prompts", PROMPTS)
    return Session(model, prompts, DRAFTERS[drafter], rule=rule, backend=backend, **settings).run()


def compare(drafter: str, rule: SamplingRule = SAMPLED, **settings: Any) -> list[Generation]:
    """Decode with both backends; they must agree in tokens, rounds and texts, and ours must give a valid trace."""
    found = generations("triton", drafter, rule, **settings)
    for ours, theirs in zip(found, generations("torch", drafter, rule, **settings), strict=True):
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
        same_rounds(ours, theirs)
        assert (
            read_trace("".join(ours.trace.lines()).encode()).footer.finish_reason == theirs.trace.footer.finish_reason
        )
    return found


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("model", SAMPLED),
        ("medusa", SAMPLED),
        *(pytest.param(name, SAMPLED, marks=LONG) for name in ("none", "ngram", "short", "words", "reduced")),
        *(pytest.param(name, GREEDY, marks=LONG) for name in ("ngram", "model", "words", "medusa")),
        *(pytest.param(name, CUT, marks=LONG) for name in ("none", "ngram", "model", "medusa")),
    ],
)
def test_the_same_tokens_and_rounds_as_the_loop_in_pytorch(drafter: str, rule: SamplingRule) -> None:
    compare(drafter, rule, max_new_tokens=3)


def same_rounds(ours: Generation, theirs: Generation) -> None:
    """Drafts, paths and tests agree; the probabilities up to float32."""
    for a, b in zip(ours.trace.rounds, theirs.trace.rounds, strict=True):
        assert (a.nodes.parent, a.nodes.token, a.nodes.draw) == (b.nodes.parent, b.nodes.token, b.nodes.draw)
        assert (a.path, a.emitted, a.cut, a.kv) == (b.path, b.emitted, b.cut, b.kv)
        assert [(t.node, t.u, t.accepted) for t in a.tests] == [(t.node, t.u, t.accepted) for t in b.tests]
        for x, y in zip(a.tests, b.tests, strict=True):
            assert (x.p_eff, x.q_eff) == pytest.approx((y.p_eff, y.q_eff), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("verifier", ["block", *(pytest.param(v, marks=LONG) for v in ("chain", "tree"))])
def test_a_verifier_by_name(verifier: str) -> None:
    compare("model", verifier=verifier, prompts=PROMPTS[:1], max_new_tokens=2)


def test_a_sequence_has_the_same_text_in_any_batch() -> None:
    together = generations("torch", "ngram", SAMPLED)
    (alone,) = generations("triton", "ngram", SAMPLED, prompts=PROMPTS[1:], sequences=[1])
    assert alone.tokens == together[1].tokens


def test_rows_leave_when_they_end() -> None:
    rule = SamplingRule(temperature=0.8, eos=tuple(range(9)))
    found = compare("none", rule, prompts=([3, 1, 4], [2], [5, 6]))
    assert len({len(g.tokens) for g in found}) > 1


SMALL_WORLD = random_model(context=16)


@pytest.mark.parametrize("drafter", ["ngram", pytest.param("medusa", marks=LONG), pytest.param("model", marks=LONG)])
def test_prompts_that_leave_room_for_a_token_or_two(drafter: str) -> None:
    """Three rows, drafts of at most 0, 1 and 2 tokens; the last token of a text is never drafted."""
    whole = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 9, 2]
    found = compare(drafter, model=SMALL_WORLD, prompts=(whole, whole[:14], whole[:13]))
    assert [len(g.tokens) for g in found] == [1, 2, 3]


@LONG
@pytest.mark.parametrize("drafter", ["medusa", "model", "ngram", "none"])
def test_prompts_of_one_token(drafter: str) -> None:
    compare(drafter, prompts=([2], [7]), max_new_tokens=3)


def test_one_token_is_asked_for() -> None:
    assert all(len(g.tokens) == 1 for g in compare("medusa", max_new_tokens=1))


def test_the_end_lies_inside_an_accepted_path() -> None:
    """What was accepted behind the end is not part of the text, on either side."""
    (whole,) = generations("torch", "itself", GREEDY, prompts=PROMPTS[:1])
    assert whole.trace.rounds[0].kept == 4
    (found,) = compare("itself", SamplingRule(temperature=0, eos=(whole.tokens[1],)), prompts=PROMPTS[:1])
    assert (
        found.tokens == whole.tokens[: 1 + whole.tokens.index(whole.tokens[1])]
        and found.trace.footer.finish_reason == "eos"
    )


class Letters:
    """Token 0 is a, 1 is b."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token])

    text_bytes = token_bytes


def test_a_stop_string() -> None:
    (whole,) = generations("torch", "ngram", SAMPLED, tokenizer=Letters(), prompts=PROMPTS[:1])
    found = compare("ngram", tokenizer=Letters(), stop=[whole.text[1:3]], prompts=PROMPTS[:1])
    assert found[0].trace.footer.finish_reason == "stop" and found[0].text == whole.text[:1]


def test_rows_are_cancelled_before_the_first_round_and_between_rounds() -> None:
    def tokens(backend: str) -> list[tuple[int, ...]]:
        prompts = ([3, 1, 4, 3, 1], [2], [5, 6, 5], [1, 2])
        session = Session(TARGET, prompts, DRAFTERS["ngram"], rule=SAMPLED, max_new_tokens=3, backend=backend)
        session.cancel(0)
        steps = iter(session)
        assert next(steps).row == 1
        session.cancel(2)
        assert {step.row for step in steps} == {1, 2, 3}, "the round that was on its way is still told"
        return [session.generation(row).tokens for row in range(4)]

    ours = tokens("triton")
    assert ours == tokens("torch")
    assert [bool(row) for row in ours] == [False, True, True, True] and len(ours[1]) == len(ours[3]) == 3


def test_all_rows_cancelled_before_the_first_round() -> None:
    session = Session(TARGET, PROMPTS, backend="triton")
    for row in range(2):
        session.cancel(row)
    assert [g.tokens for g in session.run()] == [(), ()]


@pytest.mark.parametrize(
    ("seed", "rule"),
    [
        (2**64 - 1, SAMPLED),
        *(pytest.param(2**63, r, marks=LONG) for r in (CUT, SamplingRule(0.9, 9, 0.8, order="vllm"))),
    ],
)
def test_five_texts_of_very_different_lengths_and_the_largest_keys(seed: int, rule: SamplingRule) -> None:
    prompts = ([7], [1, 2] * 20, [3, 1, 4, 1, 5], [9, 9, 9], [4, 4])
    sequences = [2**32 - 1 - i for i in range(5)]
    compare("ngram", rule, prompts=prompts, sequences=sequences, seed=seed, max_new_tokens=2)


@LONG
def test_a_rank_that_a_small_vocabulary_does_not_have() -> None:
    few = Words(torch.tensor([1, 4]), V)
    DRAFTERS["few"] = Medusa(medusa_heads(few), parse("static:0.1.2.00.01.02.20"))  # type: ignore[arg-type]
    compare("few", max_new_tokens=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3"},
        pytest.param({"model_type": "smollm3", "num_hidden_layers": 2, "no_rope_layers": [1, 0]}, marks=LONG),
        pytest.param({"num_attention_heads": HEADS, "head_dim": 128}, marks=LONG),
    ],
)
def test_other_families(changes: dict[str, Any]) -> None:
    compare("none", model=random_model(**changes), prompts=([3, 1, 4],), max_new_tokens=2)


@LONG
def test_bfloat16_gives_a_valid_trace() -> None:
    """Whose tokens may be others than PyTorch's, as the sums are."""
    model = random_model(dtype=torch.bfloat16)
    for found in generations("triton", "medusa", SAMPLED, model=model):
        assert len(found.tokens) == 4
        read_trace("".join(found.trace.lines()).encode())


def test_levels_say_as_much_as_was_asked() -> None:
    for level in (0, 1):
        trace = generations("triton", "ngram", SAMPLED, prompts=PROMPTS[:1], level=level, max_new_tokens=1)[0].trace
        assert not any(r.tests or r.nodes.q for r in trace.rounds)
        assert trace.header.engine["backend"] == "triton"
        read_trace("".join(trace.lines()).encode())


def placed(model: Transformer, device: str | None = None, **changes: Any) -> Transformer:
    """The model as it would look on another device, or with other attributes; nothing is moved."""
    other = copy.copy(model)
    vars(other).update(changes if device is None else {"device": torch.device(device)} | changes)
    return other


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"level": 3}, "level 3"),
        ({"verifier": "traversal"}, "no kernel for the verifier 'traversal'"),
        ({"rule": SamplingRule(repetition_penalty=1.1)}, "repetition_penalty"),
        ({"drafter": ModelDrafter(TARGET, (2, 1))}, "drafts a chain here, not sampled:2,1"),
        ({"drafter": NGram(gamma=32)}, "a chain of 32 drafted tokens is longer than 31"),
        ({"drafter": NGram(gamma=32), "verifier": "tree"}, ""),
        ({"drafter": DRAFTERS["medusa"], "verifier": "block"}, "judges chains only"),
        ({"drafter": Medusa(medusa_heads(), parse("dynamic:2,2,3"))}, "static tree"),  # type: ignore[arg-type]
        ({"model": random_model(head_dim=32)}, "heads of 32"),
        ({"model": placed(TARGET, "meta"), "drafter": DRAFTERS["model"]}, "the draft model is on 'cpu'"),
        ({"model": placed(TARGET, "cuda:0")}, "TRITON_INTERPRET is set"),
        ({"model": placed(TARGET, vocab_size=600_000)}, "a vocabulary of 600000 tokens"),
        ({"model": random_model(dtype=torch.float64)}, "float64"),
        ({}, ""),
    ],
)
def test_what_it_cannot_do_it_refuses_in_one_line(changes: dict[str, Any], complaint: str) -> None:
    job = {"model": TARGET, "drafter": None, "verifier": "auto", "rule": SAMPLED, "level": 2} | changes
    if not complaint:
        assert resolve("triton", Job(**job)) is decode.BACKEND
        return
    with pytest.raises(NotApplicableError, match=complaint) as caught:
        resolve("triton", Job(**job))
    assert "use the backend torch" in str(caught.value)


def test_an_unknown_backend() -> None:
    with pytest.raises(UnknownNameError, match="auto, torch, triton"):
        Session(TARGET, [[1]], backend="cuda")


def test_auto_is_pytorch_on_a_cpu() -> None:
    assert resolve("auto", Job(TARGET, None, "auto", SAMPLED, 2)) is None


def test_auto_on_a_gpu_takes_the_kernels_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {0: 228 * 1024, 1: 100 * 1024}
    monkeypatch.setattr(decode, "interpreted", lambda kernel: False)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(shared_memory_per_multiprocessor=memory[device.index]),
    )

    def chosen(device: str, **changes: Any) -> object:
        job = {"drafter": None, "verifier": "auto", "rule": SAMPLED, "level": 2} | changes
        return resolve("auto", Job(placed(TARGET, device), **job))

    assert chosen("cuda:0") is decode.BACKEND
    assert chosen("cuda:0", drafter=NGram(gamma=32)) is None, "PyTorch can"
    assert chosen("cuda:0", level=3) is None
    assert chosen("cuda:1") is None, "a card with less shared memory"


@pytest.mark.parametrize("vocab", [V, 65537, 131072, 131073, 262144, 262145, 524288])
def test_the_longest_chain_is_what_verification_takes(vocab: int) -> None:
    def taken(nodes: int) -> bool:
        drafts = Drafts.chains(torch.zeros(1, nodes, dtype=torch.int64))
        coins = torch.zeros(1, nodes, dtype=torch.float64)
        logits = torch.zeros(1, 1, vocab, dtype=torch.bfloat16).expand(-1, nodes, -1)
        try:
            Round.of(logits, drafts, Rules.of([SAMPLED]), coins, coins, chain=True)
        except NotApplicableError:
            return False
        return True

    most = decode.chain_limit(vocab)
    assert taken(most) and not taken(most + 1)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_draft_without_a_law_is_told(backend: str) -> None:
    """A draft model that gives NaN would only look useless if it were decoded without."""
    broken = random_model(6)
    broken.norm = torch.full_like(broken.norm, float("nan"))
    session = Session(TARGET, [[1, 2, 3]], ModelDrafter(broken, (1, 1)), backend=backend)
    with pytest.raises(NumericalError, match="finite"):
        session.run()
    assert session.generation().tokens == ()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_target_that_breaks_in_the_second_round(backend: str) -> None:
    prompts = [[1, 2, 3]]
    first = generations("torch", "none", GREEDY, prompts=prompts, max_new_tokens=1)[0].tokens
    broken = copy.copy(TARGET)
    broken.table = TARGET.table.clone()
    broken.table[first[0]] = float("nan")
    session = Session(broken, prompts, rule=GREEDY, backend=backend)
    with pytest.raises(NumericalError, match="finite"):
        session.run()
    assert session.generation().tokens == first
    assert list(session) == [], "nothing sound can follow"


def test_an_interrupt_in_the_middle_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(TARGET, PROMPTS, rule=SAMPLED, max_new_tokens=9, backend="triton")
    steps = iter(session)
    told = [next(steps), next(steps)]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert list(session) == []
    for row, step in enumerate(told):
        assert session.trace(row).rounds == (step.round,)
        assert session.trace(row).footer.finish_reason == "cancelled"


def test_a_row_without_a_law_emits_nothing() -> None:
    broken = random_model()
    broken.norm = torch.full_like(broken.norm, float("nan"))
    session = Session(broken, [[1, 2, 3]], NGram(), backend="triton")
    with pytest.raises(NumericalError, match="finite"):
        session.run()
    assert session.generation().tokens == ()


class HostReads(TorchDispatchMode):
    """Fails where a value is read from a tensor, or made from Python's: a CUDA graph can hold neither.

    On a GPU the first would stop the round until the device is done, and the second would copy, once and for all, what
    the host knew when the graph was captured.
    """

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.repeat_interleave.Tensor,
    )
    INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)

    def look(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        assert func not in self.READS, f"a round reads from the device: {func}"
        assert func is not torch.ops.aten.lift_fresh.default, "a round copies from the host: torch.tensor"
        if func in self.INDEXED:
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            assert not masks, f"a round reads from the device: {func} with a mask"
        return func(*args, **(kwargs or {}))


HostReads.__torch_dispatch__ = HostReads.look  # type: ignore[method-assign]
"""Assigned late: of a class that has one from the start torch imports its compiler, which takes seconds."""


@contextmanager
def no_reads() -> Iterator[None]:
    """`HostReads`, and `tolist`, which no dispatch mode sees."""

    def refuse(tensor: Tensor) -> None:
        raise AssertionError("a round reads from the device: tolist")

    with patch.object(Tensor, "tolist", refuse), HostReads():
        yield


def state(part: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The address of every tensor that an object of ours holds, by the path to it."""
    if isinstance(part, Tensor):
        yield name, part.data_ptr()
    elif type(part).__module__.startswith("specdecode_"):
        for key, value in getattr(part, "__dict__", {}).items():
            yield from state(value, f"{name}.{key}")


def started(drafter: str, rule: SamplingRule = SAMPLED, prompts: Sequence[Sequence[int]] = PROMPTS) -> Any:
    job = Job(TARGET, DRAFTERS[drafter], "auto", rule, 2)
    return decode.BACKEND.start(job, prompts, [20] * len(prompts), [Coins(3, i) for i in range(len(prompts))])


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [("words", SAMPLED), ("medusa", SAMPLED), *(pytest.param(d, CUT, marks=LONG) for d in ("ngram", "model"))],
)
def test_a_round_could_be_replayed(drafter: str, rule: SamplingRule) -> None:
    """It reads nothing on the host, and all that a round leaves to the next stays where it is."""
    rounds = started(drafter, rule, prompts=([2], [7]))
    before = dict(state(rounds))
    assert len(before) > 8
    rounds.play()
    with no_reads():
        record = rounds._round()
    assert record.verdicts.status.tolist() == [0, 0]
    assert dict(state(rounds)) == before


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: x[x > 0], lambda x: torch.tensor([1.0]), lambda x: x.tolist()]
)
def test_a_read_is_seen(read: Any) -> None:
    with pytest.raises(AssertionError, match="a round"), no_reads():
        read(torch.ones(1))


def test_a_row_that_leaves_needs_no_second_cache() -> None:
    rounds = started("model", prompts=([1, 2, 3], [4, 5, 6, 7], [8, 9]))
    planes = [model._plane for model in (rounds._target, rounds._proposer._model)]
    kept = [plane[[0, 2]].clone() for plane in planes]
    rounds.select([0, 2])
    for model, plane, rows in zip((rounds._target, rounds._proposer._model), planes, kept, strict=True):
        assert model._plane.data_ptr() == plane.data_ptr() and torch.equal(model._plane, rows)
    assert rounds._target.lengths.tolist() == [2, 1] and rounds._text.total.tolist() == [3, 2]


def test_committed_keys_are_those_of_a_prefill() -> None:
    """After some rounds the device's cache holds what a fresh prefill of the text would."""
    rounds = started("medusa", prompts=PROMPTS[:1])
    for _ in range(2):
        rounds.play()
    for b, (total, length) in enumerate(zip(rounds._text.total, rounds._target.lengths, strict=True)):
        assert length == total - 1
        cache = TARGET.new_cache(1, int(total))
        TARGET.prefill([rounds._text.tokens[b, :length].tolist()], cache)
        want: Tensor = cache.planes[0][0, :, :, :, :length]
        torch.testing.assert_close(rounds._target._plane[b, :, :, :, :length], want, rtol=1e-4, atol=1e-5)
