"""Exact laws over token sequences: the target's, by definition, and what a verifier makes of drafts.

`emitted` averages the verdicts of the real verifier over every draft that may be proposed; `tv` compares it with
`sequences`, the law of plain decoding. The law of the whole decode loop is in `loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from specdecode_ref.fidelity.cube import Verify, verdicts
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule, law
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw

Law = dict[tuple[int, ...], float]
Next = Callable[[tuple[int, ...]], Tensor]
"""The law [V] of the token after these tokens."""


def tv(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """Total variation distance, from 0 (the same law) to 1."""
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


def sequences(
    after: Next,
    length: int,
    eos: Sequence[int] = (),
    start: tuple[int, ...] = (),
    stopped: Callable[[tuple[int, ...]], bool] = lambda tokens: False,
) -> Law:
    """The law of plain decoding: sequences from `start` on that end at `length`, with an `eos`, or where `stopped`."""
    if len(start) >= length or (start and start[-1] in eos) or stopped(start):
        return {start: 1.0}
    out: Law = {}
    for token, mass in enumerate(after(start).tolist()):
        if mass > 0:
            rest = sequences(after, length, eos, (*start, token), stopped)
            out |= {tokens: mass * share for tokens, share in rest.items()}
    return out


def definition(model: TableModel, prompt: Sequence[int], rule: SamplingRule) -> Next:
    """What plain decoding draws from, straight from the model's definition: no cache, no loop."""

    def after(tokens: tuple[int, ...]) -> Tensor:
        history = [*prompt, *tokens]
        return law(model.logits_after(history), rule, history, len(prompt))

    return after


def drafts(after: Next, draws: Sequence[Sequence[Draw]], root: int = 0) -> Iterator[tuple[float, DraftTree]]:
    """Every tree of a shape with its probability. `draws[d]`: how the children of each node at depth d are drawn.

    Deterministic children are the likeliest tokens of `after`, in order.
    """
    yield from _grown(after, draws, 1.0, DraftTree.bare(root), (0,), ())


def _grown(
    after: Next,
    draws: Sequence[Sequence[Draw]],
    weight: float,
    tree: DraftTree,
    level: tuple[int, ...],
    below: tuple[int, ...],
) -> Iterator[tuple[float, DraftTree]]:
    """Grow the nodes of `level` one after another, their children becoming the next level."""
    if not draws:
        yield weight, tree
    elif not level:
        yield from _grown(after, draws[1:], weight, tree, below, ())
    else:
        node, *rest = level
        q = after(tree.history(node))
        for share, tokens in _siblings(q.tolist(), draws[0], ()):
            n, k = len(tree), len(tokens)
            grown = DraftTree(
                (*tree.tokens, *tokens),
                (*tree.parents, *[node] * k),
                (*tree.draws, *draws[0][:k]),
                (*tree.q[:node], q, *tree.q[node + 1 :], *[None] * k),
            )
            yield from _grown(after, draws, weight * share, grown, tuple(rest), (*below, *range(n, n + k)))


def _siblings(
    q: list[float], draws: Sequence[Draw], drawn: tuple[tuple[int, Draw], ...]
) -> Iterator[tuple[float, list[int]]]:
    """The ways to draw one node's children; without replacement never more than q has tokens."""
    if not draws:
        yield 1.0, [token for token, _ in drawn]
        return
    mass = list(q)
    if draws[0] == "deterministic":
        rank = sum(draw == "deterministic" for _, draw in drawn)
        likeliest = sorted(range(len(q)), key=lambda x: -q[x])[rank]
        mass = [float(x == likeliest) for x in range(len(q))]
    elif draws[0] == "without_replacement":
        for token, draw in drawn:
            if draw == "without_replacement":
                mass[token] = 0.0
    total = sum(mass)
    if total == 0:
        yield from _siblings(q, draws[1:], drawn)
        return
    for token, m in enumerate(mass):
        if m > 0:
            for share, tokens in _siblings(q, draws[1:], (*drawn, (token, draws[0]))):
                yield m / total * share, tokens


def judged(
    verify: Verify, target: Next, proposals: Iterable[tuple[float, DraftTree]], *, search: bool = False
) -> Iterator[tuple[float, DraftTree, tuple[int, ...], int]]:
    """What a verifier makes of every draft: (probability, draft, accepted path, emitted token)."""
    for weight, draft in proposals:
        p = {node: target(draft.history(node)) for node in range(len(draft))}
        for (path, token), volume in verdicts(verify, draft, p, search=search).items():
            yield weight * volume, draft, path, token


def emitted(verify: Verify, target: Next, proposals: Iterable[tuple[float, DraftTree]], *, search: bool = False) -> Law:
    """The law of the tokens that one round emits, each completed by the target to the deepest draft's depth + 1.

    It equals the target's law of so many tokens if and only if the verifier is lossless on these drafts.
    """
    out: Law = {}
    for mass, draft, path, token in judged(verify, target, proposals, search=search):
        add_completed(out, target, draft.depth + 1, mass, (*(draft.tokens[i] for i in path[1:]), token))
    return out


def add_completed(law: Law, target: Next, length: int, mass: float, tokens: tuple[int, ...]) -> None:
    """Add to `law` what becomes of `tokens`, which have the probability `mass`, as the target goes on to `length`."""
    for whole, share in sequences(target, length, start=tokens).items():
        law[whole] = law.get(whole, 0.0) + mass * share
