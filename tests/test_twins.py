"""Every function that the reference has for batches has a kernel of its name, and takes the same arguments in order."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import specdecode_ref.batched

NO_TWIN = {"records": "records, not functions", "verify.draft_tree": "makes a record of the host"}
"""What stands in `specdecode_ref.batched` and needs no kernel."""


def functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions that a module defines, whatever Triton may have wrapped them in."""
    found = {name: value for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"}
    return {name: value for name, value in found.items() if value.__module__ == module.__name__}


def mirrored() -> list[str]:
    names = [m.name for m in pkgutil.iter_modules(specdecode_ref.batched.__path__) if m.name not in NO_TWIN]
    found = [
        f"{name}.{function}"
        for name in names
        for function in functions(importlib.import_module(f"specdecode_ref.batched.{name}"))
    ]
    return [name for name in found if name not in NO_TWIN]


def difference(reference: Callable[..., Any], twin: Callable[..., Any]) -> str | None:
    """What differs between two signatures, defaults and types included; None where nothing does."""
    ours, theirs = (inspect.signature(f).parameters for f in (reference, twin))
    for a, b in zip(ours.values(), theirs.values(), strict=False):
        if str(a) != str(b):
            return f"{a} is {b}"
    return None if len(ours) == len(theirs) else f"{list(ours)} are {list(theirs)}"


@pytest.mark.parametrize("name", mirrored())
def test_a_kernel_takes_what_its_reference_takes(name: str) -> None:
    pytest.importorskip("triton", reason="Triton runs on Linux only")
    module, function = name.split(".")
    twin = getattr(importlib.import_module(f"specdecode_kernels.{module}"), function, None)
    assert twin is not None, f"specdecode_kernels.{module} has no {function}"
    assert difference(getattr(importlib.import_module(f"specdecode_ref.batched.{module}"), function), twin) is None


def test_there_are_twins_to_compare() -> None:
    assert {"verify.verify_chain", "verify.verify_tree", "sampling.pick", "tree_attention.tree_attention"} <= {
        *mirrored()
    }


def test_a_difference_is_seen() -> None:
    def reference(a: int, b: int) -> None: ...
    def swapped(b: int, a: int) -> None: ...
    def shorter(a: int) -> None: ...
    def defaulted(a: int, b: int = 1) -> None: ...

    assert difference(reference, reference) is None
    assert all(difference(reference, other) for other in (swapped, shorter, defaulted))
