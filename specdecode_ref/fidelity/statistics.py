"""The statistics that a sampled law is judged by: pure functions of counts and laws, valid at every sample size.

A law is a mapping from cells (token sequences) to probabilities, counts are a mapping from cells to how often they
came. `Gate` puts the two together. Nothing here is an approximation that holds "for large n": the thresholds are
finite-sample bounds, so that a false alarm at alpha = 1e-9 is as rare as it says. Optional stopping is in `betting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specdecode_ref.errors import InputError

ALPHA = 1e-9
"""The false alarm rate of an assertion."""

POWER = 0.999
"""How surely the computed number of samples shows a wrong law."""

Counts = Mapping[Any, int]
Masses = Mapping[Any, float]


def g_statistic(counts: Counts, law: Masses) -> float:
    """G = 2 N KL(empirical || law), in nats; infinite where a cell of mass 0 was hit.

    >>> round(g_statistic({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5}), 3)
    4.027
    """
    cells = list(law.keys() | counts.keys())
    seen, mass = (np.array([source.get(cell, 0) for cell in cells], dtype=np.float64) for source in (counts, law))
    return float(g_statistics(seen, mass))


def g_statistics(counts: np.ndarray, law: np.ndarray) -> np.ndarray:
    """G of many samples at once: counts [..., k], law [k] -> [...]."""
    n = counts.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(counts > 0, counts * np.log(counts / (n * law)), 0.0)
    # Exact counts give rounding below zero, which is not a statistic.
    return np.asarray(np.maximum(2 * terms.sum(-1), 0.0))


def critical_g(cells: int, alpha: float = ALPHA) -> float:
    """The G that a right sampler exceeds with probability at most alpha, at any n; `cells` counts those of mass > 0.

    With x = G / 2 > k - 1: P(n KL >= x) <= exp(-x) (e x / (k - 1))^(k - 1) (Agrawal, arXiv 1904.02291, theorem 1.2).
    """
    _require_level(alpha)
    if cells < 1:
        raise InputError("a law of at least one cell", cells, "count the cells of positive mass")
    k = cells - 1
    if k == 0:
        return 0.0
    return 2 * _root(lambda x: -x + k * (1 + math.log(x / k)) - math.log(alpha), float(k))


def weissman_radius(n: int, cells: int, alpha: float = ALPHA) -> float:
    """The total variation of n samples from their law that is exceeded with probability at most alpha.

    P(L1 >= eps) <= (2^k - 2) exp(-n eps^2 / 2), and TV = L1 / 2 (Weissman et al., HPL-2003-97, theorem 2.1).
    """
    _require_level(alpha)
    if cells < 2:
        return 0.0
    if n < 1:
        return 1.0
    log_sets = cells * math.log(2) + math.log1p(-(2.0 ** (1 - cells)))
    return min(1.0, math.sqrt(2 * (log_sets - math.log(alpha)) / n) / 2)


def mean_radius(n: int, mean: float, largest: float, alpha: float = ALPHA) -> float:
    """How far the average of n values in [0, largest] lies from their `mean`, but for probability alpha, both sides.

    Bernstein's inequality; the variance is at most mean (largest - mean) (Bhatia and Davis, 2000).
    """
    _require_level(alpha)
    variance, spread = max(mean * (largest - mean), 0.0), max(mean, largest - mean)
    log = math.log(2 / alpha)
    return (spread * log / 3 + math.sqrt((spread * log / 3) ** 2 + 2 * n * variance * log)) / n


def samples_needed(law: Masses, wrong: Masses, alpha: float = ALPHA, power: float = POWER) -> float:
    """How many samples of `wrong` are enough for the G gate of `law` to reject with that power; inf if they are equal.

    A guarantee, not an estimate. G = 2 N KL(empirical || law) is at least 2 sum_i log(wrong(x_i) / law(x_i)), since
    the rest is 2 N KL(empirical || wrong) >= 0, so Chernoff's bound on that sum gives, for every t in (0, 1),

        P(G <= c) <= exp(t c / 2) M(t)^N,    M(t) = sum_x wrong(x)^(1 - t) law(x)^t.

    The smallest N over t is returned. It is above what simulation finds, by a tenth to a third as a rule.
    """
    if not 0 < power < 1:
        raise InputError("a power between 0 and 1", power, "use 0.999")
    pairs = [(wrong[cell], law.get(cell, 0.0)) for cell in wrong if wrong[cell] > 0]
    # Sorted, so that laws that are equal as mappings give the same number to the last bit.
    w, p = (np.array(column) for column in zip(*sorted(pairs), strict=True))
    if np.abs(w - p).sum() < 1e-12 and len(w) == sum(mass > 0 for mass in law.values()):
        return math.inf
    half = critical_g(sum(mass > 0 for mass in law.values()), alpha) / 2
    w, p = w[p > 0], p[p > 0]
    if len(w) == 0:
        return 1.0

    def needed(t: float) -> float:
        rate = -math.log(float((w ** (1 - t) * p**t).sum()))
        return (t * half - math.log1p(-power)) / rate if rate > 0 else math.inf

    return float(math.ceil(_smallest(needed)))


def _smallest(f: Callable[[float], float]) -> float:
    """The smallest value of f on (0, 1): a grid, refined around its best point."""
    low, high = 0.0, 1.0
    best = math.inf
    for _ in range(6):
        grid = np.linspace(low, high, 34)[1:-1]
        values = [f(float(t)) for t in grid]
        at = int(np.argmin(values))
        best = min(best, values[at])
        step = float(grid[1] - grid[0])
        low, high = max(0.0, float(grid[at]) - step), min(1.0, float(grid[at]) + step)
    return best


def _root(f: Callable[[float], float], low: float) -> float:
    """Where the falling f crosses zero, right of `low`: the upper end of the last bracket."""
    high = 2 * low + 1
    while f(high) > 0:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return high


def _require_level(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise InputError("an alpha between 0 and 1", alpha, "use 1e-9 for an assertion")


class Cell(NamedTuple):
    """One outcome: how often it came, and how often it was owed."""

    cell: Hashable
    seen: int
    owed: float


@dataclass(frozen=True)
class Gate:
    """Gate 1: the verdict of G on one sample. `str` gives the report.

    tv:     of the sample from the law; `radius`: what a right sampler stays below, but for alpha.
    worst:  the five cells that add most to the distance.
    """

    statistic: float
    threshold: float
    n: int
    cells: int
    tv: float
    radius: float
    worst: tuple[Cell, ...]
    alpha: float = ALPHA

    @property
    def rejects(self) -> bool:
        """True where the sample cannot have this law, but for probability alpha."""
        return self.statistic > self.threshold

    def __str__(self) -> str:
        sign = ">" if self.rejects else "<="
        lines = [
            f"G = {self.statistic:.1f} {sign} {self.threshold:.1f} (n = {self.n}, {self.cells} cells, "
            f"alpha = {self.alpha:g})",
            f"total variation {self.tv:.4f}, radius {self.radius:.4f}",
            *(f"  {cell.cell}: seen {cell.seen}, owed {cell.owed:.1f}" for cell in self.worst),
        ]
        return "\n".join(lines)


def gate(counts: Counts, law: Masses, alpha: float = ALPHA) -> Gate:
    """Judge a sample by its law."""
    n = sum(counts.values())
    cells = [Cell(cell, counts.get(cell, 0), n * law.get(cell, 0.0)) for cell in law.keys() | counts.keys()]
    # Cells of mass 0 that were hit come first: one of them is proof enough. Ties in the order of their names.
    cells.sort(key=lambda c: (not (c.seen and not c.owed), -abs(c.seen - c.owed), str(c.cell)))
    support = sum(mass > 0 for mass in law.values())
    tv = sum(abs(c.seen - c.owed) for c in cells) / (2 * n) if n else 0.0
    return Gate(
        g_statistic(counts, law),
        critical_g(support, alpha),
        n,
        support,
        tv,
        weissman_radius(n, support, alpha),
        tuple(cells[:5]),
        alpha,
    )
