"""A trace, run again: the same coins give the same drafts, and this time the whole laws are there to look at.

A trace holds the probabilities of the drafted tokens, not the laws over the vocabulary. Its header holds all that it
takes to make them once more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from specdecode_ref.decode import Session
from specdecode_ref.drafters import build
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.hybrid import Hybrid
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import Auto, Optimal, Shape, parse
from specdecode_ref.errors import InputError, TraceError
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import Laws, SamplingRule
from specdecode_ref.sequence import Running
from specdecode_ref.trace import Trace
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Verdict


def replayed(
    trace: Trace, target: Model, draft_model: Callable[[], Model] | None = None
) -> Iterator[tuple[DraftTree, Laws]]:
    """Each round's draft and the target's laws after its nodes [V].

    Raises TraceError where the trace has no token ids, or where this machine, model or dtype gives other drafts.
    """
    header = trace.header
    if header.level < 1:
        raise TraceError("a trace with token ids", "one of level 0", "record it at level 1 or higher")
    session = _Watched(
        target,
        [header.prompt],
        drafter_of(trace, target, draft_model),
        verifier=header.verifier,
        rule=rule_of(trace),
        seed=header.seed,
        sequences=[header.sequence],
        max_new_tokens=header.max_new_tokens,
    )
    steps = iter(session)
    for recorded in trace.rounds:
        step = next(steps, None)
        if step is None or step.round.nodes.token != recorded.nodes.token or step.round.path != recorded.path:
            raise TraceError(
                f"round {recorded.index} as it was recorded",
                "another draft or verdict",
                "use the model, dtype and machine that the trace was recorded with",
            )
        yield session.judged[-1]


def rule_of(trace: Trace) -> SamplingRule:
    """The sampling rule of a trace's header, whose values may be anything. Raises TraceError where it is none."""
    from pydantic import TypeAdapter, ValidationError

    sampling = trace.header.sampling
    if strange := sorted(set(sampling) - set(SamplingRule.__slots__)):
        raise TraceError("sampling settings of this package (line 1)", f"{strange}"[:80], "record the trace again")
    try:
        return TypeAdapter(SamplingRule).validate_json(json.dumps(sampling))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        came = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
        raise TraceError("valid sampling settings (line 1)", came, "record the trace again") from None


class _Watched(Session):
    """A session that keeps what its verifier saw."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.judged: list[tuple[DraftTree, Laws]] = []

    def _judge(self, row: Running, draft: DraftTree, logits: Tensor) -> tuple[Laws, Verdict]:
        p, verdict = super()._judge(row, draft, logits)
        self.judged.append((draft, p))
        return p, verdict


def drafter_of(trace: Trace, target: Any, draft_model: Callable[[], Model] | None = None) -> Drafter | None:
    """The drafter that a trace's header describes; `draft_model` loads the one of the drafter "model"."""
    method, settings = trace.header.method, trace.header.drafting
    if method == "autoregressive":
        return None
    names = method.split("+")
    parts = [settings] if len(names) == 1 else [settings.get(name, {}) for name in names]
    try:
        drafters = [_drafter(name, part, target, draft_model) for name, part in zip(names, parts, strict=True)]
    except (TypeError, AttributeError, KeyError):  # the values may be anything
        raise TraceError(
            f"settings of the drafter '{method}' (line 1)", str(settings)[:80], "record it again"
        ) from None
    return drafters[0] if len(drafters) == 1 else First(drafters)


def _drafter(name: str, settings: Mapping[str, Any], target: Any, draft_model: Callable[[], Model] | None) -> Drafter:
    if name == "ngram":
        return NGram(**settings)
    if name == "hybrid":
        (lookup, found), (head, guessing) = settings.items()
        parts = [_drafter(lookup, found, target, None), _drafter(head, guessing, target, draft_model)]
        return Hybrid(*parts)  # type: ignore[arg-type]
    tree = settings["tree"]
    if name == "early-exit":
        exit_layer = re.search(r"\[:(\d+)\]$", settings.get("draft_model", ""))
        return build(name, target, tree=tree, exit_layer=int(exit_layer[1]) if exit_layer else None)  # type: ignore[return-value]
    if name == "model" and draft_model:
        return ModelDrafter(draft_model(), _shape(tree))
    if settings.get("head", settings.get("draft_model")) == f"{'draft' if name == 'model' else name}-{target.name}":
        return build(name, target, tree=tree)  # type: ignore[return-value]
    do = "name the draft model with --draft-model; heads other than those shipped cannot be run again"
    raise InputError("a trace of ngram, early-exit, model or a shipped head", repr(name), do)


def _shape(tree: str) -> Shape:
    shape = parse(tree)
    if isinstance(shape, Optimal | Auto):
        raise InputError("the tree that was used", tree, "record it again")
    return shape
