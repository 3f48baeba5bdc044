"""The catalogue of known bugs, as patches to this package's own source.

The reference has no switches: a mutant is text that replaces text, in a private copy. Each must be caught by the check
that its entry names; the changes that are lossless must not. The exact distance of a mutant's law is computed, never
copied, on table models whose p and q depend on the context.
"""

from __future__ import annotations

import difflib
import tomllib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specdecode_ref.errors import UnknownNameError
from specdecode_ref.fidelity.private import Package, planted


@dataclass(frozen=True)
class Mutant:
    """One change to the source.

    story:    what goes wrong and why it looks right, in two sentences.
    seen_in:  the public thread where it was met.
    file:     relative to the package; `old` stands in it exactly once.
    rung:     the check of `suite` that catches it; none for lossless ones.
    law:      the law of `suite.LAWS` that it distorts; none where only states or single coins show it.
    tv:       how far it moves that law: the total variation on the table models of seed 0.
    lossless: true for changes that keep the output law.
    """

    id: str
    title: str
    story: str
    seen_in: str
    file: str
    old: str
    new: str
    rung: str | None = None
    law: str | None = None
    tv: float | None = None
    lossless: bool = False

    def plant(self) -> AbstractContextManager[Package]:
        """A private copy of the package with this change. Raises InputError when the patch no longer applies."""
        return planted(self.file, self.old, self.new)

    def diff(self) -> str:
        """The change as a unified diff of the package's source."""
        source = (Path(__file__).parents[1] / self.file).read_text(encoding="utf-8")
        changed = source.replace(self.old, self.new)
        names = f"a/{self.file}", f"b/{self.file}"
        return "".join(difflib.unified_diff(source.splitlines(True), changed.splitlines(True), *names))


@cache
def catalogue() -> dict[str, Mutant]:
    """All mutants by id, the lossless ones last."""
    text = Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8")
    return {entry["id"]: Mutant(**entry) for entry in tomllib.loads(text)["mutant"]}


def get(name: str) -> Mutant:
    """The mutant of that id."""
    if name not in catalogue():
        raise UnknownNameError(f"a mutant out of {', '.join(catalogue())}", repr(name), "choose one of them")
    return catalogue()[name]
