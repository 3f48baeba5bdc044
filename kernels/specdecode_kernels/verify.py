"""Verification for a batch, from logits: the twins of `specdecode_ref.batched.verify`.

Same arguments, same coins, same record; what the rules mean is said there, how it is computed in the files of the
kernels. Read them in this order:

    row_stats      the first launch of all three: one read of every row of logits, its law in a few numbers a block
    emission       the last token of a round, from those numbers and one block of logits
    verify_chain   rejection sampling along a chain                            2 launches
    verify_block   the same chain judged as a whole, from its end              3 launches
    verify_tree    siblings get one chance each, in the order drawn            2 launches

All three take what `specdecode_ref.batched.verify` takes: logits [B, N, V] and drafts.logits [B, N, V_d] in float32,
bfloat16 or float16, any strides; int64 columns and float64 coins [B, N]. They read nothing back to the host, so they
can stand in a CUDA graph; errors of the numbers come as a status a request, and errors of the arguments are raised:
InputError for shapes that do not fit, NotApplicableError for dtypes, devices and sizes that kernels do not take (chains
of more than 32 nodes, or 16 above 131,072 tokens and 8 above 262,144; trees of more than 1024 nodes; vocabularies of
more than 524,288 tokens). A node that is said to be drawn, in drafts without logits, is NOT_A_LAW; one
whose draw is no index into DRAWS counts as drawn with replacement.

Precision: a probability is right to about 1e-6 of itself where it matters (`row_stats`), after s_1 to s_j of a tree's
rejections to 1e-6 / (s_1 .. s_j); with drafts.lse, q has the rounding of a float32 lse on top, |lse| 2^-24.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels.round import Round
from specdecode_kernels.row_stats import emit_warps
from specdecode_kernels.verify_block import block_emit, block_surplus, surplus_warps
from specdecode_kernels.verify_chain import chain_emit
from specdecode_kernels.verify_tree import tree_emit, tree_warps
from specdecode_ref.batched.records import Drafts, Rules, Verdicts


def verify_chain(logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor) -> Verdicts:
    """Rejection sampling along chains. Node i hangs on node i - 1, whatever `parents` says. Errors as above."""
    round = Round.of(logits, drafts, rules, accept_coins, emit_coins, chain=True)
    out = round.verdicts()
    batch = len(round.tokens)
    if batch:
        chain_emit[(batch, round.blocks)](
            **round.arguments(),
            **round.stats(),
            **vars(out),
            accept=round.accept,
            emit=round.emit,
            surplus=round.empty(batch, round.blocks, dtype=torch.float32),
            **round.constants(),
            num_warps=emit_warps(round.block, round.draft is not None),
        )
    return out


def verify_block(logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor) -> Verdicts:
    """Block verification of chains. Node i hangs on node i - 1, whatever `parents` says. Errors as above."""
    round = Round.of(logits, drafts, rules, accept_coins, emit_coins, chain=True)
    out = round.verdicts()
    batch, nodes = round.tokens.shape
    if batch:
        stats = round.stats()
        del stats["arrivals"]
        surplus = round.empty(batch, nodes, round.blocks, dtype=torch.float32)
        common = {**round.arguments(), **stats, "surplus": surplus, **round.constants()}
        if round.draft is not None and nodes > 1:
            warps = surplus_warps(round.block, common["NODES"])
            block_surplus[(batch * (nodes - 1), round.blocks)](**common, num_warps=warps)
        warps = emit_warps(round.block, round.draft is not None)
        block_emit[(batch,)](**common, **vars(out), accept=round.accept, emit=round.emit, num_warps=warps)
    return out


def verify_tree(logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor) -> Verdicts:
    """Recursive rejection sampling in trees. Errors as above."""
    round = Round.of(logits, drafts, rules, accept_coins, emit_coins, chain=False)
    out = round.verdicts()
    batch, nodes = round.tokens.shape
    if batch:
        stats = round.stats()
        del stats["arrivals"]
        tree_emit[(batch,)](
            **round.arguments(),
            **stats,
            **vars(out),
            parents=round.parents,
            accept=round.accept,
            emit=round.emit,
            surplus=round.empty(batch, round.blocks, dtype=torch.float32),
            noted_tokens=round.empty(batch, nodes, dtype=torch.int64),
            noted_draws=round.empty(batch, nodes, dtype=torch.int64),
            growths=round.empty(batch, nodes, dtype=torch.float64),
            tops=round.empty(batch, nodes, dtype=torch.float32),
            shares=round.empty(batch, nodes, dtype=torch.float64),
            **round.constants(),
            num_warps=tree_warps(round.block, round.draft is not None),
        )
    return out
