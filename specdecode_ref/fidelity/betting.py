"""Gate 2: betting against the target's law. Whoever gets rich was right, at any time that one cares to look.

Start with 1 and bet on every sample by the odds of a wrong law: the wealth is the likelihood ratio. If the sampler is
right, wealth is a martingale, and it ever reaches 1 / alpha with probability at most alpha (Ville's inequality),
however often one looks and whatever makes one stop. `Bets` spreads the stake over laws that need not know any bug and
over the catalogue's, `known_laws`, of which it names the one that fits best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from specdecode_ref import verify
from specdecode_ref.fidelity import mutants
from specdecode_ref.fidelity.cube import Verify
from specdecode_ref.fidelity.laws import Law, Next, drafts, judged, tv
from specdecode_ref.fidelity.loop import Exact
from specdecode_ref.fidelity.statistics import ALPHA, Counts, critical_g, g_statistic
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Draw

NONE_KNOWN = "none of the known ones"
SHARES = (0.02, 0.1, 0.5)
"""How much of the uniform law is mixed into the target's: three of the laws that are bet on."""
WEIGHTS = (10.0, 100.0, 1e3, 1e4, 1e5)
"""Dirichlet(weight * law): bets on laws about 1 / sqrt(weight) away from the target's, in every direction."""


@dataclass(frozen=True)
class Bets:
    """The wealth after some samples.

    law:    the target's. known: laws of known bugs by name; any law is a valid bet, so they may be approximate.
    counts: all samples so far. peak: the largest log wealth at the looks so far, which is what Ville bounds.
    """

    law: Law
    known: Mapping[str, Law] = field(default_factory=dict)
    counts: Counts = field(default_factory=dict)
    peak: float = 0.0

    def after(self, batch: Counts) -> Bets:
        """These bets after more samples."""
        counts = dict(self.counts)
        for cell, n in batch.items():
            counts[cell] = counts.get(cell, 0) + n
        more = replace(self, counts=counts)
        return replace(more, peak=max(self.peak, more.log_wealth))

    @property
    def log_wealth(self) -> float:
        """The log of the mean likelihood ratio; infinite once a sample came that the target's law excludes."""
        if any(n > 0 and not self.law.get(cell, 0.0) > 0 for cell, n in self.counts.items()):
            return math.inf
        ratios = [*self._unknowing(), *(self._log_ratio(law) for law in self.known.values())]
        return float(np.logaddexp.reduce(ratios)) - math.log(len(ratios))

    def rejects(self, alpha: float = ALPHA) -> bool:
        """True where the wealth once was 1 / alpha or more."""
        return self.peak >= -math.log(alpha)

    def best_fit(self, alpha: float = ALPHA) -> str:
        """The known bug under which the samples are likeliest, or that there is none they could have come from."""
        n = sum(self.counts.values())
        fits = {name: self._log_likelihood(law) for name, law in self.known.items()}
        if not n or not fits or max(fits.values()) == -math.inf:
            return NONE_KNOWN
        name = max(fits, key=lambda x: fits[x])
        law = self.known[name]
        cells = sum(mass > 0 for mass in law.values())
        return name if g_statistic(self.counts, law) <= critical_g(cells, alpha) else NONE_KNOWN

    def _log_likelihood(self, law: Law) -> float:
        """Of all samples, in their order."""
        seen = [(n, law.get(cell, 0.0)) for cell, n in self.counts.items() if n]
        return sum(n * math.log(mass) for n, mass in seen) if all(mass > 0 for _, mass in seen) else -math.inf

    def _log_ratio(self, law: Law) -> float:
        return self._log_likelihood(law) - self._log_likelihood(self.law)

    def _unknowing(self) -> Iterable[float]:
        """Log likelihood ratios of laws that know no bug: mixed with the uniform, and Dirichlet mixtures over all laws.

        Dirichlet(1/2) is the mixture of Krichevsky and Trofimov (1981); its bets are good against any law at all.
        """
        support = {cell: mass for cell, mass in self.law.items() if mass > 0}
        for share in SHARES:
            yield self._log_ratio({cell: (1 - share) * m + share / len(support) for cell, m in support.items()})
        owed = self._log_likelihood(self.law)
        yield self._dirichlet(dict.fromkeys(support, 0.5)) - owed
        for weight in WEIGHTS:
            yield self._dirichlet({cell: weight * mass for cell, mass in support.items()}) - owed

    def _dirichlet(self, weights: Mapping[tuple[int, ...], float]) -> float:
        """The log probability of the samples, in their order, with the law itself drawn from Dirichlet(weights)."""
        total, n = sum(weights.values()), sum(self.counts.values())
        cells = (math.lgamma(a + self.counts.get(cell, 0)) - math.lgamma(a) for cell, a in weights.items())
        return math.lgamma(total) - math.lgamma(total + n) + sum(cells)


Propose = Callable[[tuple[int, ...]], Iterable[tuple[float, DraftTree]]]
"""The drafts that may follow some output, each with its probability."""


def played(
    verifier: Verify, target: Next, propose: Propose, length: int, eos: Sequence[int] = (), *, search: bool = False
) -> Exact:
    """The law of a whole generation, round after round, if every round goes by this verifier and these drafts.

    `loop.generated` gives the same out of the real decode loop; this knows the verifier only, and is faster.
    """
    done: dict[tuple[int, ...], Exact] = {}

    def after(output: tuple[int, ...]) -> Exact:
        if len(output) >= length or (output and output[-1] in eos):
            return Exact({output: 1.0}, 0.0, 0.0)
        if output not in done:
            done[output] = one_round(output)
        return done[output]

    def one_round(output: tuple[int, ...]) -> Exact:
        ends: Law = {}
        accepted = 0.0
        proposals = propose(output)
        for mass, draft, path, token in judged(verifier, lambda h: target((*output, *h)), proposals, search=search):
            end = _cut((*output, *(draft.tokens[i] for i in path[1:]), token), len(output), length, eos)
            ends[end] = ends.get(end, 0.0) + mass
            accepted += mass * min(len(path) - 1, len(end) - len(output))
        law: Law = {}
        rounds = 1.0
        for end, mass in ends.items():
            rest = after(end)
            rounds, accepted = rounds + mass * rest.rounds, accepted + mass * rest.accepted
            for whole, share in rest.law.items():
                law[whole] = law.get(whole, 0.0) + mass * share
        return Exact(law, rounds, accepted)

    return after(())


def _cut(tokens: tuple[int, ...], start: int, length: int, eos: Sequence[int]) -> tuple[int, ...]:
    """The output up to its first end at or after `start`."""
    ends = [i + 1 for i in range(start, len(tokens)) if tokens[i] in eos]
    return tokens[: min([length, *ends])]


def model_drafts(q: Next, draws: Sequence[Sequence[Draw]], length: int) -> Propose:
    """What a draft model proposes: `draws[d]` at depth d, no deeper than the length limit leaves room for."""

    def propose(output: tuple[int, ...]) -> Iterable[tuple[float, DraftTree]]:
        room = max(length - len(output) - 1, 0)
        return drafts(lambda history: q((*output, *history)), draws[:room])

    return propose


@lru_cache(maxsize=128)
def known_laws(
    p: Next,
    q: Next,
    draws: tuple[tuple[Draw, ...], ...],
    *,
    verifier: str | None = None,
    length: int | None = None,
    eos: tuple[int, ...] = (),
) -> Mapping[str, Law]:
    """What the bugs of the catalogue make of these laws: the law of `length` tokens by the mutant's id.

    p, q:    target and draft; kept by identity, so pass the same functions to find the answer again.
    length:  tokens of output, one more than the draft is deep unless told.
    Of all mutants those of the verifiers and of the sampling functions, and of those the ones that show here.
    """
    verifier = verifier or ("chain" if all(len(level) == 1 for level in draws) else "tree")
    length = length or len(draws) + 1
    propose = model_drafts(q, draws, length)
    right = played(verify.get(verifier), p, propose, length, eos).law
    out: dict[str, Law] = {}
    for name, mutant in mutants.catalogue().items():
        if mutant.lossless or not mutant.file.startswith(("verify/", "sampling.py")):
            continue
        try:
            with mutant.plant() as package:
                law = played(package("verify").get(verifier), p, propose, length, eos, search=True).law
        except Exception:  # a bug that crashes on these laws has none of its own
            continue
        if tv(law, right) > 1e-9:
            out[name] = law
    return out
