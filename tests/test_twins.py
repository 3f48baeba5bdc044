"""Every function that the reference has for batches has a kernel of its name, and takes the same arguments in order."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import specdecode_ref.batched
from specdecode_ref.batched.records import Drafts, Rules
from specdecode_ref.sampling import SamplingRule

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


def nothing() -> dict[str, tuple[Any, ...]]:
    """Arguments of each function for a batch of no requests."""
    none = torch.empty(0, dtype=torch.int64)
    nodes, coins = none.view(0, 3), torch.empty(0, 3, dtype=torch.float64)
    rules = Rules.of([SamplingRule()]).select(none)
    calls: dict[str, tuple[Any, ...]] = {f"coins.{name}": (7, none, none, 3) for name in ("draft", "accept", "emits")}
    round = (torch.empty(0, 3, 5), Drafts.chains(nodes), rules, coins, coins)
    calls |= {f"verify.verify_{name}": round for name in ("chain", "block", "tree")}
    calls |= {"sampling.law": (torch.empty(0, 5), rules), "sampling.pick": (torch.empty(0, 5), rules, coins[:, 0])}
    keys = torch.empty(0, 1, 9, 64)
    attention = (torch.empty(0, 3, 2, 64), keys, keys, none, torch.empty(0, 3, 1, dtype=torch.int64))
    calls |= {"sampling.top_k": (torch.empty(0, 5), 2), "tree_attention.tree_attention": attention}
    calls |= {"tree.topology": (nodes,), "ngram.find": (nodes, none, 2, 2, 1)}
    return calls | {"cache.commit": ([keys], none, nodes, none)}


def shapes(found: Any) -> Any:
    """Those of a tensor, or of all that a record holds."""
    if found is None or isinstance(found, torch.Tensor):
        return None if found is None else found.shape
    columns = found._asdict() if isinstance(found, tuple) else vars(found)
    return {name: column.shape for name, column in columns.items()}


@pytest.mark.parametrize("name", mirrored())
def test_a_batch_of_no_requests(name: str) -> None:
    pytest.importorskip("triton", reason="Triton runs on Linux only")
    module, function = name.split(".")
    ours, theirs = (
        getattr(importlib.import_module(f"{package}.{module}"), function)(*nothing()[name])
        for package in ("specdecode_kernels", "specdecode_ref.batched")
    )
    assert shapes(ours) == shapes(theirs)


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
