"""The clock on verification and sampling: a vocabulary of 128,256, four drafted tokens, bfloat16, temperature alone.

The draft's log-sum-exp is passed on, as the sampler that drew knew it; the peers do not take it and read the draft's
rows instead. A request that rejects costs two rows more: `bytes_moved` counts those that did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode_kernels import cuts, sampling, top_k, verify
from specdecode_kernels.bench import model, peers
from specdecode_kernels.bench.stand import Case, Figures, Stand
from specdecode_ref.batched.records import RESIDUAL, Drafts, Rules, Verdicts
from specdecode_ref.sampling import SamplingRule

SECTION = "verify"

GAMMA = 4
BATCHES = (64, 1, 8, 128)
"""In the order they are measured, should time run out."""

WARM = SamplingRule(temperature=0.8)
CUT = SamplingRule(temperature=0.8, top_k=50, top_p=0.95)


class Shape(NamedTuple):
    """Requests, drafted tokens, tokens of the vocabulary."""

    batch: int
    gamma: int = GAMMA
    vocab: int = 128256


TINY = Shape(1, 1, 67)


class Chains(NamedTuple):
    """What `verify_chain` takes."""

    logits: Tensor
    drafts: Drafts
    rules: Rules
    accept: Tensor
    emit: Tensor


def cases(smoke: bool) -> Iterator[Case]:
    """All of them; those that a goal needs come first."""
    shapes = [TINY] if smoke else [Shape(batch) for batch in BATCHES]
    for shape in shapes:
        for name, peer in PEERS.items():
            yield Case(SECTION, f"{name} B={shape.batch}", partial(peer, shape=shape), peer=name != "verify_chain")
    first = shapes[0]
    for name, rule in {"block": WARM, "tree": WARM, "chain": CUT}.items():
        extra = "" if rule is WARM else " top-k top-p"
        run = partial(_ours, shape=first, rule=rule, function=name)
        yield Case(SECTION, f"verify_{name}{extra} B={first.batch}", run)
    for name in ("pick", "top_k", "law"):
        yield Case(SECTION, f"{name} R={first.batch}", partial(_sampling, shape=first, function=name))


def chains(
    stand: Stand, shape: Shape, rule: SamplingRule, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Chains:
    """Chains drawn from a draft that is the target with noise."""
    generator, device = stand.generator(seed), stand.device
    batch, gamma, vocab = shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device, dtype=torch.float64)

    size = (batch, gamma + 1, vocab)
    logits = (torch.randn(size, generator=generator, device=device) * 3).to(dtype)
    draft = (logits + torch.randn(size, generator=generator, device=device)).to(dtype)
    rules = Rules.of([rule] * batch, device)
    drawn = sampling.pick(draft[:, :gamma].flatten(0, 1), rules.repeat(gamma), uniform(batch * gamma))
    root = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    lse = torch.zeros(batch, gamma + 1, device=device)
    for i in range(gamma):
        lse[:, i] = (draft[:, i].float() / rule.temperature).logsumexp(-1)
    known = lse if rules.plain else None  # of all scores: with a cut, not that of the kept ones
    drafts = Drafts.chains(torch.cat((root, drawn.view(batch, gamma)), 1), draft, known)
    return Chains(logits, drafts, rules, uniform(batch, gamma + 1), uniform(batch, gamma + 1))


def _sets(stand: Stand, shape: Shape, rule: SamplingRule = WARM) -> list[Chains]:
    count = stand.sets(2 * (shape.gamma + 1) * shape.batch * shape.vocab)
    return [chains(stand, shape, rule, seed) for seed in range(count)]


def _ours(stand: Stand, shape: Shape, rule: SamplingRule = WARM, function: str = "chain") -> Figures:
    run: Callable[..., Verdicts] = getattr(verify, f"verify_{function}")
    sets = _sets(stand, shape, rule)
    verdicts = [run(*chains) for chains in sets]
    requests = shape.batch * len(sets)
    rejected = sum(int((v.kind == RESIDUAL).sum()) for v in verdicts)
    emitted = sum(int(v.length.sum()) for v in verdicts)
    plain = sets[0].rules.plain
    moved = model.verify_bytes(function, requests, shape.gamma, shape.vocab, 2, rejected, lse=plain) // len(sets)
    if not plain:
        moved += 2 * cuts.bytes_moved(shape.batch * (shape.gamma + 1), shape.vocab, 2)
    figures = stand.timed([partial(run, *chains) for chains in sets], moved)
    return figures | {"rejected_share": rejected / requests, "tokens_a_round": emitted / requests}


def _peer(stand: Stand, shape: Shape, name: str) -> Figures:
    sets = _sets(stand, shape)
    arguments = [_for_peers(chains) for chains in sets]
    run = peers.mrv2_style if name == "mrv2" else peers.fused_temperature
    lengths = torch.stack([run(*some)[0] for some in arguments])
    rejected = float((lengths <= shape.gamma).double().mean()) * shape.batch
    moved = peers.bytes_moved(name, shape.batch, shape.gamma, shape.vocab, 2, rejected)
    return stand.timed([partial(run, *some) for some in arguments], moved)


def _compiled(stand: Stand, shape: Shape) -> Figures:
    run = peers.plain_torch if stand.smoke else peers.compiled()
    arguments = [_for_peers(chains) for chains in _sets(stand, shape)]
    arguments = [(logits, draft[:, :-1].contiguous(), *rest) for logits, draft, *rest in arguments]
    return stand.timed([partial(run, *some) for some in arguments], None)


def _for_peers(chains: Chains) -> tuple[Tensor, ...]:
    logits, drafts, rules, accept, emit = chains
    assert drafts.logits is not None
    return logits, drafts.logits, drafts.tokens, rules.temperature.float(), torch.stack((accept, emit)).float()


PEERS: dict[str, Callable[..., Figures]] = {
    "verify_chain": _ours,
    "torch.compile reference": _compiled,
    "mrv2-style pipeline": partial(_peer, name="mrv2"),
    "fused-temperature pipeline": partial(_peer, name="fused"),
}
"""Who verifies chains."""


def _sampling(stand: Stand, shape: Shape, function: str) -> Figures:
    batch, vocab = shape.batch, shape.vocab
    sets: Sequence[Tensor] = [
        chains(stand, Shape(batch, 0, vocab), WARM, seed).logits[:, 0] for seed in range(stand.sets(2 * batch * vocab))
    ]
    rules = Rules.of([WARM] * batch, stand.device)
    coins = torch.rand(batch, generator=stand.generator(9), device=stand.device, dtype=torch.float64)
    arguments = {"pick": (rules, coins), "top_k": (8,), "law": (rules,)}[function]
    run: Callable[..., object] = getattr(sampling, function)
    best = function == "top_k"
    moved = top_k.bytes_moved(batch, vocab, 2, 8) if best else sampling.bytes_moved(function, batch, vocab, 2)
    return stand.timed([partial(run, logits, *arguments) for logits in sets], moved)
