"""Relaxed acceptance, as TensorRT-LLM offers it for the thinking phase: LOSSY, the output law is not the target's.

A drafted token is accepted if it is among the target's N likeliest and its probability lies within delta of the best
one's. The longest path that passes wins, the first of equals, and one more token comes from p. Exact at temperature 0
(N and delta are that engine's relaxed_topk and relaxed_delta, at the values of its DeepSeek-R1 guide).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Verdict
from specdecode_ref.verify.typical import longest_above

if TYPE_CHECKING:
    from torch import Tensor

    from specdecode_ref.verify import Rows


def verify(
    draft: DraftTree,
    p: Rows,
    accept_coins: Sequence[float],
    emit_coins: Sequence[float],
    *,
    top: int = 10,
    delta: float = 0.6,
) -> Verdict:
    """Accept the longest path of tokens close enough to the best, then emit one token. See `Verifier`."""

    def threshold(law: Tensor) -> float:
        largest = law.topk(min(top + 1, len(law))).values
        beaten = float(largest[top]) if len(largest) > top else 0.0
        return max(beaten, float(largest[0]) - delta)

    return longest_above(draft, p, emit_coins, threshold)
