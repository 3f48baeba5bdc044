"""Rung R2: the real decode loop, sampled, against the exact law of what it should write.

What is sampled is one of `configurations`. A sample passes three gates, each wrong at most once in 10^9: G, the bets,
and the acceptance, which must be what theory says even where the law could not show it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from specdecode_ref.fidelity.betting import NONE_KNOWN, Bets
from specdecode_ref.fidelity.loop import Setup
from specdecode_ref.fidelity.private import Package
from specdecode_ref.fidelity.sampled.configurations import Configuration
from specdecode_ref.fidelity.statistics import ALPHA, Gate, gate, mean_radius

BATCH = 512
"""Generations in one session, and between two looks at the bets."""


@dataclass(frozen=True)
class Sample:
    """counts: how often each output came. accepted: drafted tokens that were accepted, in all generations."""

    counts: Mapping[tuple[int, ...], int]
    accepted: int


def sample(setup: Setup, n: int, seed: int, first: int = 0) -> Sample:
    """n generations of the real loop, as sequences first, first + 1, ... of that seed."""
    session = setup.session(
        setup.model,
        [setup.prompt] * n,
        setup.drafter,
        verifier=setup.verifier,
        rule=setup.rule,
        seed=seed,
        sequences=range(first, first + n),
        max_new_tokens=setup.new_tokens,
        level=0,
    )
    accepted = 0
    for step in session:
        accepted += min(len(step.round.path) - 1, step.round.kept)
    start = len(setup.prompt)
    return Sample(Counter(tuple(row.tokens[start:]) for row in session._rows), accepted)


@dataclass(frozen=True)
class Outcome:
    """What the gates say of a sample. `str` is the report.

    gate:     G, at the end. bets: the wealth after every batch.
    accepted: drafted tokens accepted per generation, measured; expected: by theory, within `radius`.
    """

    configuration: Configuration
    seed: int
    gate: Gate
    bets: Bets
    accepted: float
    expected: float
    radius: float

    @property
    def lossless(self) -> bool:
        """Whether the sample may have the target's law."""
        return not self.gate.rejects and not self.bets.rejects()

    @property
    def accepts_as_expected(self) -> bool:
        """The second oracle: what keeps the law may still be another algorithm, or a slower one."""
        return abs(self.accepted - self.expected) <= self.radius

    @property
    def passes(self) -> bool:
        """Both oracles."""
        return self.lossless and self.accepts_as_expected

    def __str__(self) -> str:
        wealth = self.bets.peak / math.log(10)
        lines = [
            f"{self.configuration}, seed {self.seed}: {'passes' if self.passes else 'REJECTED'}",
            str(self.gate),
            f"wealth 10^{wealth:.1f} {'>=' if self.bets.rejects() else '<'} 10^9",
            f"accepted {self.accepted:.4f} a generation, expected {self.expected:.4f} within {self.radius:.4f}",
        ]
        if not self.lossless:
            lines.append(f"best-fitting bug: {self.best_fit}")
        return "\n  ".join("\n".join(lines).split("\n"))

    @cached_property
    def best_fit(self) -> str:
        """The known bug that fits best, the verifiers' first; takes some seconds."""
        for laws in (self.configuration.known, self.configuration.known_elsewhere):
            if (name := replace(self.bets, known=laws).best_fit()) != NONE_KNOWN:
                return name
        return NONE_KNOWN


@dataclass(frozen=True)
class Tally:
    """Samples as they come in. known: bet on the catalogue's laws too, which takes some seconds to begin with."""

    configuration: Configuration
    seed: int
    bets: Bets
    n: int = 0
    accepted: int = 0

    @classmethod
    def begin(cls, configuration: Configuration, seed: int, known: bool = False) -> Tally:
        """Nothing sampled yet."""
        return cls(configuration, seed, Bets(configuration.exact.law, configuration.known if known else {}))

    def after(self, batch: Sample) -> Tally:
        """With one more batch; every batch is a look at the bets."""
        return replace(
            self,
            bets=self.bets.after(batch.counts),
            n=self.n + sum(batch.counts.values()),
            accepted=self.accepted + batch.accepted,
        )

    @property
    def outcome(self) -> Outcome:
        """What the gates say now. Only the bets may be asked again and again; the others are for the end."""
        exact = self.configuration.exact
        return Outcome(
            self.configuration,
            self.seed,
            gate(self.bets.counts, exact.law),
            self.bets,
            self.accepted / self.n,
            exact.accepted,
            mean_radius(self.n, exact.accepted, self.configuration.length - 1, ALPHA),
        )


def check(
    configuration: Configuration, n: int, seed: int, *, package: Package | None = None, known: bool = False
) -> Outcome:
    """Sample n generations, of this package or a private copy, and judge them. Stops early once the bets are won."""
    setup, tally = configuration.setup(package), Tally.begin(configuration, seed, known)
    while tally.n < n and not tally.bets.rejects():
        tally = tally.after(sample(setup, min(BATCH, n - tally.n), seed, first=tally.n))
    return tally.outcome
