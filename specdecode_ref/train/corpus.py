"""The text that the target wrote, read back: conversations, batches of them, and the words a head should know.

Shards are read where they lie, a conversation at a time: the features of a million tokens are gigabytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdecode_ref.errors import InputError, ModelError
from specdecode_ref.train.text import ANSWERED

STORED = ("tokens", "authors", "top_ids", "top_logits", "lse", "features")
"""What a shard holds of every token (see `text.write_shard`)."""

SHORTEST = 24
"""Tokens a conversation must have to be worth a row of a batch."""


@dataclass(frozen=True)
class Batch:
    """B conversations, padded at the end to L tokens.

    tokens: int64 [B, L]; answered: bool [B, L], what the model wrote as itself; features: float32 [B, L, layers,
    hidden]; top_ids: int64 [B, L, TOP] and top_logs: float32 [B, L, TOP], the target's law after each token (at
    temperature 1).
    """

    tokens: Tensor
    answered: Tensor
    features: Tensor
    top_ids: Tensor
    top_logs: Tensor

    def wanted(self, ahead: int) -> Tensor:
        """bool [B, L]: where the token `ahead` places on is an answer's, so that guessing it is worth learning."""
        out = torch.zeros_like(self.answered)
        out[:, : max(self.answered.shape[1] - ahead, 0)] = self.answered[:, ahead:]
        return out


@dataclass(frozen=True)
class Place:
    """A conversation: tokens `start` to `end` of a shard."""

    shard: Path
    start: int
    end: int


class Corpus:
    """The conversations of some shards.

    layers: which of the stored features are wanted, by their place in the file. device: where batches are to be.

    Raises ModelError for a damaged shard, InputError where no conversation is worth learning from.
    """

    def __init__(self, shards: Sequence[Path], layers: Sequence[int] = (), device: torch.device | str = "cpu") -> None:
        self._layers, self.device = list(layers), device
        self._columns = STORED if self._layers else STORED[:-1]
        self._open: dict[Path, Any] = {}
        self.places = [place for shard in shards for place in self._find(shard)]
        if not self.places:
            came = "none" if shards else "no shard"
            raise InputError(f"text with answers of {SHORTEST} tokens or more", came, "write more")
        self.tokens = sum(place.end - place.start for place in self.places)

    def _find(self, shard: Path) -> Iterator[Place]:
        starts = self._file(shard).get_tensor("starts").tolist()
        authors = self._file(shard).get_tensor("authors")
        for start, end in pairwise(starts):
            if end - start >= SHORTEST and bool((authors[start:end] == ANSWERED).any()):
                yield Place(shard, start, end)

    def _file(self, shard: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if shard not in self._open:
            try:
                file = safe_open(shard, framework="pt")
                end = int(file.get_tensor("starts")[-1])
                if any(file.get_slice(name).get_shape()[0] != end for name in self._columns):
                    raise ValueError("columns of different lengths")
            except (OSError, SafetensorError, ValueError, IndexError) as error:
                raise ModelError(f"a shard of text in {shard}", f"a damaged file ({error})", "delete it") from None
            self._open[shard] = file
        return self._open[shard]

    def batch(self, places: Sequence[Place]) -> Batch:
        """These conversations, side by side."""
        length = max(place.end - place.start for place in places)
        read = [self._read(place, length) for place in places]
        tokens, authors, ids, logits, lse, features = (torch.stack(column) for column in zip(*read, strict=True))
        logs = logits.float() - lse[..., None]
        columns = (tokens.long(), authors == ANSWERED, features.float(), ids.long(), logs)
        return Batch(*(column.to(self.device) for column in columns))

    def _read(self, place: Place, length: int) -> list[Tensor]:
        file, rows = self._file(place.shard), slice(place.start, place.end)
        found = [file.get_slice(name)[rows] for name in self._columns]
        if self._layers:
            found[-1] = found[-1][:, self._layers]
        else:
            found.append(torch.zeros(place.end - place.start, 0, 0))
        return [pad(t, (0, 0) * (t.dim() - 1) + (0, length - len(t))) for t in found]

    def epoch(self, size: int, seed: int) -> list[list[Place]]:
        """All conversations once, in batches of `size` of about one length, in an order that the seed decides."""
        coins = random.Random(seed)
        order = sorted(self.places, key=lambda place: place.end - place.start + coins.random() * 40)
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        coins.shuffle(batches)
        return batches

    def words(self, count: int, size: int) -> Tensor:
        """int64 [count], ascending: the tokens that the target most often wants to write, out of `size`."""
        if count > size:
            raise InputError(f"a draft vocabulary of at most the target's {size}", count, "choose a smaller one")
        mass = torch.zeros(size)
        for shard in dict.fromkeys(place.shard for place in self.places):
            file = self._file(shard)
            answered = file.get_tensor("authors") == ANSWERED
            ids = file.get_tensor("top_ids")[answered].long()
            logs = file.get_tensor("top_logits")[answered].float() - file.get_tensor("lse")[answered][:, None]
            mass.index_add_(0, ids.flatten(), logs.exp().flatten())
            mass.index_add_(0, ids[:, 0], torch.ones(len(ids)))
        return mass.topk(count).indices.sort().values
