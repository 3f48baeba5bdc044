"""Two outputs of one prompt differ: is it a tie that rounding decided, or a defect?

A verify pass multiplies other shapes than a plain step, so its logits differ in their last bits and near-ties may flip.
`explain` computes the place of the first difference in several shapes, measures by how much they really differ there
and around it, and calls a token a defect where it lies further below the maximum than that. Why twice the noise: the
token was the maximum in its own run, and both it and the maximum may have moved by the noise between that run and ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from specdecode_ref.coins import Coins
from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.rounding import Drawn, Greedy, Reading, Scale, figures, measure, prefilled, walk
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import SamplingRule


@dataclass(frozen=True)
class Run:
    """One output. limit: how many tokens it might have; reason: a trace's finish_reason. None where not known."""

    tokens: tuple[int, ...]
    limit: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Divergence:
    """What `explain` found. Scores, gaps and noise are logits after the rule (of the cdf, where tokens are drawn).

    index, position: of the first difference, in the outputs and in the whole text; None where there is none.
    tokens:    one an output; None where it has ended.
    readings:  the place in every shape, a plain step first; none where no logits can be the cause.
    short:     how far each token lies below the maximum (from the coin) after a plain step.
    noise:     the largest difference between a plain step and any other shape, over all `places`; noise_here: at this
               one; noise_logits: before the rule.
    threshold: how far a token may lie below the maximum: what rounding explains.
    later:     the index of a defect behind a tie, and in which output (0 or 1).
    """

    verdict: Literal["same", "tie", "defect"]
    reason: str
    dtype: str
    index: int | None = None
    position: int | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    readings: tuple[Reading, ...] = ()
    short: tuple[float, ...] = ()
    noise: float | None = None
    noise_here: float | None = None
    noise_logits: float | None = None
    threshold: float | None = None
    places: int = 0
    later: tuple[int, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are not finite (a forbidden token's score) become None."""
        return {name: _finite(value) for name, value in asdict(self).items()}


def explain(
    model: Model,
    prompt: Sequence[int],
    a: Sequence[int] | Run,
    b: Sequence[int] | Run,
    rule: SamplingRule,
    *,
    coins: Coins | None = None,
    names: tuple[str, str] = ("A", "B"),
) -> Divergence:
    """Say whether rounding explains the first difference of two outputs.

    model: the model that both ran on, in their dtype and on their device. rule: the sampling rule of both.
    coins: above temperature 0, the coins of both runs, which must be plain or verified by `match`.

    After a tie, each output is held to its own text up to its end: a defect behind it is a defect.
    Raises InputError for outputs that do not fit the model, or a temperature above 0 without coins.

    >>> from specdecode_ref.models.table import TableModel
    >>> explain(TableModel.random(5), [1], [2, 3], [2, 4], SamplingRule(temperature=0)).verdict
    'defect'
    """
    runs = tuple(run if isinstance(run, Run) else Run(tuple(run)) for run in (a, b))
    case = _Case(model, tuple(prompt), rule, coins, names)
    case.check(runs)
    x, y = (run.tokens for run in runs)
    dtype = str(model.dtype).removeprefix("torch.")
    if x == y:
        return Divergence("same", f"no difference in {len(x)} tokens", dtype)
    index = next((i for i, pair in enumerate(zip(x, y, strict=False)) if pair[0] != pair[1]), min(len(x), len(y)))
    tokens = tuple(t[index] if index < len(t) else None for t in (x, y))
    found = Divergence("defect", "", dtype, index, len(prompt) + index, tokens)  # type: ignore[arg-type]
    if None in tokens or len({case.overrun(run) is None for run in runs}) == 2:
        if why := case.excused(runs, index):
            return Divergence("same", why, dtype)
        return replace(found, reason=case.ends(runs, index))
    found = case.judge(found, [run.tokens for run in runs])
    return case.followed(found, runs) if found.verdict == "tie" else found


@dataclass(frozen=True)
class _Case:
    """What both outputs share."""

    model: Model
    prompt: tuple[int, ...]
    rule: SamplingRule
    coins: Coins | None
    names: tuple[str, str]

    def check(self, runs: Sequence[Run]) -> None:
        """Refuse what cannot be judged."""
        vocab, room = self.model.vocab_size, self.model.context_length
        self.rule.require_tokens_below(vocab)
        if not self.prompt:
            raise InputError("a prompt of at least one token", "an empty one", "give the prompt of both outputs")
        for what, tokens in (("the prompt", self.prompt), *zip(self.names, (r.tokens for r in runs), strict=True)):
            if not tokens:
                raise InputError(f"at least one token in {what}", "none", "give the whole output")
            if not 0 <= min(tokens) <= max(tokens) < vocab:
                came = f"{min(tokens)} to {max(tokens)} in {what}"
                raise InputError(f"token ids from 0 to {vocab - 1}", came, "name the model that wrote them")
        if len(self.prompt) + min(len(run.tokens) for run in runs) > room:
            raise InputError(f"at most {room} tokens, the model's context", "more", "cut the outputs")
        if self.rule.temperature == 0:
            return
        if self.coins is None:
            do = "compare greedy outputs, or give the coins of two runs that are plain or verified by 'match'"
            raise InputError("temperature 0", f"{self.rule.temperature} and no coins", do)
        if self.rule.top_k or self.rule.top_p < 1 or self.rule.min_p:
            do = "compare runs without them: rounding moves their edges by whole tokens"
            raise InputError("no top_k, top_p or min_p above temperature 0", "some", do)

    def overrun(self, run: Run) -> str | None:
        """How an output goes on where it should have ended; None where it does not."""
        for at, token in enumerate(run.tokens[:-1]):
            if token in self.rule.eos:
                return f"goes on after the end token {token} at index {at}"
        limit = min(run.limit or math.inf, self.model.context_length - len(self.prompt))
        return f"has {len(run.tokens)} tokens where {limit} are the limit" if len(run.tokens) > limit else None

    def excused(self, runs: Sequence[Run], index: int) -> str | None:
        """Why the shorter output may end where it does: it was asked for less. None where it was not."""
        k = min(range(2), key=lambda i: len(runs[i].tokens))
        run, other = runs[k], runs[1 - k]
        if len(run.tokens) > index or any(map(self.overrun, runs)):
            return None
        if run.reason == "cancelled":
            return f"no difference in the {index} tokens of {self.names[k]}, which was cancelled"
        if run.reason == "length" and run.limit == index and other.limit not in (None, run.limit):
            return f"no difference in the {index} tokens that {self.names[k]} was limited to"
        return None

    def ends(self, runs: Sequence[Run], index: int) -> str:
        """One output ends, or should have, where the other does not. Tokens alone decide that, so rounding cannot."""
        for name, run in zip(self.names, runs, strict=True):
            if wrong := self.overrun(run):
                return f"{name} {wrong}, which rounding cannot do"
        k = min(range(2), key=lambda i: len(runs[i].tokens))
        how = f" ({runs[k].reason})" if runs[k].reason else ", not with an end token,"
        return (
            f"{self.names[k]} ends{how} after {index} tokens where {self.names[1 - k]} goes on, which rounding cannot "
            "do; give both runs the same limit and stop strings"
        )

    def judge(self, found: Divergence, outputs: Sequence[Sequence[int]]) -> Divergence:
        """Measure the place in every shape, and decide."""
        assert found.index is not None and found.position is not None
        tokens = [output[found.index] for output in outputs]
        place = measure(self.model, self.scale(found.position), self.prompt, outputs[0], found.index, tokens)
        found = replace(found, **figures(place, tokens))
        if place.noise_logits > place.plausible:
            reason = (
                f"one row and many rows give logits {place.noise_logits:.3g} apart, more than the "
                f"{place.plausible:.3g} that {found.dtype} can round: the model's own passes disagree"
            )
            return replace(found, verdict="defect", reason=reason)
        blamed = [f"{name}'s {why}" for name, t in zip(self.names, tokens, strict=True) if (why := place.blame(t))]
        if blamed:
            return replace(found, verdict="defect", reason="; ".join(blamed))
        away = " and ".join(f"{name}'s token lies {x:.3g}" for name, x in zip(self.names, found.short, strict=True))
        reason = (
            f"{away} {place.scale.below}, within the {place.threshold:.3g} that {found.dtype} rounding explains here "
            f"({place.scale.moves} x {place.noise:.3g})"
        )
        return replace(found, verdict="tie", reason=reason)

    def followed(self, found: Divergence, runs: Sequence[Run]) -> Divergence:
        """The tie, unless an output holds a defect behind it; each is read against its own text in wide forwards."""
        assert found.position is not None and found.threshold is not None
        for k, run in enumerate(runs):
            text = (*self.prompt, *run.tokens)
            rows = walk(self.model, text[:-1], prefilled(self.model, text, found.position), 64)
            for at, logits in enumerate(rows, found.position + 1):
                scale = self.scale(at)
                if scale.short(scale.read(logits, text[:at]), text[at]) <= found.threshold:
                    continue
                index = at - len(self.prompt)
                here = measure(self.model, scale, self.prompt, run.tokens, index, [text[at]])  # may be a tie as well
                if why := here.blame(text[at]):
                    reason = f"the first difference is a tie, but at index {index} {self.names[k]}'s {why}"
                    return replace(found, verdict="defect", reason=reason, later=(index, k))
        return found

    def scale(self, position: int) -> Scale:
        """How a token at a position of the text is chosen."""
        if self.coins is None or self.rule.temperature == 0:
            return Greedy(self.rule, len(self.prompt))
        return Drawn(self.rule, len(self.prompt), self.coins.emit(position))


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
