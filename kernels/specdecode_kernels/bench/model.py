"""What the kernels would take if memory were all that counts: `bytes_moved` over a bandwidth. Nothing is measured.

A launch costs two or three microseconds that no formula here has, so the small ones will take longer than it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from specdecode_kernels import cache, coins, ngram, sampling, top_k, tree, verify_block, verify_chain, verify_tree
from specdecode_kernels.bench import attention, peers, small

BANDWIDTHS = {"H100": 3.35, "H200": 4.8}
"""Of the memory, in TB/s, as NVIDIA states it for the SXM cards."""

LABEL = "model, not measured"

ALPHA = 0.7
"""The acceptance that the model reckons with, where a rejection costs bytes."""

VOCAB, GAMMA = 128256, 4


class Line(NamedTuple):
    """A kernel in a shape, and the bytes it moves."""

    what: str
    bytes: int


def verify_bytes(
    function: str, requests: int, gamma: int, vocab: int, itemsize: int, residuals: int, lse: bool = True
) -> int:
    """Bytes of "chain", "block" or "tree" for chains of gamma drawn tokens.

    residuals: requests whose last token comes from max(p - q, 0). lse: the draft passes it.
    """
    shape = requests, gamma + 1, vocab, itemsize
    if function == "block":
        return verify_block.bytes_moved(*shape, drawn=True, lse=lse)
    if function == "chain":
        return verify_chain.bytes_moved(*shape, drawn=True, lse=lse, residuals=residuals)
    inner = requests * gamma
    return verify_tree.bytes_moved(*shape, inner=inner, lse=lse, rejected=residuals, residuals=residuals)


def lines() -> Iterator[Line]:
    """Every kernel in the shapes that are measured."""
    for batch in (1, 8, 64, 128):
        rejected = round(batch * (1 - ALPHA**GAMMA))
        yield Line(f"verify_chain B={batch}", verify_bytes("chain", batch, GAMMA, VOCAB, 2, rejected))
    rejected = round(64 * (1 - ALPHA**GAMMA))
    yield Line("verify_block B=64", verify_bytes("block", 64, GAMMA, VOCAB, 2, rejected))
    for peer, name in {"fused": "fused-temperature pipeline", "mrv2": "mrv2-style pipeline"}.items():
        yield Line(f"{name} B=64", peers.bytes_moved(peer, 64, GAMMA, VOCAB, 2, rejected))
    for function in ("pick", "law"):
        yield Line(f"{function} R=64", sampling.bytes_moved(function, 64, VOCAB, 2))
    yield Line("top_k R=64", top_k.bytes_moved(64, VOCAB, 2, 8))
    for context in attention.CONTEXTS:
        for batch in attention.BATCHES:
            for nodes in attention.NODES:
                shape = attention.Shape(batch, nodes, context)
                yield Line(f"tree_attention {shape}", attention.bytes_moved(shape, attention.splits_of(shape)))
    moved = [len(small.PATH)]
    planes = 2 * small.LAYERS
    commit = cache.bytes_moved(planes, small.HEADS, small.DIM, 2, len(small.PATH) - 1, moved)
    yield Line(f"commit {small.LAYERS} layers B=1", commit)
    yield Line("tree N=64 B=1", tree.bytes_moved(1, 64))
    gamma, longest, _ = small.GRAMS
    yield Line(f"ngram {small.TEXT} tokens B=1", ngram.bytes_moved(1, small.TEXT - 8, small.TEXT, gamma, longest))
    yield Line("coins B=64", coins.bytes_moved(64, 64))


def expected_microseconds(moved: int, terabytes_per_second: float) -> float:
    """The time that so many bytes take."""
    return moved / terabytes_per_second / 1e6


def report(bandwidths: Mapping[str, float]) -> dict[str, object]:
    """The model as JSON. bandwidths: TB/s, by the name of a card."""
    rows = [
        {
            "case": line.what,
            "bytes_moved": line.bytes,
            "model_microseconds": {card: expected_microseconds(line.bytes, b) for card, b in bandwidths.items()},
        }
        for line in lines()
    ]
    return {"label": LABEL, "measured": False, "terabytes_per_second": dict(bandwidths), "rows": rows}
