"""All randomness of the project: a uniform in [0, 1) that is a pure function of its key.

There is no generator and no state, so a coin does not depend on how many were drawn before it, nor on who else is in
the batch; a replay, a kernel and a second verifier see the same coins. The function is Philox-4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), which Triton and JAX use too.

Keys: `draft` and `accept` coins belong to a node of one round, (seed, sequence, stream, base, node), where base
strictly grows from round to round. Keyed by position alone they would be read twice, because block and traversal
verification look at coins beyond the place where they stop. `emit` coins belong to an absolute position of the output,
so that sample-and-match can be coupled to plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_ref.errors import InputError

DRAFT, ACCEPT, EMIT = 0, 1, 2
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four random 32-bit words from a counter of four words and a key of two; Python integers or uint64 arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True)
class Coins:
    """The coins of one sequence: `seed` (0 to 2^64 - 1) chosen by the user, `sequence` (0 to 2^32 - 1) its own number.

    >>> Coins(seed=0).emit(7) == Coins(seed=0).emit(7) != Coins(seed=1).emit(7)
    True
    """

    seed: int
    sequence: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise InputError("a seed from 0 to 2^64 - 1", self.seed, "choose one in that range")
        if not 0 <= self.sequence < 2**32:
            raise InputError("a sequence number from 0 to 2^32 - 1", self.sequence, "choose one in that range")

    def draft(self, base: int, node: int) -> float:
        """The coin that draws `node` of the tree of the round that starts with `base` committed tokens."""
        return self._uniform(DRAFT, base, node)

    def accept(self, base: int, nodes: int) -> list[float]:
        """The coins [nodes] that the nodes of that tree are tested with; entry 0, the root's, is never used."""
        coins: list[float] = self._uniform(ACCEPT, base, np.arange(nodes, dtype=np.uint64)).tolist()
        return coins

    def emit(self, position: int) -> float:
        """The coin of the token emitted at an absolute position of the sequence."""
        return self._uniform(EMIT, position, 0)

    def emits(self, base: int, count: int) -> list[float]:
        """The coins of the tokens at positions base, base + 1, ..., [count]."""
        return [self.emit(base + i) for i in range(count)]

    def _uniform(self, stream: int, base: int, node: Any) -> Any:
        words = philox((node, base, self.sequence, stream), (self.seed & _MASK, self.seed >> 32))
        return ((words[0] >> 5) * 2.0**26 + (words[1] >> 6)) * 2.0**-53
