"""The clock on the whole loop: an 8B Llama's shape with random weights, plain and with SYNTHETIC acceptance.

Random weights write no text that a draft could guess, so acceptance is SYNTHETIC: each drafted token is accepted with
a given probability alpha, drawn on the device. Nothing in the round is left out or replaced for it. The draft's law q
puts all mass on token 0; a token with q = 0 is always accepted, as 0 < p, and token 0 nearly never, as p is below
1e-3. So the drafter proposes one or the other, and verification, commit and all that follows run as they always do.

    busy       rounds replayed one behind the other, the host far ahead: what the GPU takes for a round
    wall       rounds as a user has them: replay, wait, read what was emitted
    host gap   1 - busy / wall, the share of the time that the GPU is idle
    predicted  tau t(1) / t(N), with t(N) a forward of N nodes alone: what speculation would gain if all else were free

The cache is filled with random numbers in place of a prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode_kernels import coins, drafting, tree
from specdecode_kernels.bench.stand import Case, Figures, Skip, Stand
from specdecode_kernels.decode import DeviceRounds, Record
from specdecode_ref.backends import Job
from specdecode_ref.batched.records import Drafts
from specdecode_ref.coins import Coins
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.sampling import SamplingRule

SECTION = "loop"

LABEL = "SYNTHETIC acceptance"

ALPHA, GAMMA = 0.7, 4

ROUNDS = 24
"""Rounds of each measurement."""

RULE = SamplingRule(temperature=0.8)

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

SMALL = LLAMA_8B | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}

SMALL_PROMPT = 4
"""Tokens of the prompts of `small_rounds`."""

MARGIN = 3 * 2**30
"""Bytes to leave free beside what is reckoned: activations, graphs, the compiler's own."""


class Shape(NamedTuple):
    """Requests, and committed tokens of each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"B={self.batch} context={self.context}"


SHAPES = tuple(Shape(*s) for s in ((8, 1024), (1, 1024), (1, 16384), (8, 16384), (32, 1024), (128, 1024)))
LARGE = (Shape(32, 16384), Shape(128, 16384))
"""Too large for a card of 80 GB."""


def cases(smoke: bool) -> Iterator[Case]:
    """Plain decoding and speculation in each shape; the middle of the road first."""
    for shape in (Shape(1, 16),) if smoke else SHAPES + LARGE:
        yield Case(SECTION, f"{LABEL}: plain and speculative, {shape}", partial(_loop, shape=shape))


class RandomWeights(Mapping[str, Tensor]):
    """Weights of a Llama in Hugging Face's names, each made when it is read, on the device."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, generator: torch.Generator) -> None:
        self._dtype, self._generator = dtype, generator
        hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        q, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
        parts = {"self_attn.q_proj": (q, hidden), "self_attn.o_proj": (hidden, q)}
        parts |= {"self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
        parts |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        layers = range(config["num_hidden_layers"])
        self._shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in (parts | norms).items()
        }
        self._shapes |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
        self._shapes["model.norm.weight"] = (hidden,)

    def __getitem__(self, name: str) -> Tensor:
        shape, device = self._shapes[name], self._generator.device
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=device)
        out = torch.empty(shape, dtype=self._dtype, device=device)
        return out.normal_(0, shape[1] ** -0.5, generator=self._generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def random_model(stand: Stand, config: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> Transformer:
    """A transformer of that shape whose weights mean nothing."""
    weights = RandomWeights(config, dtype, stand.generator(seed))
    return Transformer.load(config, weights, dtype, stand.device, "random weights")


class Synthetic(drafting.Nothing):
    """Chains of gamma tokens, each of which is accepted with probability alpha, whatever the target says. SYNTHETIC."""

    def __init__(self, batch: int, gamma: int, alpha: float, model: Transformer) -> None:
        self.nodes, self._alpha = gamma + 1, alpha
        size = (batch, self.nodes, model.vocab_size)
        self._logits = torch.full(size, -torch.inf, dtype=model.dtype, device=model.device)
        self._logits[..., 0] = 0
        self._lse = torch.zeros(size[:2], device=model.device)

    def propose(self, text: drafting.Text) -> Drafts:
        """See `Proposer.propose`."""
        drawing = coins.draft(text.seed, text.sequences, text.total, self.nodes)
        accepted = drawing[:, 1:] < self._alpha
        return Drafts.chains(torch.cat((text.root, accepted.long()), 1), self._logits, self._lse)


class TimedRounds(DeviceRounds):
    """Rounds that can be replayed without reading them, or launched one by one."""

    @property
    def text(self) -> Tensor:
        """All tokens, int64 [B, T]."""
        return self._text.tokens

    @property
    def total(self) -> Tensor:
        """How many tokens of each text are committed, int64 [B]."""
        return self._text.total

    @property
    def captured(self) -> bool:
        """Whether a round is a graph now, and so one launch."""
        return self._captured is not None

    def play_eagerly(self) -> Record:
        """A round without a graph."""
        return self._round()

    def replay(self) -> Record:
        """A round that nobody waits for."""
        return self._replayed()

    def forward_microseconds(self, stand: Stand) -> float:
        """A forward of the target over as many nodes as a draft has, alone."""
        nodes = self._proposer.nodes
        tokens = torch.zeros(len(self.total), nodes, dtype=torch.int64, device=stand.device)
        parents = torch.arange(-1, nodes - 1, device=stand.device).expand_as(tokens).contiguous()
        topology = tree.topology(parents)
        return stand.microseconds([lambda: self._target.forward(tokens, topology)], launches=1, repeats=5)


class FilledRounds(TimedRounds):
    """Rounds that begin with a full cache of random keys and values. proposer: None for plain decoding."""

    def __init__(self, stand: Stand, model: Transformer, shape: Shape, proposer: Synthetic | None, room: int) -> None:
        batch, context = shape
        job = Job(model, None, "chain", RULE, 0)
        super().__init__(job, [[0]] * batch, [context + 1 + room] * batch, [Coins(1, b) for b in range(batch)])
        if proposer:
            self._proposer = proposer
        generator = stand.generator(2)
        self._target._plane.normal_(generator=generator)
        self._target.lengths.fill_(context)
        self._text.tokens.random_(0, model.vocab_size, generator=generator)
        self._text.total.fill_(context + 1)


def small_rounds(stand: Stand, count: int) -> TimedRounds:
    """Rounds of a small model with a draft model's chains, with room for `count` of them."""
    model = random_model(stand, SMALL, torch.float32)
    drafter = ModelDrafter(
        random_model(stand, SMALL | {"hidden_size": 32}, torch.float32, seed=1), (1,) if stand.smoke else (1, 1, 1)
    )
    batch = 1 if stand.smoke else 3
    prompts = [[1 + b, 7, 3, 11][:SMALL_PROMPT] for b in range(batch)]
    limits = [SMALL_PROMPT + 4 * count + 8] * batch
    job = Job(model, drafter, "auto", RULE, 0)
    return TimedRounds(job, prompts, limits, [Coins(5, b) for b in range(batch)])


def needed_bytes(shape: Shape, config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Memory of the cache, the logits and the draft's, beside the weights."""
    slots = shape.context + _room(GAMMA) + GAMMA + 3
    heads = config["num_key_value_heads"] * config["head_dim"]
    cache = 2 * config["num_hidden_layers"] * heads * slots * dtype.itemsize
    logits = 3 * (GAMMA + 1) * config["vocab_size"] * dtype.itemsize
    return shape.batch * (cache + logits)


def _room(gamma: int, rounds: int = ROUNDS) -> int:
    """Tokens that all rounds of a measurement may emit."""
    return (gamma + 1) * (2 * rounds + 4)


def _loop(stand: Stand, shape: Shape) -> Figures:
    config, dtype = (SMALL, torch.float32) if stand.smoke else (LLAMA_8B, torch.bfloat16)
    if "model" not in stand.kept:
        stand.kept["model"] = random_model(stand, config, dtype)
    model = stand.kept["model"]
    stand.sweep()
    if not stand.smoke:
        free, needed = torch.cuda.mem_get_info()[0], needed_bytes(shape, config, dtype) + MARGIN
        if needed > free:
            raise Skip(f"needs {needed / 2**30:.0f} GiB beside the weights, {free / 2**30:.0f} GiB are free")
    plain = _measured(stand, model, shape, None)
    stand.sweep()
    drafted = _measured(stand, model, shape, Synthetic(shape.batch, GAMMA, ALPHA, model))
    gain = drafted["tokens_per_second"] / plain["tokens_per_second"]
    predicted = drafted["tokens_a_round"] * plain["forward_microseconds"] / drafted["forward_microseconds"]
    return {
        "acceptance": f"{LABEL}, alpha {ALPHA} a token, gamma {GAMMA}",
        "plain": plain,
        "speculative": drafted,
        "speedup": gain,
        "predicted_speedup": predicted,
        "share_of_predicted": gain / predicted,
    }


def _measured(stand: Stand, model: Transformer, shape: Shape, proposer: Synthetic | None) -> Figures:
    count = 1 if stand.smoke else ROUNDS
    rounds = FilledRounds(stand, model, shape, proposer, _room(GAMMA, count))
    if not stand.smoke:
        rounds.play()  # compiles
        rounds.play()  # captures
    before = int(rounds.total.sum())
    start = time.perf_counter()
    for _ in range(count):
        rounds.play()
    wall = (time.perf_counter() - start) / count
    emitted = int(rounds.total.sum()) - before
    busy = wall if stand.smoke else _busy(rounds, count)
    return {
        "tokens_per_second": emitted / wall / count,
        "tokens_a_round": emitted / count / shape.batch,
        "round_wall_microseconds": wall * 1e6,
        "round_busy_microseconds": busy * 1e6,
        "host_gap_share": max(0.0, 1 - busy / wall),
        "forward_microseconds": rounds.forward_microseconds(stand),
        "round_is_one_graph": rounds.captured,
    }


def _busy(rounds: TimedRounds, count: int) -> float:
    """Seconds of the GPU a round."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rounds.replay()
    start.record()
    for _ in range(count):
        rounds.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count
