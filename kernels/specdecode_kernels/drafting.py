"""Drafters that stay on the device: prompt lookup, a chain from a draft model, Medusa's heads in a fixed tree.

Each drafts for the whole batch what its namesake in `specdecode_ref.drafters` drafts for one sequence, with the same
coins. A draft has always the same N nodes; those for which a row has no room, or no guess, are -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels import coins, ngram, sampling, tree
from specdecode_kernels.static_model import StaticModel, objection
from specdecode_ref.batched.records import DETERMINISTIC, DRAWS, Drafts, Rules, Verdicts
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.medusa import Medusa
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import Paths, Sampled, Static
from specdecode_ref.models.transformer import Transformer


@dataclass
class Text:
    """The texts of a batch on the device.

    tokens:    int64 [B, T], padded; the last one that is committed is the root of a round.
    total:     int64 [B], how many are committed. limits: int64 [B], how many there may be.
    sequences: int64 [B], their numbers for the coins. seed: of the coins.
    rules:     one a row.
    """

    tokens: Tensor
    total: Tensor
    limits: Tensor
    sequences: Tensor
    seed: int
    rules: Rules

    @property
    def root(self) -> Tensor:
        """The last committed token of each row, int64 [B, 1]."""
        return self.tokens.gather(1, self.total[:, None] - 1)

    @property
    def room(self) -> Tensor:
        """The deepest draft that can still be used, int64 [B]; negative for a text that is full."""
        return self.limits - self.total - 1

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, ascending."""
        for name in ("tokens", "total", "limits", "sequences"):
            setattr(self, name, getattr(self, name)[rows])
        self.rules = self.rules.select(torch.tensor(rows, device=self.total.device))


class Proposer(Protocol):
    """Drafts for a batch. nodes: N, the root included. chain: no node has two children. layers: see `Drafter.features`.

    All of its work is on the device and depends on shapes only.
    """

    nodes: int
    chain: bool
    layers: tuple[int, ...]

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[tuple[Tensor, ...]]) -> None:
        """Read the prompts; features [P - 1, hidden] of each row's tokens but the last."""
        ...

    def propose(self, text: Text) -> Drafts:
        """A draft for each row, from what is committed."""
        ...

    def observe(self, verdicts: Verdicts, features: tuple[Tensor, ...]) -> None:
        """Follow the verdicts; features [B, N, hidden] of the tree's nodes."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, ascending."""
        ...


def objection_to(drafter: Drafter | None, device: torch.device) -> str | None:
    """Why a drafter cannot draft on the device of the target, or None."""
    if drafter is None or isinstance(drafter, NGram):
        return None
    if isinstance(drafter, ModelDrafter):
        if not isinstance(drafter.shape, Sampled) or max(drafter.shape.branching) > 1:
            return f"a draft model drafts a chain here, not {drafter.shape}"
        if drafter.model.device != device:
            return f"the draft model is on '{drafter.model.device}', the target on '{device}'"
        return objection(drafter.model)
    if isinstance(drafter, Medusa):
        fixed = isinstance(drafter.shape, Static)
        return None if fixed else f"Medusa's heads fill a static tree here, not {drafter.shape}"
    return f"the drafter '{drafter.name}' drafts on the host"


def longest_chain(drafter: Drafter | None) -> int:
    """The most nodes, the root included, of the chains that a drafter makes; 1 where it makes none."""
    if isinstance(drafter, NGram):
        return 1 + drafter.gamma
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.shape, Sampled):
        return 1 + len(drafter.shape.branching)
    return 1


def proposer(drafter: Drafter | None, target: Transformer, batch: int, capacity: int) -> Proposer:
    """The device's own of a drafter that there is no objection to. capacity: tokens of the longest text."""
    if drafter is None:
        return Nothing()
    if isinstance(drafter, NGram):
        return Lookup(drafter)
    if isinstance(drafter, ModelDrafter):
        return Chain(drafter, batch, capacity)
    assert isinstance(drafter, Medusa)
    return Heads(drafter, target, batch)


class Nothing:
    """The bare root: plain decoding."""

    nodes, chain = 1, True
    layers: tuple[int, ...] = ()

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[tuple[Tensor, ...]]) -> None:
        """Nothing to read."""

    def propose(self, text: Text) -> Drafts:
        """See `Proposer.propose`."""
        return Drafts.chains(text.root)

    def observe(self, verdicts: Verdicts, features: tuple[Tensor, ...]) -> None:
        """Nothing to follow."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing is kept."""


class Lookup(Nothing):
    """Prompt lookup, with `ngram.find`."""

    def __init__(self, settings: NGram) -> None:
        self._settings = settings
        self.nodes = settings.gamma + 1

    def propose(self, text: Text) -> Drafts:
        """See `Proposer.propose`."""
        s = self._settings
        found = ngram.find(text.tokens, text.total, s.gamma, s.longest, s.shortest)
        return Drafts.chains(torch.cat((text.root, _fitting(found.tokens, text.room)), 1))


class Chain(Nothing):
    """A chain drawn from a draft model, whose cache holds what is committed up to two tokens before the root's place.

    A round may accept the whole chain, whose last token the draft model has not read, or less. So the first forward of
    the next always reads two tokens: the root, and the one before it once more.
    """

    def __init__(self, drafter: ModelDrafter, batch: int, capacity: int) -> None:
        assert isinstance(drafter.model, Transformer) and isinstance(drafter.shape, Sampled)
        self._words, self._context = drafter.words, drafter.model.context_length
        self._draw = DRAWS.index(drafter.shape.draw)
        self._gamma = len(drafter.shape.branching)
        self.nodes = self._gamma + 1
        self._model = StaticModel(drafter.model, batch, capacity + self.nodes)

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[tuple[Tensor, ...]]) -> None:
        """Prefill the draft model with all that fits into its context."""
        self._model.prefill([p[:-1] if len(p) <= self._context else () for p in prompts])

    def propose(self, text: Text) -> Drafts:
        """See `Proposer.propose`."""
        room = torch.minimum(text.room, self._context - text.total + 1)
        drawing = coins.draft(text.seed, text.sequences, text.total, self.nodes)
        tokens, rows = [text.root], []
        for depth in range(1, self.nodes):
            rows.append(self._after(text, tokens))
            picked = sampling.pick(rows[-1], text.rules, drawing[:, depth].contiguous())
            # Of a row without a law any token will do: verification finds out, and a missing one would hide it.
            tokens.append(picked[:, None].clamp(min=0))
        drafted = _fitting(torch.cat(tokens[1:], 1), room)
        logits = torch.stack([*rows, rows[-1]], 1)
        drafts = Drafts.chains(torch.cat((text.root, drafted), 1), logits)
        drafts.draws.fill_(self._draw)
        return drafts

    def _after(self, text: Text, tokens: list[Tensor]) -> Tensor:
        """Draft logits [B, V_d] after the newest of the drafted tokens."""
        if len(tokens) == 1:
            before = (text.total - 2).clamp(min=0)
            read = torch.cat((text.tokens.gather(1, before[:, None]), tokens[0]), 1)
            # A prompt of one token: the root comes first, and nothing behind it counts.
            alone = (text.total < 2)[:, None]
            read = torch.where(alone, tokens[0], read)
            self._model.lengths.copy_(before)
        else:
            read = tokens[-1]
            self._model.lengths.copy_(text.total + len(tokens) - 2)
        logits, _ = self._model.forward(read, _chain_of(read))
        last = logits[:, -1]
        if len(tokens) == 1:
            last = torch.where(alone, logits[:, 0], last)
        return last if self._words is None else self._widened(last)

    def _widened(self, row: Tensor) -> Tensor:
        """Logits [B, D] of a reduced vocabulary as logits [B, V]."""
        assert self._words is not None
        whole = row.new_full((len(row), self._words.size), -torch.inf)
        return whole.index_copy_(1, self._words.ids, row)

    def select(self, rows: Sequence[int]) -> None:
        """See `Proposer.select`."""
        self._model.select(rows)


class Heads(Nothing):
    """Medusa's heads on the newest feature, and a static tree filled with their best guesses by rank."""

    chain = False

    def __init__(self, drafter: Medusa, target: Transformer, batch: int) -> None:
        assert isinstance(drafter.shape, Static)
        device, words = target.device, drafter.heads.words
        self._heads = drafter.heads
        self.layers = drafter.features
        most = len(words.ids) if words else drafter.vocab_size
        order = numbered([p for p in drafter.shape.paths if len(p) <= len(drafter.heads) and max(p) < most])
        place = {path: node for node, path in enumerate(order)}
        self.nodes = len(order)
        self._parents = torch.tensor([[-1, *(place[path[:-1]] for path in order[1:])]], device=device)
        self._depths = torch.tensor([len(path) for path in order], device=device)
        self._ranks = torch.tensor([path[-1] for path in order[1:]], device=device)
        self._widest = 1 + max(path[-1] for path in order[1:])
        self._known = torch.zeros(batch, dtype=torch.bool, device=device)
        self._feature = torch.zeros(batch, target.config.hidden, dtype=target.dtype, device=device)

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[tuple[Tensor, ...]]) -> None:
        """Keep the feature of each prompt's last token but one; a prompt of one token has none."""
        for row, (prompt, seen) in enumerate(zip(prompts, features, strict=True)):
            if len(prompt) > 1:
                self._known[row] = True
                self._feature[row] = seen[0][-1]

    def propose(self, text: Text) -> Drafts:
        """See `Proposer.propose`."""
        batch = len(text.tokens)
        parents = self._parents.expand(batch, -1)
        draws = torch.full_like(parents, DETERMINISTIC)
        logits = self._heads.logits(self._feature)
        best = sampling.top_k(logits.flatten(0, 1), self._widest).tokens.view(batch, -1, self._widest)
        drafted = best[:, self._depths[1:] - 1, self._ranks]
        sound = drafted >= 0
        if self._heads.words is not None:
            drafted = self._heads.words.ids[drafted.clamp(min=0)]
        fits = (self._depths[1:] <= text.room[:, None]) & self._known[:, None] & sound
        return Drafts(torch.cat((text.root, drafted.masked_fill(~fits, -1)), 1), parents, draws)

    def observe(self, verdicts: Verdicts, features: tuple[Tensor, ...]) -> None:
        """Keep the target's feature of the last accepted node."""
        last = verdicts.path.gather(1, verdicts.length[:, None] - 1)
        self._feature.copy_(features[0].gather(1, last[..., None].expand(-1, -1, features[0].shape[-1]))[:, 0])
        self._known.fill_(True)

    def select(self, rows: Sequence[int]) -> None:
        """See `Proposer.select`."""
        self._known, self._feature = self._known[rows], self._feature[rows]


def numbered(paths: Sequence[tuple[int, ...]]) -> Paths:
    """The nodes of a static tree as `drafters.growth` numbers them, the root first: a node's coin depends on it."""
    order: list[tuple[int, ...]] = [()]
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        level = [path for path in paths if len(path) == depth]
        for parent in dict.fromkeys(path[:-1] for path in level):
            order += [path for path in level if path[:-1] == parent]
    return tuple(order)


def _fitting(drafted: Tensor, room: Tensor) -> Tensor:
    """Drafted tokens [B, K] of a chain, -1 from where the room ends."""
    depth = torch.arange(1, drafted.shape[1] + 1, device=drafted.device)
    return drafted.masked_fill(depth > room[:, None], -1)


def _chain_of(tokens: Tensor) -> tree.Topology:
    """The topology of chains as long as `tokens` [B, N]."""
    nodes = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
    return tree.topology(nodes.expand_as(tokens).contiguous())
