"""What all tests share: the same start for every test, one core each, no network, and what may be missing.

A test that needs something the machine lacks is skipped, and fails instead where CI is set: there, everything is
installed, and a skip would hide a hole.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

# Before torch is imported, here and in what tests start: one thread a process, as the tests run two at a time and the
# last bits of a float sum depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# Before the kernels are imported: on a CPU they run in Triton's interpreter.
os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from specdecode_ref.models.zoo import Loaded


def missing(what: str) -> NoReturn:
    """Skip this test for want of something, or fail it under CI."""
    reason = f"needs {what}"
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, which CI must have")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Global generators start equal for every test, so that the order of tests cannot matter."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def node() -> str:
    """Node's executable, which runs the animation's own tests."""
    return shutil.which("node") or missing("node")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Chromium's executable. Tests that ask for it carry the mark `browser`."""
    return shutil.which("chromium") or missing("Chromium (Debian's package chromium)")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of prompts that lies beside a checkout, not inside it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the prompts in ../shared/data")
    return folder


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The weights file of the embedded default model, which `make` installs."""
    from specdecode_ref.errors import ModelError
    from specdecode_ref.models import zoo

    try:
        return zoo.embedded()
    except ModelError:
        missing("the embedded default model (`make setup` installs it)")


@pytest.fixture(scope="session")
def smollm2(embedded: Path) -> Loaded:
    """The embedded default in float32 on the CPU, loaded once a process; nobody may change it."""
    from specdecode_ref.models import zoo

    return zoo.load("smollm2", dtype="float32", device="cpu")
