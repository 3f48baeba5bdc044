"""The target writes its own training text, and what it was thinking is kept: features and its best next tokens.

A head has to guess what *this* model says, so the only right text is the model's own. Rows of a batch hold one
conversation each and start the next when it ends. What a head is trained on, the features after each token and the
largest logits, falls out of the very passes that write it, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specdecode_ref.models.base import Model
from specdecode_ref.models.tokenizer import Tokenizer
from specdecode_ref.train.files import save_tensors
from specdecode_ref.train.prompts import Asker, Request

FORCED, ASKED, ANSWERED = 0, 1, 2
"""Who wrote a token: the prompt, the model as the user, the model as itself."""

TOP = 16
"""How many of the largest logits are kept after each token."""

TEMPERATURES = ((0.0, 0.5), (0.7, 0.3), (1.0, 0.2))
"""(temperature of an answer, how often). Greedy text is what most users decode; the rest keeps heads from it alone."""

ASKING_TEMPERATURE, SAMPLED_FROM, LONGEST_QUESTION = 1.0, 64, 96


@dataclass(frozen=True)
class Plan:
    """How much is written, and in what portions: a shard is rows x steps tokens and depends on its number alone."""

    rows: int = 64
    steps: int = 512
    longest: int = 384
    seed: int = 0
    features: tuple[int, ...] = ()


@dataclass
class _Row:
    """One conversation while it is written."""

    request: Request
    temperature: float
    queue: list[int]
    asking: bool
    tokens: list[int] = field(default_factory=list)
    authors: list[int] = field(default_factory=list)
    asked: int = 0


def write_shard(
    model: Model, tokenizer: Tokenizer, plan: Plan, number: int, asker: Asker, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    """Shard `number` of the text, as flat tensors over its T tokens:

    tokens int32 [T]; authors uint8 [T]; starts int32 [C + 1], where conversations begin; features float16
    [T, layers, hidden], after each token; top_ids int32 [T, TOP] and top_logits float16 [T, TOP]; lse float32 [T], so
    that logit - lse is the log probability at temperature 1.
    """
    writer = _Writer(model, tokenizer, plan, number, asker)
    for step in range(plan.steps):
        writer.step()
        progress(step + 1)
    return writer.finish()


class _Writer:
    def __init__(self, model: Model, tokenizer: Tokenizer, plan: Plan, number: int, asker: Asker) -> None:
        self.model, self.tokenizer, self.plan, self.asker = model, tokenizer, plan, asker
        self.coins = torch.Generator().manual_seed(plan.seed * 1_000_003 + number)
        self.cache = model.new_cache(plan.rows, plan.longest + 1)
        self.opening, self.closing = _turn(tokenizer)
        self.rows = [self._begin() for _ in range(plan.rows)]
        self.kept: list[list[tuple[Tensor, ...]]] = [[] for _ in self.rows]
        self.done: list[tuple[_Row, list[tuple[Tensor, ...]]]] = []

    def step(self) -> None:
        """Feed every row its next token."""
        for b, row in enumerate(self.rows):
            if not row.queue:
                self._end(b)
        fed = torch.tensor([[row.queue.pop(0)] for row in self.rows], device=self.model.device)
        for row, token in zip(self.rows, fed[:, 0].tolist(), strict=True):
            row.tokens.append(token)
        logits, features = self.model.forward(fed, [[-1]] * len(self.rows), self.cache, self.plan.features)
        self.cache.commit([[0]] * len(self.rows))
        best, ids = (part.cpu() for part in logits[:, 0].float().topk(SAMPLED_FROM))
        lse = logits[:, 0].float().logsumexp(-1).cpu()
        seen = torch.stack([f[:, 0] for f in features], 1).half().cpu() if features else None
        written = self._choose(best, ids)
        for b, row in enumerate(self.rows):
            at = (ids[b, :TOP].int(), best[b, :TOP].half(), lse[b])
            self.kept[b].append(at if seen is None else (*at, seen[b]))
            self._follow(row, written[b])

    def finish(self) -> dict[str, Tensor]:
        """The shard; conversations that have not ended are part of it as far as they got."""
        for b in range(len(self.rows)):
            self._end(b)
        rows = [row for row, _ in self.done]
        columns = [torch.stack(column) for column in zip(*(at for _, kept in self.done for at in kept), strict=True)]
        out = {
            "tokens": torch.tensor([t for row in rows for t in row.tokens], dtype=torch.int32),
            "authors": torch.tensor([a for row in rows for a in row.authors], dtype=torch.uint8),
            "starts": torch.tensor([0, *(len(row.tokens) for row in rows)], dtype=torch.int32).cumsum(0).int(),
        }
        return out | dict(zip(("top_ids", "top_logits", "lse", "features"), columns, strict=False))

    def _begin(self) -> _Row:
        request = self.asker.next()
        heats, weights = zip(*TEMPERATURES, strict=True)
        heat = heats[int(torch.multinomial(torch.tensor(weights), 1, generator=self.coins))]
        queue = [*self.opening, *self.tokenizer.encode(request.text, special=False)]
        if not request.open:
            queue = [*queue[: self.plan.longest // 2], *self.closing]
        return _Row(request, heat, queue, request.open, authors=[FORCED] * len(queue))

    def _end(self, b: int) -> None:
        """Keep the row's conversation and begin its next."""
        row = self.rows[b]
        row.authors = row.authors[: len(row.tokens)]
        self.done.append((row, self.kept[b]))
        if row.request.kind == "to-german":
            answer = [t for t, a in zip(row.tokens, row.authors, strict=True) if a == ANSWERED]
            text = self.tokenizer.decode(answer).strip()
            if 20 <= len(text) <= 400:
                self.asker.german.append(text)
        self.rows[b], self.kept[b] = self._begin(), []
        self.cache.lengths[b] = 0

    def _follow(self, row: _Row, token: int) -> None:
        """What the row is fed next: the rest of its prompt, the token, the answer's turn, or nothing at its end."""
        if len(row.tokens) >= self.plan.longest:
            row.queue = []
        elif row.queue:
            pass
        elif row.asking:
            self._ask(row, token)
        elif row.authors[-1] != ANSWERED or row.tokens[-1] not in self.tokenizer.eos_ids:
            row.queue, row.authors = [token], [*row.authors, ANSWERED]

    def _ask(self, row: _Row, token: int) -> None:
        """The question goes on, or comes to its end and the answer begins."""
        row.asked += 1
        row.asking = token not in self.tokenizer.eos_ids and row.asked <= LONGEST_QUESTION
        row.queue = [token] if row.asking else list(self.closing)
        row.authors += [ASKED] if row.asking else [FORCED] * len(self.closing)

    def _choose(self, best: Tensor, ids: Tensor) -> list[int]:
        """The token that each row writes next [B]."""
        heat = torch.tensor([ASKING_TEMPERATURE if row.asking else row.temperature for row in self.rows])
        law = (best / heat.clamp_min(1e-6)[:, None]).softmax(-1)
        place = torch.multinomial(law, 1, generator=self.coins)
        place[heat == 0] = 0
        return ids.gather(1, place)[:, 0].tolist()


def _turn(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens before a user's words, and those between them and the answer."""
    before, _, after = tokenizer.render([{"role": "user", "content": "\x00"}]).partition("\x00")
    return tokenizer.encode(before, special=False), tokenizer.encode(after, special=False)


def shard(folder: Path, number: int) -> Path:
    """Where a shard of the text lies."""
    return folder / f"text-{number:04d}.safetensors"


def write(
    model: Model,
    tokenizer: Tokenizer,
    plan: Plan,
    shards: Sequence[int],
    sources: tuple[list[str], list[str]],
    folder: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Write shards of the text into `folder`, each whole or not at all. Raises ModelError where that fails.

    sources: the functions and passages to ask about. progress: is told the shard and its step.
    """
    for number in shards:
        asker = Asker(*sources, seed=plan.seed * 1_000_003 + number)

        def told(step: int, number: int = number) -> None:
            progress(number, step)

        save_tensors(shard(folder, number), write_shard(model, tokenizer, plan, number, asker, told))
