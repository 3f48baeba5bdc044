"""The clock on what is small: commit, tree build, prompt lookup, coins. Its inputs lie in the L2 cache, as in a round
the launch before has just written them; what takes time is the launch itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch

from specdecode_kernels import cache, coins, ngram, tree
from specdecode_kernels.bench.stand import Case, Figures, Stand

SECTION = "small"

LAYERS, HEADS, DIM, SLOTS = 32, 8, 128, 4096
START = 2048
"""Committed slots before a commit."""

PATH = (0, 2, 5, 9, 12)
"""Accepted nodes of a tree; all but the root move."""

WIDTH = 16

BATCHES = (1, 8, 64)

TEXT, GRAMS = 32768, (4, 4, 1)
"""Tokens of a text, and of prompt lookup: gamma, longest, shortest."""


def cases(smoke: bool) -> Iterator[Case]:
    """All of them."""
    for batch in (2,) if smoke else BATCHES:
        if batch < 64:
            layers = "1 layer" if smoke else f"{LAYERS} layers"
            yield Case(SECTION, f"commit {layers} B={batch}", partial(_commit, batch=batch, one=False))
            yield Case(SECTION, f"commit one plane B={batch}", partial(_commit, batch=batch, one=True))
        nodes = 9 if smoke else 64
        yield Case(SECTION, f"tree N={nodes} B={batch}", partial(_tree, batch=batch, nodes=nodes))
        text = 80 if smoke else TEXT
        yield Case(SECTION, f"ngram {text} tokens B={batch}", partial(_ngram, batch=batch, text=text))
        yield Case(SECTION, f"coins B={batch}", partial(_coins, batch=batch))


def _commit(stand: Stand, batch: int, one: bool) -> Figures:
    layers, slots, start = (1, 64, 16) if stand.smoke else (LAYERS, SLOTS, START)
    whole = torch.zeros(batch, 2 * layers * HEADS, slots, DIM, dtype=torch.bfloat16, device=stand.device)
    planes = [whole] if one else [whole[:, HEADS * i : HEADS * (i + 1)] for i in range(2 * layers)]
    path = torch.full((batch, WIDTH), -1, device=stand.device)
    path[:, : len(PATH)] = torch.tensor(PATH)
    count = torch.full((batch,), len(PATH), device=stand.device)
    lengths = torch.full((batch,), start, device=stand.device)
    moved = cache.bytes_moved(len(planes), planes[0].shape[1], DIM, 2, batch * (len(PATH) - 1), [len(PATH)] * batch)
    call = partial(cache.commit, planes, lengths, path, count)
    return stand.timed([call], moved, warm=True, before=lambda: lengths.fill_(start))


def _tree(stand: Stand, batch: int, nodes: int) -> Figures:
    rng = random.Random(0)
    rows = [[-1, *(rng.randrange(max(0, i - 6), i) for i in range(1, nodes))] for _ in range(batch)]
    parents = torch.tensor(rows, device=stand.device)
    return stand.timed([partial(tree.topology, parents)], tree.bytes_moved(batch, nodes), warm=True)


def _ngram(stand: Stand, batch: int, text: int) -> Figures:
    gamma, longest, shortest = GRAMS
    tokens = torch.randint(32000, (batch, text), generator=stand.generator(0), device=stand.device)
    lengths = torch.full((batch,), text - 8, device=stand.device)
    moved = ngram.bytes_moved(batch, text - 8, text, gamma, longest)
    return stand.timed([partial(ngram.find, tokens, lengths, gamma, longest, shortest)], moved, warm=True)


def _coins(stand: Stand, batch: int) -> Figures:
    sequences = torch.arange(batch, device=stand.device)
    return stand.timed(
        [partial(coins.accept, 7, sequences, sequences + 100, 64)], coins.bytes_moved(batch, 64), warm=True
    )
