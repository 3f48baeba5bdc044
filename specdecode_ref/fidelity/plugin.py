"""The pytest plugin: a fixture `assert_lossless`, for the tests of people who write verifiers.

    def test_my_verifier(assert_lossless):
        assert_lossless(my_verify, kind="chain")

It is loaded in every run of pytest where this package is installed, so it imports nothing until the fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def pytest_configure(config: Any) -> None:
    """Makes the fixture known."""
    import pytest

    class Fixtures:
        @pytest.fixture(scope="session")
        def assert_lossless(self) -> Callable[..., Any]:
            """`specdecode_ref.fidelity.conformance.assert_lossless`: fails with the whole report unless lossless."""
            from specdecode_ref.fidelity.conformance import assert_lossless

            return assert_lossless

    config.pluginmanager.register(Fixtures(), "specdecode-fixtures")
