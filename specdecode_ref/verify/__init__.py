"""Verifiers: pure functions from a draft, the target's laws and the coins to a verdict. One rule a file.

Read `chain` first, then `tree`, then `block` and `traversal`. A verifier states its premises here, and whether it keeps
the law; outside of its premises it refuses instead of being quietly wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdecode_ref.errors import NotApplicableError, UnknownNameError
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw, Verdict
from specdecode_ref.verify import (
    block,
    chain,
    kseq,
    lenient,
    match,
    onehot,
    relaxed,
    traversal,
    tree,
    typical,
)

ALL_DRAWS: frozenset[Draw] = frozenset({"with_replacement", "without_replacement", "deterministic"})


class Rows(Protocol):
    """The target's laws: `p[i]` is the law [V] of the token after node i. May be made on first use."""

    def __getitem__(self, node: int, /) -> Tensor: ...


Rule = Callable[[DraftTree, Rows, Sequence[float], Sequence[float]], Verdict]


@dataclass(frozen=True)
class Verifier:
    """A verification rule with its premises.

    Calling it is calling the rule: (tree, p, accept_coins [N], emit_coins [depth + 1]) -> Verdict.
    """

    name: str
    rule: Rule
    lossless: bool
    shapes: frozenset[str]
    draws: frozenset[Draw]
    source: str

    def objection(self, draft: DraftTree) -> str | None:
        """Why this rule cannot judge the draft, or None. For a lone child both random draws are the same."""
        if "tree" not in self.shapes and not draft.is_chain:
            return "the draft is a tree, and this rule judges chains only"
        strange = set()
        for siblings in draft.children:
            lone = len(siblings) == 1 and "with_replacement" in self.draws
            allowed = {*self.draws, "without_replacement"} if lone else self.draws
            strange |= {str(draft.draws[child]) for child in siblings} - allowed
        return f"the draft has {', '.join(sorted(strange))} siblings" if strange else None

    def __call__(
        self, draft: DraftTree, p: Rows, accept_coins: Sequence[float], emit_coins: Sequence[float]
    ) -> Verdict:
        if objection := self.objection(draft):
            raise NotApplicableError(f"a draft that '{self.name}' can judge", objection, "choose another verifier")
        return self.rule(draft, p, accept_coins, emit_coins)


_CHAIN, _BOTH = frozenset({"chain"}), frozenset({"chain", "tree"})
_IID: frozenset[Draw] = frozenset({"with_replacement"})

VERIFIERS: dict[str, Verifier] = {
    v.name: v
    for v in (
        Verifier("match", match.verify, True, _BOTH, ALL_DRAWS, "sample and compare; coupled to plain decoding"),
        Verifier(
            "chain",
            chain.verify,
            True,
            _CHAIN,
            ALL_DRAWS,
            "Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318",
        ),
        Verifier("tree", tree.verify, True, _BOTH, ALL_DRAWS, "SpecInfer, arXiv 2305.09781; Sequoia, arXiv 2402.12374"),
        Verifier("block", block.verify, True, _CHAIN, ALL_DRAWS, "Sun et al., arXiv 2403.10444"),
        Verifier("traversal", traversal.verify, True, _BOTH, ALL_DRAWS, "Weng et al., arXiv 2505.12398"),
        Verifier("kseq", kseq.verify, True, _BOTH, _IID, "SpecTr, arXiv 2310.15141"),
        Verifier("onehot", onehot.verify, True, _BOTH, ALL_DRAWS, "target only, the default of vLLM and SGLang"),
        Verifier("typical", typical.verify, False, _BOTH, ALL_DRAWS, "Medusa, arXiv 2401.10774"),
        Verifier("relaxed", relaxed.verify, False, _BOTH, ALL_DRAWS, "TensorRT-LLM, relaxed acceptance"),
        Verifier("lenient", lenient.verify, False, _CHAIN, ALL_DRAWS, "Leviathan et al., appendix A.5"),
    )
}
"""All rules by name, the lossless ones first."""


def get(name: str) -> Verifier:
    """The verifier of that name."""
    if name not in VERIFIERS:
        raise UnknownNameError(f"a verifier out of {', '.join(VERIFIERS)}", repr(name), "choose one of them")
    return VERIFIERS[name]
