"""D: coins and laws at the edge of float64. The fixtures are in the package, so that foreign code can be asked too."""

from __future__ import annotations

import pytest

from specdecode_ref.fidelity.boundaries import FIXTURES
from specdecode_ref.fidelity.private import Package


@pytest.mark.parametrize("fixture", FIXTURES)
def test_boundary(fixture: str) -> None:
    FIXTURES[fixture](Package())
