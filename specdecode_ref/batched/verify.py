"""Verification for a batch, from logits: `law` for both sides, then the pure rule of `specdecode_ref.verify`.

All three take logits [B, N, V] (the target's, after every node), the drafts, a rule a request, and the coins:
accept_coins float64 [B, N], one a node, and emit_coins float64 [B, N], entry d for an emission after depth d.

A target's row is looked at when it is needed, so a NaN in a branch that was given up does no harm. A draft's row that
children were drawn from must be a law. Where the status is not FINE, the rest is that of a round without a draft, and
the token is -1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdecode_ref.batched.records import DRAWS, FINE, KINDS, NOT_A_LAW, NOT_DRAWN, TARGET, Drafts, Rules, Verdicts
from specdecode_ref.errors import NotApplicableError, NumericalError
from specdecode_ref.sampling import Laws, law
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw, Verdict
from specdecode_ref.verify import Rule, block, chain, tree


def verify_chain(logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor) -> Verdicts:
    """Rejection sampling along chains: `verify.chain`. Node i hangs on node i - 1, whatever `parents` says."""
    return _verify(chain.verify, logits, _chained(drafts), rules, accept_coins, emit_coins)


def verify_block(logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor) -> Verdicts:
    """Block verification of chains: `verify.block`. Node i hangs on node i - 1, whatever `parents` says."""
    return _verify(block.verify, logits, _chained(drafts), rules, accept_coins, emit_coins)


def verify_tree(logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor) -> Verdicts:
    """Recursive rejection sampling in trees: `verify.tree`."""
    return _verify(tree.verify, logits, drafts, rules, accept_coins, emit_coins)


def draft_tree(drafts: Drafts, rules: Rules, b: int, width: int) -> tuple[DraftTree, list[int]]:
    """One request's draft as the record that a verifier takes, and for each of its nodes its number in the batch.

    width: of the laws q. Raises NumericalError where logits that children were drawn from make no law.
    """
    tokens, parents, draws = (column[b].tolist() for column in (drafts.tokens, drafts.parents, drafts.draws))
    kept = [0]
    for node in range(1, len(tokens)):
        if tokens[node] >= 0 and parents[node] in kept:
            kept.append(node)
    place = {node: i for i, node in enumerate(kept)}
    drawn: list[Draw | None] = [None, *(DRAWS[draws[node]] for node in kept[1:])]
    q: list[Tensor | None] = [None] * len(kept)
    for node, draw in zip(kept[1:], drawn[1:], strict=True):
        at = place[parents[node]]
        if draw != "deterministic" and q[at] is None:
            assert drafts.logits is not None
            q[at] = law(_widened(drafts.logits[b, parents[node]], width), rules.row(b), (), 0)
    above = (-1, *(place[parents[node]] for node in kept[1:]))
    return DraftTree(tuple(tokens[node] for node in kept), above, tuple(drawn), tuple(q)), kept


def _verify(
    rule: Rule, logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor
) -> Verdicts:
    batch, nodes = drafts.tokens.shape
    path = torch.full((batch, nodes), -1)
    path[:, 0] = 0
    out = Verdicts(
        path=path,
        length=torch.ones(batch, dtype=torch.int64),
        token=torch.full((batch,), -1),
        kind=torch.full((batch,), TARGET),
        p_eff=torch.full((batch, nodes), math.nan, dtype=torch.float64),
        q_eff=torch.full((batch, nodes), math.nan, dtype=torch.float64),
        status=torch.full((batch,), FINE),
    )
    named = 1 + max(drafts.tokens.flatten().tolist(), default=0)
    width = max(logits.shape[-1], named, 0 if drafts.logits is None else drafts.logits.shape[-1])
    for b in range(batch):
        try:
            draft, kept = draft_tree(drafts, rules, b, width)
            p = Laws(_widened(logits[b, kept], width), rules.row(b), lambda node: (), 0)
            verdict = rule(draft, p, accept_coins[b, kept].tolist(), emit_coins[b].tolist())
        except NumericalError:
            out.status[b] = NOT_A_LAW
        except NotApplicableError:
            out.status[b] = NOT_DRAWN
        else:
            _note(out, b, verdict, kept)
    return Verdicts(**{name: column.to(logits.device) for name, column in vars(out).items()})


def _note(out: Verdicts, b: int, verdict: Verdict, kept: list[int]) -> None:
    out.path[b, : len(verdict.path)] = torch.tensor([kept[node] for node in verdict.path])
    out.length[b], out.token[b], out.kind[b] = len(verdict.path), verdict.token, KINDS.index(verdict.kind)
    for test in verdict.tests:
        out.p_eff[b, kept[test.node]], out.q_eff[b, kept[test.node]] = test.p_eff, test.q_eff


def _chained(drafts: Drafts) -> Drafts:
    nodes = torch.arange(-1, drafts.tokens.shape[1] - 1, device=drafts.tokens.device)
    return replace(drafts, parents=nodes.expand_as(drafts.tokens))


def _widened(logits: Tensor, width: int) -> Tensor:
    """Logits [..., V] as logits [..., width]: a token that one side does not have, it cannot give."""
    return pad(logits.double(), (0, width - logits.shape[-1]), value=-math.inf)
