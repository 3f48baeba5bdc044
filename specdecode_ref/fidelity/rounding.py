"""How far rounding really moves the scores of a text: the same places, computed in several shapes.

A plain step multiplies one row, a verify pass many, and floating-point sums depend on the shape. `measure` runs the
text around one place both ways, through a model's own `prefill` and `forward`, on chains of committed tokens only: a
tree, its mask and a rejection take no part, so that a bug in those cannot pass for noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specdecode_ref import sampling
from specdecode_ref.cache import Cache
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import SamplingRule, law

BEFORE, AFTER, FEWEST = 32, 8, 16
"""Places measured before and after the one in question, and how many there are at least if the text allows: a single
place may by luck show no noise."""

NEAR = 8
"""How many of the largest scores of a place count for the noise: those that could become the maximum."""

WIDTHS = (2, 5, 8)
"""Rows of one forward in the shapes beside a plain step; the whole window in one forward is one more."""


@dataclass(frozen=True)
class Reading:
    """A place in one shape: some tokens' logits, their scores after the rule, the first maximum, the top-2 gap.

    Where tokens are drawn, a score is a probability, `first` is the token that the coin draws, and there is no gap.
    """

    shape: str
    logits: tuple[float, ...]
    scores: tuple[float, ...]
    first: int
    gap: float | None


class Scale(Protocol):
    """What a choice of token is read off; a reading is a tensor [V].

    moves: how many of the quantities in `short` move by the noise.
    """

    moves: int
    below: str

    def read(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """The reading of logits [V] after a text."""
        ...

    def reading(self, shape: str, logits: Tensor, history: Sequence[int], tokens: Sequence[int]) -> Reading:
        """The same for the eye."""
        ...

    def short(self, read: Tensor, token: int) -> float:
        """How far the token is from being the one chosen: 0 where it is, or is tied with it."""
        ...

    def apart(self, one: Tensor, other: Tensor, tokens: Sequence[int]) -> float:
        """The largest difference of two readings of a place, among what could be chosen and `tokens`."""
        ...


@dataclass(frozen=True)
class Greedy:
    """A reading holds the scores, logits after the rule, of which the first maximum is chosen."""

    rule: SamplingRule
    prompt_length: int
    moves = 2  # the token's score and the maximum
    below = "below the maximum"

    def read(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """See `Scale`: what `sampling.law` takes the maximum of."""
        return sampling.scores(logits, self.rule, history, self.prompt_length)

    def reading(self, shape: str, logits: Tensor, history: Sequence[int], tokens: Sequence[int]) -> Reading:
        """See `Scale`."""
        scores = self.read(logits, history)
        top = scores.topk(min(2, len(scores))).values
        gap = float(top[0] - top[1]) if len(top) == 2 else None
        return Reading(shape, _at(logits, tokens), _at(scores, tokens), int(scores.max(-1).indices), gap)

    def short(self, read: Tensor, token: int) -> float:
        """See `Scale`."""
        return float(read.max() - read[token])

    def apart(self, one: Tensor, other: Tensor, tokens: Sequence[int]) -> float:
        """See `Scale`."""
        return _apart(one, other, tokens)


@dataclass(frozen=True)
class Drawn:
    """A reading is the cdf of the law, and the coin `u` chooses the token between whose edges it lies."""

    rule: SamplingRule
    prompt_length: int
    u: float
    moves = 1  # an edge; the coin stands still
    below = "away from the coin"

    def read(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """See `Scale`."""
        return law(logits, self.rule, history, self.prompt_length).cumsum(-1)

    def reading(self, shape: str, logits: Tensor, history: Sequence[int], tokens: Sequence[int]) -> Reading:
        """See `Scale`."""
        p = law(logits, self.rule, history, self.prompt_length)
        return Reading(shape, _at(logits, tokens), _at(p, tokens), sampling.pick(p, self.u), None)

    def short(self, read: Tensor, token: int) -> float:
        """See `Scale`; infinite for a token that no coin draws."""
        coin, high = self.u * float(read[-1]), float(read[token])
        low = float(read[token - 1]) if token else 0.0
        if low == high:
            return math.inf
        return 0.0 if low <= coin < high else max(low - coin, coin - high, math.ulp(0.0))

    def apart(self, one: Tensor, other: Tensor, tokens: Sequence[int]) -> float:
        """See `Scale`."""
        return float((one - other).abs().max())


def _at(values: Tensor, tokens: Sequence[int]) -> tuple[float, ...]:
    return tuple(float(values[token]) for token in tokens)


def _apart(one: Tensor, other: Tensor, tokens: Sequence[int]) -> float:
    near = torch.cat((one.topk(min(NEAR, len(one))).indices, torch.tensor(tokens, dtype=torch.int64).to(one.device)))
    moved = (one[near].double() - other[near].double()).abs()
    return float(moved[moved.isfinite()].max())  # a forbidden token is -inf in both


@dataclass(frozen=True)
class Place:
    """One place of a text in every shape. Meanings of the figures: see `divergence.Divergence`.

    read:    the reading after a plain step.
    never_parted: tokens whose logits no shape moves against those of the first maximum, at any place.
    plausible:    the largest difference of logits that the dtype can explain at all.
    """

    read: Tensor
    scale: Scale
    dtype: str
    readings: tuple[Reading, ...]
    noise: float
    noise_here: float
    noise_logits: float
    plausible: float
    places: int
    never_parted: tuple[int, ...]

    @property
    def threshold(self) -> float:
        """How far from the choice rounding can leave a token that was chosen in another shape."""
        return self.scale.moves * self.noise

    def blame(self, token: int) -> str | None:
        """Why rounding cannot have chosen the token; None where it can."""
        short, first = self.scale.short(self.read, token), self.readings[0].first
        if not short <= self.threshold:
            return (
                f"token {token} lies {short:.3g} {self.scale.below}, and {self.dtype} rounding explains no more than "
                f"{self.threshold:.3g} here ({self.scale.moves} x {self.noise:.3g})"
            )
        if token != first and short == 0 and token in self.never_parted:
            return f"token {token} ties exactly with token {first} in every shape, and the first maximum must win"
        return None


def measure(
    model: Model, scale: Scale, prompt: Sequence[int], output: Sequence[int], index: int, tokens: Sequence[int]
) -> Place:
    """Measure the place before `output[index]`, of which `tokens` are candidates, and its neighbours along the output.

    The text before the window is a fresh prefill in every shape; within it one row, or so many, are committed at a
    time. Raises NumericalError where the model's logits hold NaN.
    """
    at = len(prompt) + index
    text = [*prompt, *output[: max(index + AFTER, FEWEST)]][: model.context_length]
    begin = max(len(prompt) - 1, at - 1 - BEFORE)
    widths = sorted({1, *(w for w in WIDTHS if w < len(text) - begin), len(text) - begin})
    start = max(0, min(begin, len(text) - FEWEST))
    spans = [text[:begin], text] if start < begin else [text]  # the prompt apart: every run has prefilled it
    caches = [prefilled(model, span, first) for span, first in zip(spans, (start, begin), strict=False)]
    one, *others = (
        [
            row
            for span, cache in zip(spans, caches, strict=True)
            for row in walk(model, span, copy.deepcopy(cache), width)
        ]
        for width in widths
    )
    here = at - 1 - start
    noises, raw = [], []
    for k, row in enumerate(one):
        history, also = text[: start + k + 1], tokens if k == here else ()
        read = scale.read(row, history)
        noises.append(max((scale.apart(read, scale.read(o[k], history), also) for o in others), default=0.0))
        raw.append(max((_apart(row, o[k], also) for o in others), default=0.0))
    readings = tuple(
        scale.reading(f"{width} row{'s' * (width > 1)}", rows[here], text[:at], tokens)
        for width, rows in zip(widths, (one, *others), strict=True)
    )
    return Place(
        read=scale.read(one[here], text[:at]),
        scale=scale,
        dtype=str(model.dtype).removeprefix("torch."),
        readings=readings,
        noise=max(noises),
        noise_here=noises[here],
        noise_logits=max(raw),
        plausible=_plausible(model.dtype, max(float(row.max().abs()) for row in one)),
        places=len(one),
        never_parted=tuple(t for t in tokens if _never_parted(t, readings[0].first, one, others)),
    )


def prefilled(model: Model, text: Sequence[int], start: int) -> Cache:
    """A cache that holds the text's first `start` tokens."""
    cache = model.new_cache(1, len(text) + 1)
    if start:
        model.prefill([text[:start]], cache)
    return cache


def walk(model: Model, text: Sequence[int], cache: Cache, width: int) -> Iterator[Tensor]:
    """The logits [V] after each token that the cache does not hold yet, `width` rows a forward, the rest first."""
    start = cache.lengths[0]
    stop = start + ((len(text) - start) % width or width)
    while start < len(text):
        rows = torch.tensor([text[start:stop]], device=model.device)
        yield from model.forward(rows, [range(-1, stop - start - 1)], cache).logits[0]
        cache.commit([range(stop - start)])
        start, stop = stop, stop + width


def _never_parted(token: int, first: int, one: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> bool:
    gaps = [[float(row[token]) - float(row[first]) for row in rows] for rows in (one, *others)]
    return all(gap == gaps[0] for gap in gaps)


def _plausible(dtype: torch.dtype, largest: float) -> float:
    """A generous bound on rounding, to tell it from a model whose passes disagree.

    Measured on the default model: 2 spacings of the largest logit in bfloat16, 20 in float32. In float64 there are
    jumps of half a float32 spacing, as norms are float32 in every dtype. The bound is 16 and 256 float32 ones.
    """
    return (16 * torch.finfo(dtype).eps + 256 * torch.finfo(torch.float32).eps) * largest


def figures(place: Place, tokens: Sequence[int]) -> dict[str, Any]:
    """The fields of a `divergence.Divergence` that come from the place."""
    return {
        "readings": place.readings,
        "short": tuple(place.scale.short(place.read, token) for token in tokens),
        "noise": place.noise,
        "noise_here": place.noise_here,
        "noise_logits": place.noise_logits,
        "threshold": place.threshold,
        "places": place.places,
    }
