"""One round of a batch as the verification kernels take it: checked once, small columns contiguous, outputs allocated.

`Round.of` refuses what the kernels cannot read, `Round.stats` is the first launch of all three verifiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specdecode_kernels.cuts import Cuts, cuts
from specdecode_kernels.launch import FLOATS, blocks, require_device, require_dtype, require_shape
from specdecode_kernels.row_stats import WARPS, tile, verify_stats
from specdecode_ref.batched.records import Drafts, Rules, Verdicts
from specdecode_ref.errors import InputError, NotApplicableError

MOST_IN_A_TREE = 1024
MOST_IN_A_CHAIN = 32
"""Nodes that one program keeps in registers."""

MOST_STATS = 1024
"""And a chain's with the statistics of all their blocks: fewer nodes where the vocabulary has more than 32 blocks."""


def chain_limit(vocab: int) -> int:
    """The most nodes, the root included, of a chain over so many tokens. Raises NotApplicableError for too many."""
    return min(MOST_IN_A_CHAIN, MOST_STATS // _padded(blocks(vocab, tile(vocab)[0])))


@dataclass(frozen=True)
class Round:
    """logits: [B, N, V]; draft: [B, N, V_d]; both with contiguous rows. The others as in `Drafts` and `Rules`.

    block: logits of a block; blocks: of the larger vocabulary. group: rows of a program of the first launch.
    chain: node i hangs on node i - 1, whatever `parents` says.
    """

    logits: Tensor
    draft: Tensor | None
    lse: Tensor | None
    tokens: Tensor
    parents: Tensor
    draws: Tensor
    temperature: Tensor
    cut: Cuts | None
    draft_cut: Cuts | None
    accept: Tensor
    emit: Tensor
    block: int
    group: int
    blocks: int
    chain: bool

    @classmethod
    def of(
        cls, logits: Tensor, drafts: Drafts, rules: Rules, accept_coins: Tensor, emit_coins: Tensor, chain: bool
    ) -> Round:
        """Raises InputError for shapes that do not fit, NotApplicableError for what kernels do not take."""
        require_shape("drafts.tokens", drafts.tokens, -1, -1)
        batch, nodes = drafts.tokens.shape
        require_shape("logits", logits, batch, nodes, -1)
        require_dtype("logits", logits, *FLOATS)
        require_shape("rules", rules.temperature, batch)
        require_dtype("rules.temperature", rules.temperature, torch.float64)
        columns = {"drafts.tokens": drafts.tokens, "drafts.parents": drafts.parents, "drafts.draws": drafts.draws}
        for name, column in columns.items():
            require_shape(name, column, batch, nodes)
            require_dtype(name, column, torch.int64)
        for name, coins in {"accept_coins": accept_coins, "emit_coins": emit_coins}.items():
            require_shape(name, coins, batch, nodes)
            require_dtype(name, coins, torch.float64)
        tensors = [logits, rules.temperature, *columns.values(), accept_coins, emit_coins]
        if drafts.logits is not None:
            require_shape("drafts.logits", drafts.logits, batch, nodes, -1)
            require_dtype("drafts.logits", drafts.logits, *FLOATS)
            tensors.append(drafts.logits)
        lse = drafts.lse if drafts.logits is not None else None
        if lse is not None:
            require_shape("drafts.lse", lse, batch, nodes)
            require_dtype("drafts.lse", lse, torch.float32)
            tensors.append(lse)
        require_device(verify_stats, *tensors)
        logits, draft = _rows(logits), None if drafts.logits is None else _rows(drafts.logits)
        largest = max(logits.shape[-1], 0 if draft is None else draft.shape[-1])
        block, group = tile(largest)
        most = chain_limit(largest) if chain else MOST_IN_A_TREE
        if not 0 < nodes <= most:
            came = f"{nodes} with {largest} tokens"
            raise NotApplicableError(f"1 to {most} nodes, the root included", came, "use the PyTorch reference")
        return cls(
            logits,
            draft,
            None if lse is None else lse.contiguous(),
            drafts.tokens.contiguous(),
            drafts.tokens if chain else drafts.parents.contiguous(),
            drafts.draws.contiguous(),
            rules.temperature.contiguous(),
            _cut(logits, rules),
            None if draft is None else _cut(draft, rules),
            accept_coins.contiguous(),
            emit_coins.contiguous(),
            block,
            group,
            blocks(largest, block),
            chain,
        )

    @property
    def rows(self) -> int:
        """Rows of the target's logits."""
        return self.tokens.numel()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory on the round's device."""
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def verdicts(self) -> Verdicts:
        """What the last launch fills."""
        batch, nodes = self.tokens.shape
        word, real = torch.int64, torch.float64
        return Verdicts(
            path=self.empty(batch, nodes, dtype=word),
            length=self.empty(batch, dtype=word),
            token=self.empty(batch, dtype=word),
            kind=self.empty(batch, dtype=word),
            p_eff=self.empty(batch, nodes, dtype=real),
            q_eff=self.empty(batch, nodes, dtype=real),
            status=self.empty(batch, dtype=word),
        )

    def stats(self) -> dict[str, Tensor]:
        """The first launch: the statistics of all blocks of all rows, by the names that kernels give them."""
        sides = 1 if self.draft is None else 2
        rows = sides * self.rows
        peaks, masses = (self.empty(rows, self.blocks, dtype=torch.float32) for _ in range(2))
        firsts = self.empty(rows, self.blocks, dtype=torch.int32)
        out = {"peaks": peaks, "masses": masses, "firsts": firsts}
        out["arrivals"] = self.empty(len(self.tokens), dtype=torch.int32)
        arguments = self.arguments()
        del arguments["lse"]
        constants = self.constants()
        del constants["WIDTH"], constants["HAS_DRAFT"]
        verify_stats[(sides * blocks(self.rows, self.group), self.blocks)](
            **arguments,
            **out,
            parents=self.parents,
            **constants,
            ROWS=self.group,
            CHAIN=self.chain,
            num_warps=WARPS,
        )
        return out

    def arguments(self) -> dict[str, Any]:
        """What every kernel takes. A tensor that is not there is never read: any other stands for it."""
        draft = self.logits if self.draft is None else self.draft
        rules = self.cut or Cuts(self.temperature, self.tokens)
        draft_rules = self.draft_cut or rules
        return {
            "logits": self.logits,
            "logits_b": self.logits.stride(0),
            "logits_n": self.logits.stride(1),
            "draft": draft,
            "draft_b": draft.stride(0),
            "draft_n": draft.stride(1),
            "lse": self.temperature if self.lse is None else self.lse,
            "tokens": self.tokens,
            "draws": self.draws,
            "temperatures": self.temperature,
            "floors": rules.floor,
            "ties": rules.ties,
            "draft_floors": draft_rules.floor,
            "draft_ties": draft_rules.ties,
            "rows": self.rows,
            "nodes": self.tokens.shape[1],
            "vocab": self.logits.shape[-1],
            "draft_vocab": draft.shape[-1],
            "blocks": self.blocks,
        }

    def constants(self) -> dict[str, Any]:
        """What every kernel is compiled for."""
        return {
            "NODES": _padded(self.tokens.shape[1]),
            "WIDTH": _padded(self.blocks),
            "BLOCK": self.block,
            "HAS_DRAFT": self.draft is not None,
            "HAS_LSE": self.lse is not None,
            "PLAIN": self.cut is None,
        }


def _padded(size: int) -> int:
    return max(2, triton.next_power_of_2(size))


def _rows(logits: Tensor) -> Tensor:
    if not logits.shape[-1]:
        raise InputError("logits of at least one token", list(logits.shape), "pass the whole vocabulary")
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _cut(logits: Tensor, rules: Rules) -> Cuts | None:
    return None if rules.plain else cuts(logits.flatten(0, 1), rules.repeat(logits.shape[1]))
