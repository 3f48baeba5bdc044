"""Same coins, same tokens; same tokens, same state.

With the verifier `match`, speculative output is token for token that of plain decoding, whatever drafts. And after
every round the committed state is that of a fresh start on the same tokens: keys, values, positions and the next
logits. Both are equalities, so one run is a proof for that run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from specdecode_ref.decode import Session
from specdecode_ref.errors import FidelityError
from specdecode_ref.sampling import SamplingRule, law, pick
from specdecode_ref.tree import ancestors


def checked_run(session: Any, tolerance: float = 0.0) -> list[tuple[int, ...]]:
    """Decode to the end; the output of every row. After each round, `check_states`."""
    for _ in session:
        check_states(session, tolerance)
    return [session.generation(row).tokens for row in range(len(session._rows))]


def check_states(session: Any, tolerance: float = 0.0) -> None:
    """Raises FidelityError unless every live row's caches, target's and draft model's, equal a fresh prefill.

    tolerance: the largest difference of keys, values and logits; positions and lengths are exact.
    """
    for b, i in enumerate(session._live):
        row = session._rows[i]
        committed = row.tokens[:-1]
        if session._cache.lengths[b] != len(committed):
            raise FidelityError(f"{len(committed)} cached tokens", session._cache.lengths[b], "look at `commit`")
        _compare(session._model, session._cache, b, committed, row.tokens[-1], f"target, row {i}", tolerance)
        for model, cache in _draft_caches(row.proposer):
            length = cache.lengths[0]
            _compare(model, cache, 0, row.tokens[:length], row.tokens[-1], f"draft model, row {i}", tolerance)


def _compare(model: Any, cache: Any, b: int, tokens: Sequence[int], root: int, whose: str, tolerance: float) -> None:
    fresh = model.new_cache(1, len(tokens) + 8)
    if tokens:
        model.prefill([tokens], fresh)
    if fresh.lengths[0] != cache.lengths[b]:
        raise FidelityError(f"a cache of committed tokens ({whose})", cache.lengths[b], "look at `observe`")
    for number, (plane, other, dim) in enumerate(zip(cache.planes, fresh.planes, cache.slot_dims, strict=True)):
        held, wanted = (p.narrow(dim - 1, 0, len(tokens)) for p in (plane[b], other[0]))
        _close(held, wanted, f"plane {number} of the cache ({whose})", tolerance)
    alone = copy.deepcopy(cache)
    alone.select([b])
    alone.rollback()
    here, there = (model.forward(torch.tensor([[root]]), [[-1]], c).logits[0, 0] for c in (alone, fresh))
    _close(here, there, f"next logits ({whose})", tolerance)


def check_every_path(model: Any, prompt: Sequence[int], parents: Sequence[int], tolerance: float = 0.0) -> None:
    """Raises FidelityError unless each node of a tree is scored, and kept if it is accepted, as a text of its own.

    parents: of a tree whose root is the last token of the prompt.
    """
    tokens = [prompt[-1], *((3 * node + 1) % model.vocab_size for node in range(1, len(parents)))]
    cache = model.new_cache(1, len(prompt) + len(parents))
    model.prefill([prompt[:-1]], cache)
    scores = model.forward(torch.tensor([tokens]), [list(parents)], cache).logits[0]
    for node in range(len(parents)):
        path = ancestors(parents, node)
        text = [*prompt[:-1], *(tokens[i] for i in path)]
        fresh = model.new_cache(1, len(text))
        model.prefill([text[:-1]], fresh)
        _close(
            scores[node],
            model.forward(torch.tensor([text[-1:]]), [[-1]], fresh).logits[0, 0],
            f"scores at node {node}",
            tolerance,
        )
        kept = copy.deepcopy(cache)
        kept.commit([path])
        _compare(model, kept, 0, text, tokens[0], f"the path to node {node}", tolerance)


def _close(came: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float) -> None:
    if not torch.allclose(came.double(), expected.double(), rtol=0, atol=tolerance):
        difference = float((came.double() - expected.double()).abs().max())
        raise FidelityError(
            f"{what} of a fresh prefill", f"a difference of {difference:.3g}", "look at cache and masks"
        )


def _draft_caches(proposer: Any) -> Iterator[tuple[Any, Any]]:
    """(model, cache) of a proposer and of those it is composed of."""
    if hasattr(proposer, "cache"):
        yield proposer._drafter.model, proposer.cache
    for inner in (*getattr(proposer, "_proposers", ()), *filter(None, [getattr(proposer, "proposer", None)])):
        yield from _draft_caches(inner)


def check_coupled(
    model: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    *,
    session: Callable[..., Any] = Session,
    tolerance: float = 0.0,
    **settings: Any,
) -> list[tuple[int, ...]]:
    """Raises FidelityError unless match verification gives plain decoding's tokens: in a batch, alone, reordered.

    settings: as in `Session`, the verifier excepted. Returns the tokens.
    """
    plain = [out.tokens for out in session(model, prompts, **settings).run()]
    settings |= {"verifier": "match"}
    together = checked_run(session(model, prompts, drafter, **settings), tolerance)
    _same(together, plain, "in one batch")
    for i, prompt in enumerate(prompts):
        alone = checked_run(session(model, [prompt], drafter, sequences=[i], **settings), tolerance)
        _same(alone, [plain[i]], f"row {i} alone")
    order = list(range(len(prompts)))[::-2]
    some = session(model, [prompts[i] for i in order], drafter, sequences=order, **settings).run()
    _same([out.tokens for out in some], [plain[i] for i in order], f"rows {order} together")
    return plain


def check_batch(
    model: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    *,
    session: Callable[..., Any] = Session,
    **settings: Any,
) -> list[tuple[int, ...]]:
    """Raises FidelityError unless a sequence's tokens depend on its prompt, its number and the seed, and on all three.

    Under any verifier, rejection sampling too: in a batch, alone and reordered, the tokens are the same; copies of one
    prompt and other seeds give others. Returns the tokens. settings: as in `Session`, the seed among them.
    """

    def run(rows: Sequence[int], **more: Any) -> list[tuple[int, ...]]:
        chosen = [prompts[i] for i in rows]
        outputs = session(model, chosen, drafter, **{"sequences": list(rows), **settings, **more}).run()
        return [out.tokens for out in outputs]

    everyone = list(range(len(prompts)))
    together = run(everyone)
    for rows in (everyone[:1], everyone[-1:], everyone[::-1], everyone[1::2]):
        _same(run(rows), [together[i] for i in rows], f"rows {rows}")
    _same(run(everyone, sequences=None), together, "numbered by default")
    seed = settings.get("seed", 0)
    copies = session(model, [prompts[0]] * 3, drafter, **settings).run()
    others = [run(everyone[:1], seed=s)[0] for s in (seed, seed + 1, seed + 2, seed + (1 << 32))]
    for what, outputs in (("copies of a prompt", [out.tokens for out in copies]), ("seeds", others)):
        if len(set(outputs)) < len(outputs):
            raise FidelityError(
                f"different tokens for different {what}", outputs, "key every coin by seed and sequence"
            )
    return together


def check_plain(
    model: Any,
    prompts: Sequence[Sequence[int]],
    coins: Callable[..., Any],
    *,
    session: Callable[..., Any] = Session,
    rule: Any,
    limit: int,
    seed: int,
) -> None:
    """Raises FidelityError unless plain decoding is what it is by definition: the coin of a place draws from its law.

    model: has `logits_after(tokens)`. coins: makes the coins of (seed, sequence). limit: of new tokens.
    """
    plain = SamplingRule(**{name: getattr(rule, name) for name in SamplingRule.__slots__})
    expected = []
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + limit and (len(tokens) == len(prompt) or tokens[-1] not in plain.eos):
            after = law(model.logits_after(tokens), plain, tokens, len(prompt))
            tokens.append(pick(after, coins(seed, number).emit(len(tokens))))
        expected.append(tuple(tokens[len(prompt) :]))
    found = [out.tokens for out in session(model, prompts, rule=rule, seed=seed, max_new_tokens=limit).run()]
    _same(found, expected, "by definition")


def _same(came: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]], where: str) -> None:
    for row, (c, e) in enumerate(zip(came, expected, strict=True)):
        if c != e:
            at = next((k for k, (x, y) in enumerate(zip(c, e, strict=False)) if x != y), min(len(c), len(e)))
            raise FidelityError(
                f"plain decoding's tokens {list(e)} ({where}, row {row})",
                f"{list(c)}, different from token {at} on",
                "find the first round that holds this token and compare its logits",
            )
