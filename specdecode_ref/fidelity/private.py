"""This package, or a private copy of it in which one piece of source text is replaced by another.

A copy lives under its own name, all its modules import each other, and nothing outside of it changes. That is how a bug
can be planted into the real source while the original goes on working beside it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType

import specdecode_ref
from specdecode_ref.errors import InputError

_ORIGINAL = specdecode_ref.__name__
_ROOT = Path(specdecode_ref.__file__).parent


class Package:
    """`package("verify.chain")` is that module: of the original, or of a copy.

    >>> Package()("tree").__name__
    'specdecode_ref.tree'
    """

    def __init__(self, name: str = _ORIGINAL) -> None:
        self.name = name

    def __call__(self, module: str) -> ModuleType:
        return import_module(f"{self.name}.{module}")


@contextmanager
def planted(file: str, old: str, new: str) -> Iterator[Package]:
    """A copy in which `old`, which must stand in `file` exactly once, is `new`; it exists until the block ends.

    Raises InputError when the patch does not apply.
    """
    source = (_ROOT / file).read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise InputError(f"text that stands once in {file}", f"{source.count(old)} times: {old!r}", "renew the patch")
    name = _free_name()
    finder = _Finder(name, {_ROOT / file: source.replace(old, new)})
    sys.meta_path.insert(0, finder)
    try:
        yield Package(name)
    finally:
        sys.meta_path.remove(finder)
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[module]


def _free_name() -> str:
    """The first name that no copy has now. A name that comes back finds most of its modules compiled."""
    taken = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    return next(name for n in count(1) if (name := f"{_ORIGINAL}_copy_{n}") not in taken)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of one copy where the original's are."""

    def __init__(self, name: str, patched: dict[Path, str]) -> None:
        self.name, self._patched = name, patched

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        head, *rest = fullname.split(".")
        if head != self.name:
            return None
        place = _ROOT.joinpath(*rest)
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not file.is_file():
            return None
        loader = _Loader(self.name, file, self._patched)
        return importlib.machinery.ModuleSpec(fullname, loader, origin=str(file), is_package=place.is_dir())


class _Loader(importlib.abc.Loader):
    """Runs a module's source, in which the package goes by the copy's name."""

    def __init__(self, name: str, file: Path, patched: dict[Path, str]) -> None:
        self._name, self._file, self._patched = name, file, patched

    def exec_module(self, module: ModuleType) -> None:
        source = self._patched.get(self._file) or self._file.read_text(encoding="utf-8")
        exec(_compiled(source, self._file, self._name), module.__dict__)


@cache
def _compiled(source: str, file: Path, name: str) -> CodeType:
    return compile(re.sub(rf"\b{_ORIGINAL}\b", name, source), str(file), "exec")
