"""Rounds to verify, and what a kernel and its reference say of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from specdecode_kernels import verify
from torch import Tensor

from specdecode_ref.batched import verify as reference
from specdecode_ref.batched.records import (
    DETERMINISTIC,
    WITH,
    WITHOUT,
    Drafts,
    Rules,
    Verdicts,
)
from specdecode_ref.sampling import SamplingRule

BAND = 1e-5
EDGE = 5e-6
ALMOST_ONE = 1 - 2.0**-53
NAMES = ("chain", "block", "tree")
GREEDY, PLAIN = SamplingRule(temperature=0), SamplingRule()
COOL, HOT = SamplingRule(temperature=0.6), SamplingRule(temperature=1.7)
MIXED = (PLAIN, COOL, GREEDY, HOT)
CUT = (
    SamplingRule(top_k=5),
    SamplingRule(top_p=0.8, temperature=0.7),
    GREEDY,
    SamplingRule(min_p=0.1),
    SamplingRule(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
)

Round = tuple[Tensor, Drafts, Rules, Tensor, Tensor]
"""logits, drafts, rules, accept coins, emit coins."""


def a_round(
    name: str,
    seed: int,
    *,
    batch: int = 5,
    nodes: int = 4,
    vocab: int = 63,
    draft_vocab: int | None = None,
    dtype: torch.dtype = torch.float32,
    draws: Sequence[int] = (WITH,),
    rules: Sequence[SamplingRule] = MIXED,
    lse: bool = False,
    ragged: float = 0.1,
    coins: Sequence[float] = (),
    gap: float = 1.0,
) -> Round:
    """Drafts as a drafter would draw them: a chain's, or trees of every kind with some nodes missing."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(batch, nodes, vocab, generator=generator)).to(dtype)
    width = draft_vocab or vocab
    near = torch.zeros(batch, nodes, width)
    near[..., : min(width, vocab)] = logits[..., : min(width, vocab)]
    draft = (near + gap * torch.randn(batch, nodes, width, generator=generator)).to(dtype)
    row_rules = Rules.of([rules[b % len(rules)] for b in range(batch)])
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    parents = torch.arange(-1, nodes - 1).repeat(batch, 1)
    kinds = torch.zeros(batch, nodes, dtype=torch.int64)
    for b in range(batch):
        pool = rng.sample(list(draws), 1) if rng.random() < 0.6 else list(draws)
        for node in range(1, nodes):
            if name == "tree":
                parents[b, node] = rng.choice([0, max(0, node - 2), rng.randrange(node)])
            kinds[b, node] = rng.choice(pool)
            q = torch.softmax(draft[b, parents[b, node]].double() / (row_rules.row(b).temperature or 0.1), -1)
            if kinds[b, node] == WITHOUT:
                for elder in range(1, node):
                    if parents[b, elder] == parents[b, node] and kinds[b, elder] == WITHOUT:
                        q[tokens[b, elder]] = 0
            tokens[b, node] = q.multinomial(1, generator=generator) if q.sum() > 0 else 0
            if rng.random() < ragged:
                tokens[b, node] = -1
            elif name == "tree" and rng.random() < ragged:
                parents[b, node] = rng.choice([-1, node, node + 1])
    accept, emit = (torch.rand(batch, nodes, dtype=torch.float64, generator=generator) for _ in range(2))
    if coins:
        chosen = [[[rng.choice(coins) for _ in range(nodes)] for _ in range(batch)] for _ in range(2)]
        accept, emit = torch.tensor(chosen, dtype=torch.float64)
    known = None
    if lse:
        assert row_rules.plain
        known = (draft.double() / row_rules.temperature.clamp(min=1e-3)[:, None, None]).logsumexp(-1).float()
    given = draft if set(draws) != {DETERMINISTIC} else None
    return logits, Drafts(tokens, parents, kinds, given, known), row_rules, accept, emit


def run(name: str, arguments: Round) -> tuple[Verdicts, Verdicts]:
    """What the kernel and the reference say."""
    before = [x.clone() for x in (arguments[0], arguments[3], arguments[4])]
    out = getattr(verify, f"verify_{name}")(*arguments)
    owed = getattr(reference, f"verify_{name}")(*arguments)
    for x, y in zip((arguments[0], arguments[3], arguments[4]), before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num()), "an input was written to"
    return out, owed


def chain_of(p: Tensor, q: Tensor | None, token: int, draw: int = WITH, after: Tensor | None = None) -> Round:
    """One drafted token: p [V], q [V], both as laws."""
    vocab = len(p)
    after = torch.full((vocab,), 1 / vocab) if after is None else after
    logits = torch.stack([p, after]).log()[None]
    draft = None if q is None else torch.stack([q, torch.full_like(q, float("nan"))]).log()[None].float()
    drafts = Drafts(
        torch.tensor([[0, token]]), torch.tensor([[-1, 0]]), torch.tensor([[0, draw]]), draft
    )  # fmt: skip
    coins = torch.full((1, 2), 0.5, dtype=torch.float64)
    return logits.float(), drafts, Rules.of([PLAIN]), coins, coins
