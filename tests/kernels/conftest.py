"""The kernels on a CPU: Triton's interpreter, asked for before they are imported, and a counter of bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def traffic() -> Any:
    """`with traffic(logits=logits, ...) as moved:` counts the bytes that kernels move; see `counting.py`."""
    spec = spec_from_file_location("counting", Path(__file__).with_name("counting.py"))
    assert spec and spec.loader
    counting = module_from_spec(spec)
    spec.loader.exec_module(counting)
    return counting.traffic


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN, the largest integer or True: what a kernel forgets to write shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """The interpreter patches `triton.language` at every call of a device function, also inside of a kernel, where it
    is patched already: half of all time. Here it does so once a launch."""
    from unittest.mock import patch

    import triton.language as tl
    from triton.runtime import interpreter

    real = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        fresh = any(tl.core.is_builtin(language.load) for language in languages)
        return real(fn) if fresh else interpreter._LangPatchScope()

    with patch.object(interpreter, "_patch_lang", patch_once):
        yield
