"""The loop on the device, through the interpreter on a small model: the same tokens as the loop in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from specdecode_kernels import decode
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdecode_ref.backends import Job, resolve
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


def random_model(seed: int = 5, context: int = 64, **changes: int) -> Transformer:
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
    weights = {f"{n}.weight": torch.randn(shape, generator=generator) * 0.5 for n, shape in shapes.items()}
    return Transformer.load(config, weights, torch.float32)


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
    "reduced": Medusa(medusa_heads(FEWER), parse("static:0.00.1.000")),  # type: ignore[arg-type]
}


def generations(backend: str, drafter: str, rule: SamplingRule, **settings: Any) -> list[Generation]:
    settings = {"max_new_tokens": 6, "seed": 11} | settings
    prompts = settings.pop("prompts", PROMPTS)
    return Session(TARGET, prompts, DRAFTERS[drafter], rule=rule, backend=backend, **settings).run()


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("none", SAMPLED),
        ("ngram", SAMPLED),
        ("model", SAMPLED),
        ("words", GREEDY),
        ("medusa", SAMPLED),
        *(pytest.param(name, SAMPLED, marks=pytest.mark.long) for name in ("short", "words", "reduced")),
        *(pytest.param(name, GREEDY, marks=pytest.mark.long) for name in ("ngram", "model", "medusa")),
        *(pytest.param(name, CUT, marks=pytest.mark.long) for name in ("none", "ngram", "model", "medusa")),
    ],
)
def test_the_same_tokens_and_rounds_as_the_loop_in_pytorch(drafter: str, rule: SamplingRule) -> None:
    for ours, theirs in zip(generations("triton", drafter, rule), generations("torch", drafter, rule), strict=True):
        assert ours.tokens == theirs.tokens
        same_rounds(ours, theirs)
        read_trace("".join(ours.trace.lines()).encode())


def same_rounds(ours: Generation, theirs: Generation) -> None:
    """Drafts, paths and tests agree; the probabilities up to float32."""
    for a, b in zip(ours.trace.rounds, theirs.trace.rounds, strict=True):
        assert (a.nodes.parent, a.nodes.token, a.nodes.draw) == (b.nodes.parent, b.nodes.token, b.nodes.draw)
        assert (a.path, a.emitted, a.cut, a.kv) == (b.path, b.emitted, b.cut, b.kv)
        assert [(t.node, t.u, t.accepted) for t in a.tests] == [(t.node, t.u, t.accepted) for t in b.tests]
        for x, y in zip(a.tests, b.tests, strict=True):
            assert (x.p_eff, x.q_eff) == pytest.approx((y.p_eff, y.q_eff), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("verifier", ["block", *(pytest.param(v, marks=pytest.mark.long) for v in ("chain", "tree"))])
def test_a_verifier_by_name(verifier: str) -> None:
    ours, theirs = (generations(b, "model", SAMPLED, verifier=verifier)[0] for b in ("triton", "torch"))
    assert ours.tokens == theirs.tokens
    same_rounds(ours, theirs)
    read_trace("".join(ours.trace.lines()).encode())


def test_a_sequence_has_the_same_text_in_any_batch() -> None:
    together = generations("triton", "ngram", SAMPLED)
    for i, prompt in enumerate(PROMPTS):
        alone = generations("triton", "ngram", SAMPLED, prompts=[prompt], sequences=[i])
        assert alone[0].tokens == together[i].tokens


def test_rows_leave_when_they_end() -> None:
    rule = SamplingRule(temperature=0.8, eos=tuple(range(9)))
    prompts = ([3, 1, 4], [2], [5, 6])
    ours, theirs = (generations(b, "ngram", rule, prompts=prompts) for b in ("triton", "torch"))
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]
    assert len({len(g.tokens) for g in ours}) > 1


def test_levels_say_as_much_as_was_asked() -> None:
    for level in (0, 1):
        trace = generations("triton", "ngram", SAMPLED, prompts=PROMPTS[:1], level=level, max_new_tokens=2)[0].trace
        assert not any(r.tests or r.nodes.q for r in trace.rounds)
        assert trace.header.engine["backend"] == "triton"
        read_trace("".join(trace.lines()).encode())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"level": 3}, "level 3"),
        ({"verifier": "traversal"}, "no kernel for the verifier 'traversal'"),
        ({"rule": SamplingRule(repetition_penalty=1.1)}, "repetition_penalty"),
        ({"drafter": ModelDrafter(TARGET, (2, 1))}, "drafts a chain here, not sampled:2,1"),
        ({"drafter": DRAFTERS["medusa"], "verifier": "block"}, "judges chains only"),
        ({"drafter": Medusa(medusa_heads(), parse("dynamic:2,2,3"))}, "static tree"),  # type: ignore[arg-type]
        ({"model": random_model(head_dim=32)}, "heads of 32"),
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


def test_a_row_without_a_law_emits_nothing() -> None:
    broken = random_model()
    broken.norm = torch.full_like(broken.norm, float("nan"))
    session = Session(broken, [[1, 2, 3]], NGram(), backend="triton")
    with pytest.raises(NumericalError, match="finite"):
        session.run()
    assert session.generation().tokens == ()


class HostReads(TorchDispatchMode):
    """Fails where a value is read from a tensor: on a GPU that would stop the round until the device is done."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ), f"a round reads from the device: {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafter", ["ngram", "words", "medusa"])
def test_no_round_reads_from_the_device(drafter: str) -> None:
    job = Job(TARGET, DRAFTERS[drafter], "auto", SAMPLED, 2)
    rounds = decode.BACKEND.start(job, PROMPTS, [20] * 2, [Coins(3, i) for i in range(2)])
    rounds.play()
    with HostReads():
        record = rounds._round()
    assert record.verdicts.status.tolist() == [0, 0]
    with pytest.raises(AssertionError, match="reads from the device"), HostReads():
        torch.ones(1).item()


def test_committed_keys_are_those_of_a_prefill() -> None:
    """After some rounds the device's cache holds what a fresh prefill of the text would."""
    job = Job(TARGET, DRAFTERS["medusa"], "auto", SAMPLED, 2)
    rounds = decode.BACKEND.start(job, PROMPTS, [20] * 2, [Coins(3, i) for i in range(2)])
    for _ in range(2):
        rounds.play()
    for b, (total, length) in enumerate(zip(rounds._text.total, rounds._target.lengths, strict=True)):
        assert length == total - 1
        cache = TARGET.new_cache(1, int(total))
        TARGET.prefill([rounds._text.tokens[b, :length].tolist()], cache)
        want: Tensor = cache.planes[0][0, :, :, :, :length]
        torch.testing.assert_close(rounds._target._plane[b, :, :, :, :length], want, rtol=1e-4, atol=1e-5)
