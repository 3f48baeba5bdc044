"""The layers: imports point down only, the reference stands alone, and importing it stays light.

The levels are those of the architecture: each room may import the rooms before it, in this order. Imports are read from
the source, those inside functions too, so that no code path can hide one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOMES = {
    "specdecode_ref": ROOT / "specdecode_ref",
    "specdecode_kernels": ROOT / "kernels" / "specdecode_kernels",
    "specdecode_app": ROOT / "app" / "specdecode_app",
}

LEVELS = (
    ("errors", "types", "coins", "whole_file"),
    ("sampling", "tree", "verify"),
    ("cache", "models", "drafters", "batched"),
    ("trace", "trace_file", "metrics", "stream", "sequence", "backends", "decode"),
    ("cost", "bench", "fidelity", "train", "deploy"),
    ("cli",),
)
ORDER = tuple(room for level in LEVELS for room in level)

INSIDE = {
    "verify": ("match", "chain", "tree", "block", "traversal", "kseq", "onehot", "typical", "relaxed", "lenient"),
    "models": ("base", "table", "transformer", "hf", "zoo"),
    "drafters": ("base", "shapes", "growth", "ngram", "model", "eagle", "medusa", "hybrid"),
    "train": ("prompts", "text", "corpus", "labels", "network", "recipes", "fit", "report", "run"),
}
"""Files of one room in their order. A file that is not named here may be anywhere, as long as no circle forms."""

ALWAYS_THERE = {"torch", "numpy"}
LOADED_ON_USE = {"cli": {"typer", "rich"}, "models.hf": {"transformers"}}
"""Rooms and files that no other imports at its top, and what they may therefore import at theirs."""


@dataclass(frozen=True)
class Import:
    """`source` names `target`, both as full module names; `top`: at import time; `typing`: for type checkers only."""

    source: str
    target: str
    top: bool
    typing: bool


def sources(package: str, folder: Path) -> dict[str, str]:
    """Every module of a package, by its full name; a package's own name stands for its `__init__`."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports(name: str, modules: dict[str, str]) -> Iterator[Import]:
    """What the module imports, each `from a import b` resolved to a.b where that is a module."""

    def visit(node: ast.AST, top: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, top, typing)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import; name the module in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(name, full if full in modules else node.module or "", top, typing)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, top, True)
            for child in node.orelse:
                yield from visit(child, top, typing)
        else:
            inside = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside, typing)

    yield from visit(ast.parse(modules[name]), True, False)


def room(module: str) -> str:
    """The file or folder right below `specdecode_ref` (`trace_file` counts as `trace`); empty for the package."""
    name = module.split(".")[1] if "." in module else ""
    stem = name.partition("_")[0]
    return stem if stem in ORDER else name


def on_use(module: str) -> str:
    """The entry of `LOADED_ON_USE` that a module belongs to, or nothing."""
    inner = module.partition(".")[2]
    return next((name for name in (room(module), inner) if name in LOADED_ON_USE), "")


def violations(modules: dict[str, str]) -> list[str]:
    """What breaks the layers in `specdecode_ref`, one line each."""
    strangers = {room(m) for m in modules} - {*ORDER, ""}
    found = [f"{name} has no place in the order of rooms: give it one" for name in sorted(strangers)]
    edges = [edge for name in modules for edge in imports(name, modules)]
    for edge in edges:
        found += [f"{edge.source} -> {edge.target}: {why}" for why in complaints(edge)]
    graph = {m: {e.target for e in edges if e.source == m and not e.typing} & modules.keys() for m in modules}
    try:
        TopologicalSorter({m: below - {"specdecode_ref"} for m, below in graph.items()}).prepare()
    except CycleError as circle:
        found.append("a circle: " + " -> ".join(reversed(circle.args[1])))
    return found


def complaints(edge: Import) -> Iterator[str]:
    """Why one import of `specdecode_ref` is not allowed."""
    package = edge.target.partition(".")[0]
    here, there = room(edge.source), room(edge.target)
    if package in ("specdecode_kernels", "specdecode_app"):
        yield "the reference knows neither its kernels nor its app"
    elif package != "specdecode_ref":
        mine = LOADED_ON_USE.get(on_use(edge.source), set())
        allowed = ALWAYS_THERE | mine | sys.stdlib_module_names
        if edge.top and not edge.typing and package not in allowed:
            yield "import it inside the function that needs it"
    elif on_use(edge.target) and on_use(edge.source) != on_use(edge.target) and edge.top and not edge.typing:
        yield "this room is imported on use only"
    elif here not in ORDER or there not in ORDER:
        pass  # the package itself only re-exports, and a stranger is already reported
    elif ORDER.index(there) > ORDER.index(here):
        yield "imports point down only"
    elif here == there and not edge.typing:
        order = INSIDE.get(here, ())
        ours, theirs = edge.source.rpartition(".")[2], edge.target.rpartition(".")[2]
        if ours in order and theirs in order and order.index(theirs) > order.index(ours):
            yield f"within {here} the order is {', '.join(order)}"


def test_the_reference_keeps_its_layers() -> None:
    assert violations(sources("specdecode_ref", HOMES["specdecode_ref"])) == []


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        ({"coins": "from specdecode_ref.tree import DraftTree"}, "imports point down only"),
        ({"coins": "def f():\n    import specdecode_ref.tree"}, "imports point down only"),
        ({"tree": "from specdecode_ref import verify", "verify": ""}, "imports point down only"),
        ({"errors": "if TYPE_CHECKING:\n    from specdecode_ref.types import Test"}, "imports point down only"),
        ({"models.base": "from specdecode_ref.models import zoo", "models.zoo": ""}, "within models the order"),
        ({"verify.a": "import specdecode_ref.verify.b", "verify.b": "import specdecode_ref.verify.a"}, "a circle"),
        ({"decode": "def f():\n    from specdecode_kernels import verify"}, "neither its kernels nor its app"),
        ({"trace": "import pydantic"}, "inside the function"),
        ({"trace": "try:\n    import pydantic\nexcept ImportError:\n    pass"}, "inside the function"),
        ({"cost": "from specdecode_ref import cli_bench", "cli_bench": "import rich"}, "on use only"),
        ({"helpers": ""}, "no place in the order"),
    ],
)
def test_a_planted_violation_is_seen(planted: dict[str, str], complaint: str) -> None:
    clean = {"specdecode_ref": "", "specdecode_ref.tree": "import torch", "specdecode_ref.types": "import json"}
    assert violations(clean) == []
    found = violations(clean | {f"specdecode_ref.{name}": text for name, text in planted.items()})
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize("package", ["specdecode_kernels", "specdecode_app"])
def test_kernels_and_app_do_not_know_each_other(package: str) -> None:
    modules = sources(package, HOMES[package])
    targets = {edge.target.partition(".")[0] for name in modules for edge in imports(name, modules)}
    assert targets & (HOMES.keys() - {"specdecode_ref", package}) == set()


HEAVY = [
    "torch",
    "transformers",
    "gguf",
    "tokenizers",
    "safetensors",
    "jinja2",
    "pydantic",
    "streamlit",
    "typer",
    "rich",
]


@pytest.mark.parametrize(
    ("statement", "light"),
    [
        ("import specdecode_ref", HEAVY),
        ("import specdecode_ref.trace", HEAVY),
        ("import specdecode_ref.decode", HEAVY[1:]),
    ],
)
def test_importing_loads_nothing_heavy(statement: str, light: list[str]) -> None:
    code = f"import sys; {statement}; print(*sorted({set(light)} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == []
