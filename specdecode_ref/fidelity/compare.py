"""All verifiers side by side: on the same drafts, how much each accepts in expectation and what law comes out.

`compare` takes the laws of a small vocabulary and is exact in everything. `on_rounds` takes the rounds of a real
generation, drafts as they were, and is exact in the coins: the accepted length each rule would have had on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_ref.errors import InputError, TraceError
from specdecode_ref.fidelity.cube import accepted
from specdecode_ref.fidelity.laws import Law, Next, add_completed, drafts, judged, sequences, tv
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw
from specdecode_ref.verify import VERIFIERS, Verifier

MOST_DRAFTS = 4096
"""More drafts than this are not enumerated."""


@dataclass(frozen=True)
class Row:
    """One verifier's figures, or why it is not applicable (`objection`); then the others are None.

    accepted: expected accepted tokens a round; `accepted + 1` is tau without EOS and length limit.
    law:      of the tokens that a round emits, each completed by the target to the draft's depth + 1.
    tv:       its total variation from the target's law.
    """

    verifier: str
    lossless: bool
    source: str
    objection: str | None = None
    accepted: float | None = None
    law: Law | None = None
    tv: float | None = None


def compare(
    p: Next, q: Next, draws: Sequence[Sequence[Draw]], verifiers: Iterable[str] = tuple(VERIFIERS)
) -> list[Row]:
    """Exact figures for drafts of the shape `draws` (as in `laws.drafts`), drawn from q and judged against p.

    >>> import torch
    >>> half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> [row] = compare(lambda tokens: half, lambda tokens: half, [["with_replacement"]], ["chain"])
    >>> row.accepted, row.tv
    (1.0, 0.0)

    Raises InputError where there are more than `MOST_DRAFTS` drafts.
    """
    proposals = []
    for proposal in drafts(q, draws):
        proposals.append(proposal)
        if len(proposals) > MOST_DRAFTS:
            raise InputError(f"at most {MOST_DRAFTS} drafts", "more", "use fewer tokens, or a smaller draft")
    target = sequences(p, len(draws) + 1)
    return [_row(VERIFIERS[name], p, proposals, target) for name in verifiers]


def _row(verifier: Verifier, p: Next, proposals: Sequence[tuple[float, DraftTree]], target: Law) -> Row:
    about = (verifier.name, verifier.lossless, verifier.source)
    for _, draft in proposals:
        if objection := verifier.objection(draft):
            return Row(*about, objection)
    law: Law = {}
    length = 0.0
    for mass, draft, path, token in judged(verifier, p, proposals):
        length += mass * (len(path) - 1)
        add_completed(law, p, draft.depth + 1, mass, (*(draft.tokens[node] for node in path[1:]), token))
    return Row(*about, None, length, law, tv(law, target))


def on_rounds(rounds: Iterable[tuple[DraftTree, Any]], verifiers: Iterable[str] = tuple(VERIFIERS)) -> list[Row]:
    """Expected accepted tokens a round on given drafts, over all coins; no law, as the drafts are not random.

    rounds: (draft, the target's laws [V] by node), as `replay.replayed` gives them.
    """
    rounds = [(draft, p) for draft, p in rounds if len(draft) > 1]
    if not rounds:
        raise TraceError("a trace with drafts", "one of plain decoding", "record it with a drafter")
    rows = []
    for verifier in (VERIFIERS[name] for name in verifiers):
        about = (verifier.name, verifier.lossless, verifier.source)
        objection = next((why for draft, _ in rounds if (why := verifier.objection(draft))), None)
        if objection:
            rows.append(Row(*about, objection))
        else:
            mean = sum(accepted(verifier, draft, p) for draft, p in rounds) / len(rounds)
            rows.append(Row(*about, None, mean))
    return rows
