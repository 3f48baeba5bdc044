"""One-hot verification: the draft is judged as if it had been certain, whatever it was drawn from.

Each drafted token x is accepted with probability p_eff(x), and a rejection removes x from p. No draft law is needed, so
most engines run this rule unless told otherwise ("target only" in SGLang, the default draft_sample_method of vLLM). It
keeps the law for every draft, because it keeps it for each single token that may come; and as min(1, p / q) is never
below p, it accepts less often than rejection sampling does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw, Verdict
from specdecode_ref.verify import tree

if TYPE_CHECKING:
    from specdecode_ref.verify import Rows


def verify(draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]) -> Verdict:
    """The verdict of `tree` on the same tokens, all of them deterministic. See `Verifier` for the arguments."""
    certain: Draw = "deterministic"
    draws = (None, *[certain] * (len(draft) - 1))
    return tree.verify(replace(draft, draws=draws), p, accept_coins, emit_coins)
