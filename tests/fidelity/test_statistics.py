"""The gates' own proof: bounds held against exact tails and simulation, power against simulation."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binom, chi2

from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.statistics import (
    critical_g,
    g_statistic,
    g_statistics,
    gate,
    mean_radius,
    samples_needed,
    weissman_radius,
)

P = {"a": 0.5, "b": 0.3, "c": 0.2}
WRONG = {"a": 0.35, "b": 0.39, "c": 0.26}
"""What sampling from p after a rejection emits, for q = (.2, .5, .3)."""


def test_g_is_twice_n_times_the_divergence() -> None:
    assert g_statistic({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5}) == pytest.approx(
        2 * (60 * math.log(1.2) + 40 * math.log(0.8))
    )
    assert g_statistic({"a": 5, "b": 3, "c": 2}, P) == pytest.approx(0)
    assert g_statistic({}, P) == 0
    assert g_statistic({"a": 10}, P) == pytest.approx(20 * math.log(2))


@pytest.mark.parametrize("law", [P, {**P, "d": 0.0}])
def test_a_sample_that_the_law_excludes_is_infinitely_wrong(law: dict[str, float]) -> None:
    counts = {"a": 500_000, "b": 300_000, "c": 200_000, "d": 1}
    assert g_statistic(counts, law) == math.inf
    assert gate(counts, law).rejects
    assert gate(counts, law).worst[0].cell == "d"


def test_the_critical_g_of_125_cells() -> None:
    assert critical_g(125, 1e-9) == pytest.approx(420, abs=0.5)
    assert chi2.isf(1e-9, 124) == pytest.approx(243, abs=0.5)
    assert critical_g(1) == 0 and not gate({"a": 7}, {"a": 1.0}).rejects
    assert all(a < b for a, b in pairwise(critical_g(k) for k in range(1, 40)))


@pytest.mark.parametrize("alpha", [1e-2, 1e-4, 1e-9])
@pytest.mark.parametrize(("n", "p"), [(3, 0.5), (40, 0.03), (700, 0.2), (5000, 0.001)])
def test_bounds_hold_against_the_exact_binomial(n: int, p: float, alpha: float) -> None:
    hits = np.arange(n + 1)
    chance = binom.pmf(hits, n, p)
    g = g_statistics(np.stack([hits, n - hits], -1), np.array([p, 1 - p]))
    assert chance[g > critical_g(2, alpha)].sum() <= alpha
    assert chance[np.abs(hits / n - p) > weissman_radius(n, 2, alpha)].sum() <= alpha
    assert chance[np.abs(hits / n - p) > mean_radius(n, p, 1.0, alpha)].sum() <= alpha


def test_radii() -> None:
    assert weissman_radius(1000, 4, 1e-9) == pytest.approx(math.sqrt(2 * math.log(14 / 1e-9) / 1000) / 2)
    assert weissman_radius(10, 5000) == 1.0  # 2^5000 has no float
    assert weissman_radius(0, 3) == 1.0 and weissman_radius(5, 1) == 0.0
    assert mean_radius(10**6, 0.0, 2.0) < 1e-4


CASES = {
    "three cells, uneven": (np.array([0.7, 0.2999, 0.0001]), 60),
    "even": (np.full(9, 1 / 9), 200),
    "27 cells, uneven": (np.arange(1, 28) ** 2 / (np.arange(1, 28) ** 2).sum(), 400),
    "32 cells, thin": (np.full(32, 1 / 32), 40),
}


@pytest.fixture(scope="module", params=CASES)
def replicates(request: pytest.FixtureRequest) -> tuple[int, np.ndarray]:
    """The number of cells, and G of 10^5 samples of the right law."""
    law, n = CASES[request.param]
    return len(law), g_statistics(np.random.default_rng(3).multinomial(n, law, size=100_000), law)


@pytest.mark.parametrize("alpha", [1e-2, 1e-4])
def test_calibration(replicates: tuple[int, np.ndarray], alpha: float) -> None:
    """The right law is rejected no oftener than alpha allows.

    The true rates are far below: at most 6 of these 10^5 at 1e-2, none at 1e-4. That is what a bound costs. And the
    check has teeth: the approximation by chi-square does not pass it where cells are thin.
    """
    cells, g = replicates
    allowed = binom.isf(1e-9, 100_000, alpha)
    assert (g > critical_g(cells, alpha)).sum() <= allowed
    if cells == 32 and alpha == 1e-2:
        assert (g > chi2.isf(alpha, cells - 1)).sum() > allowed


@pytest.mark.parametrize("wrong", [WRONG, {"a": 0.5, "b": 0.2, "c": 0.3}, {"a": 0.4, "b": 0.59, "c": 0.01}])
def test_the_samples_needed_are_enough_and_not_far_too_many(wrong: dict[str, float]) -> None:
    n = samples_needed(P, wrong)
    masses = [list(law.values()) for law in (P, wrong)]

    def power(n: int) -> float:
        counts = np.random.default_rng(1).multinomial(n, masses[1], size=40_000)
        return float((g_statistics(counts, np.array(masses[0])) > critical_g(3)).mean())

    assert power(int(n)) >= 0.999
    assert power(int(0.6 * n)) < 0.999


def test_the_samples_needed_at_the_ends() -> None:
    assert samples_needed(P, dict(P)) == math.inf
    assert samples_needed(P, {"d": 1.0}) == 1
    # One excluded sample is enough, and comes with a chance of a tenth: 1 - 0.9^n >= 0.999.
    assert samples_needed({"a": 1.0}, {"a": 0.9, "b": 0.1}) == math.ceil(math.log(1e-3) / math.log(0.9))
    assert samples_needed(P, WRONG, alpha=1e-4) < samples_needed(P, WRONG)
    assert samples_needed(P, WRONG, power=0.5) < samples_needed(P, WRONG)
    # A cell that never comes is seen by the others coming too often.
    assert samples_needed(P, {"a": 0.625, "b": 0.375}) < 200


def test_the_report() -> None:
    report = str(gate({"a": 350, "b": 390, "c": 260}, P))
    assert "G = 91.4 > 56.0 (n = 1000, 3 cells, alpha = 1e-09)" in report
    assert "total variation 0.1500, radius 0.1" in report
    assert "  a: seen 350, owed 500.0" in report.splitlines()[2]
    assert len(gate({(i,): 1 for i in range(20)}, {(i,): 0.05 for i in range(20)}).worst) == 5


@pytest.mark.parametrize(
    "call",
    [
        lambda: critical_g(0),
        lambda: critical_g(3, 0.0),
        lambda: weissman_radius(5, 3, 1.0),
        lambda: samples_needed(P, WRONG, power=1.0),
    ],
    ids=["no cells", "alpha 0", "alpha 1", "power 1"],
)
def test_what_makes_no_sense_is_refused(call: object) -> None:
    with pytest.raises(InputError):
        call()  # type: ignore[operator]
