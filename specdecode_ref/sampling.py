"""From logits to a law, and from a law and a coin to a token.

Target and draft use the same pure functions, so that "the law" means one thing everywhere. A law is a float64 tensor
[V] that sums to one. Start with `SamplingRule`, then `law`, then `pick`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdecode_ref.errors import InputError, NumericalError

Order = Literal["transformers", "vllm"]

_COLDEST = 1e-300
"""Colder than this, a division by the temperature could overflow; the law is a point mass long before."""

_SMALLEST_MASS = torch.finfo(torch.float64).tiny
"""Below the normal numbers, u * total could round up to the total."""


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Everything that turns logits into the law a token is drawn from. The default changes nothing.

    temperature:        0 is greedy: all mass on the first maximum.
    top_k:              keep the k largest logits, and what ties with the last of them; 0 keeps all.
    top_p:              keep the fewest tokens whose mass reaches top_p, in (0, 1].
    min_p:              keep tokens with at least min_p times the largest probability.
    repetition_penalty: logits of tokens seen in prompt or output are divided by it (multiplied, where negative).
    presence_penalty, frequency_penalty: subtracted from a token's logit if it is in the output / each time it is.
    logit_bias:         (token, bias) pairs, added to logits.
    bad_words:          token sequences that must not be completed; in vLLM's order only output can be their beginning.
    min_new_tokens:     `eos` is forbidden until the output has so many tokens.
    eos:                tokens that end the text.
    order:              the order the rules apply in, `transformers`' or vLLM's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    order: Order = "transformers"

    def __post_init__(self) -> None:
        _require(
            0 <= self.temperature < math.inf,
            "a temperature of 0 or more",
            self.temperature,
            "use 0 for greedy",
        )
        _require(
            isinstance(self.top_k, int) and self.top_k >= 0,
            "a whole top_k of 0 or more",
            self.top_k,
            "use 0 to keep all tokens",
        )
        _require(0 < self.top_p <= 1, "top_p above 0 and at most 1", self.top_p, "use 1 to keep all tokens")
        _require(0 <= self.min_p <= 1, "min_p from 0 to 1", self.min_p, "use 0 to keep all tokens")
        _require(
            0 < self.repetition_penalty < math.inf,
            "a repetition_penalty above 0",
            self.repetition_penalty,
            "use 1 for none",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(math.isfinite(value), f"a finite {name}", value, "use 0 for none")
        _require(
            all(math.isfinite(bias) for _, bias in self.logit_bias),
            "logit_bias pairs (token, finite bias)",
            self.logit_bias,
            "use bad_words to forbid a token",
        )
        _require(all(self.bad_words), "bad words of at least one token", self.bad_words, "drop the empty ones")
        _require(self.min_new_tokens >= 0, "min_new_tokens of 0 or more", self.min_new_tokens, "use 0 for none")
        _require(self.order in _ORDERS, f"an order out of {', '.join(_ORDERS)}", self.order, "choose one of them")
        self.require_tokens_below(math.inf)

    def require_tokens_below(self, vocab_size: float) -> None:
        """Raises InputError where the rule names a token that a vocabulary of that size does not have."""
        for name, tokens in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("bad_words", [token for word in self.bad_words for token in word]),
            ("eos", self.eos),
        ):
            _require(
                all(0 <= token < vocab_size for token in tokens),
                f"{name} tokens from 0 to {vocab_size - 1}" if vocab_size < math.inf else f"{name} tokens of 0 or more",
                tokens,
                "use the model's own tokens",
            )


def _require(holds: bool, expected: str, came: object, do: str) -> None:
    if not holds:
        raise InputError(expected, came, do)


def law(logits: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    """The law [V], float64, of the next token.

    logits: [V], any dtype. history: all tokens before it, the prompt's `prompt_length` first.

    Raises NumericalError where the logits hold NaN or +inf, or the rules leave no token; InputError where the rule
    names a token outside the vocabulary.
    """
    ruled = scores(logits, rule, history, prompt_length)
    maximum, first = ruled.max(-1)  # the first of equal maxima
    if not math.isfinite(maximum):
        raise NumericalError("a sampling rule that leaves a token", float(maximum), "forbid fewer, or bias them less")
    if rule.temperature == 0:
        return point_mass(int(first), ruled)
    return ruled.softmax(-1)


def scores(logits: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    """The logits [V], float64, after every part of the rule but the softmax; -inf where a token is forbidden.

    Arguments and errors as in `law`.
    """
    rule.require_tokens_below(len(logits))
    out = logits.to(torch.float64, copy=True)
    if not math.isfinite(top := float(out.max())):
        raise NumericalError("logits with a finite maximum", top, "check the model's weights")
    for step in _ORDERS[rule.order]:
        out = step(out, rule, history, prompt_length)
    return out


def pick(law: Tensor, u: float) -> int:
    """The first token whose cumulative mass exceeds `u` times the total; the law need not be normalised.

    Ascending token order, float64. u is in [0, 1), so a token of mass zero is never picked.
    """
    cdf = law.to(torch.float64).cumsum(-1)
    total = float(cdf[-1])
    if not _SMALLEST_MASS <= total < math.inf:
        raise NumericalError("a law with positive, finite mass", total, "check what it was made from")
    return int(torch.searchsorted(cdf, u * total, right=True))


def point_mass(token: int, like: Tensor) -> Tensor:
    """The law [V] that always gives `token`."""
    out = torch.zeros_like(like)
    out[token] = 1.0
    return out


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) [V]: what is left to emit after a rejection; `p` itself where rounding leaves no mass.

    Raises NumericalError where either holds NaN.
    """
    return _normalised((p - q).clamp_(min=0), otherwise=p)


def without(law: Tensor, tokens: Sequence[int]) -> Tensor:
    """The law [V] given that none of `tokens` comes; unchanged where they hold all the mass."""
    if not tokens:
        return law
    out = law.clone()
    out[list(tokens)] = 0
    return _normalised(out, otherwise=law)


def _normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    total = float(mass.sum())
    if math.isnan(total):
        raise NumericalError("laws without NaN", total, "check what p and q were made from")
    return mass / total if total > 0 else otherwise


class Laws:
    """The laws after the nodes of a tree, each made on first use: most rounds never look at most of them.

    logits: [N, V]. history(i): all tokens up to and including node i, whose penalties are its own path's.
    """

    def __init__(
        self, logits: Tensor, rule: SamplingRule, history: Callable[[int], Sequence[int]], prompt_length: int
    ) -> None:
        self._logits, self._rule, self._history, self._prompt_length = logits, rule, history, prompt_length
        self._rows: dict[int, Tensor] = {}

    def __getitem__(self, node: int) -> Tensor:
        if node not in self._rows:
            self._rows[node] = law(self._logits[node], self._rule, self._history(node), self._prompt_length)
        return self._rows[node]

    def known(self, node: int) -> bool:
        """True where the law after `node` has been made already."""
        return node in self._rows


def _bias(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    for token, bias in rule.logit_bias:
        scores[token] += bias
    return scores


def _penalties(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    """Repetition (Keskar et al., CTRL, section 4.1), then presence and frequency (OpenAI's published definition)."""
    if rule.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(history)), dtype=torch.int64, device=scores.device)
        old = scores[seen]
        scores[seen] = torch.where(old < 0, old * rule.repetition_penalty, old / rule.repetition_penalty)
    output = history[prompt_length:]
    if output and (rule.presence_penalty or rule.frequency_penalty):
        tokens, counts = torch.tensor(output, device=scores.device).unique(return_counts=True)
        scores[tokens] -= rule.presence_penalty + rule.frequency_penalty * counts.to(scores.dtype)
    return scores


def _bad_words(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    past = history[prompt_length:] if rule.order == "vllm" else history
    for *beginning, last in rule.bad_words:
        if len(beginning) <= len(past) and list(past[len(past) - len(beginning) :]) == beginning:
            scores[last] = -math.inf
    return scores


def _min_new_tokens(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    if rule.eos and len(history) - prompt_length < rule.min_new_tokens:
        scores[list(rule.eos)] = -math.inf
    return scores


def _temperature(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    return scores / max(rule.temperature, _COLDEST) if rule.temperature not in (0, 1) else scores


def _top_k(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    if not 0 < rule.top_k < len(scores) or rule.temperature == 0:
        return scores
    return scores.masked_fill(scores < scores.topk(rule.top_k).values[-1], -math.inf)


def _top_p(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    """Nucleus (Holtzman et al. 2020). Sorts only as many of the largest as it takes to reach the mass."""
    if rule.top_p == 1 or rule.temperature == 0:
        return scores
    p = scores.softmax(-1)
    k = 0
    while True:
        k = min(max(64, 8 * k), len(p))
        largest = p.topk(k).values
        before = largest.cumsum(0) - largest
        if k == len(p) or float(before[-1]) >= rule.top_p:
            break
    count = max(1, int((before < rule.top_p).sum()))
    kept = p >= largest[count - 1]
    surplus = int(kept.sum()) - count
    if surplus > 0:  # ties at the edge: the first ones in token order stay
        kept[(p == largest[count - 1]).nonzero()[-surplus:, 0]] = False
    return scores.masked_fill(~kept, -math.inf)


def _min_p(scores: Tensor, rule: SamplingRule, history: Sequence[int], prompt_length: int) -> Tensor:
    if rule.min_p == 0 or rule.temperature == 0:
        return scores
    p = scores.softmax(-1)
    return scores.masked_fill(p < rule.min_p * p.max(), -math.inf)


_ORDERS = {
    "transformers": (_bias, _penalties, _bad_words, _min_new_tokens, _temperature, _top_k, _top_p, _min_p),
    "vllm": (_bad_words, _min_new_tokens, _bias, _penalties, _temperature, _min_p, _top_k, _top_p),
}
