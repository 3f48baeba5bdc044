"""Which known bug a wrong law looks like: the catalogue's mutants and the lossy rules, each on the same drafts.

The laws are those of one round, completed by the target, as `laws.emitted` has them; they are exact, so that a verifier
with a bug of the catalogue is recognised for certain, and any other gets the nearest one with its distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdecode_ref import verify
from specdecode_ref.fidelity import mutants
from specdecode_ref.fidelity.conformance.cases import Case
from specdecode_ref.fidelity.laws import Law, Next, emitted, sequences, tv

SAME = 1e-7
"""Laws this close are taken to be the same."""

NEAR = 1 / 3
"""A known bug is near if it is this much closer to what came than the target is."""


def known_bugs(case: Case) -> dict[str, Law]:
    """The one-round law of every known bug that shows on this case, by its name."""
    right = sequences(case.p, case.shape.depth + 1)
    laws = {name: law for name, (law,) in _laws([case])}
    return {name: law for name, law in laws.items() if tv(law, right) > SAME}


def best_fit(laws: Sequence[tuple[Case, Law]], rounding: float = 0.0) -> str | None:
    """The bug whose laws on these cases are the ones that came, up to rounding; or the nearest, where one is near."""
    if not laws:
        return None
    cases, came = [case for case, _ in laws], [law for _, law in laws]
    right = [sequences(case.p, case.shape.depth + 1) for case in cases]
    distances = {
        name: max(map(tv, came, theirs)) for name, theirs in _laws(cases) if max(map(tv, right, theirs)) > SAME
    }
    names = sorted(distances, key=lambda name: distances[name])
    same = [name for name in names if distances[name] < max(SAME, rounding)]
    if same:
        return " or ".join(same[:3])
    if names and distances[names[0]] < NEAR * max(map(tv, came, right)):
        return f"none exactly; the nearest is {names[0]}, at a total variation of {distances[names[0]]:.2g}"
    return "none of the known ones"


def _laws(cases: Sequence[Case]) -> Iterator[tuple[str, list[Law]]]:
    """Every known bug with its laws on the cases; a bug that crashes on one of them is left out."""
    for name, rule in _suspects(all(case.shape.is_chain for case in cases)):
        try:
            yield name, [_law(rule, case) for case in cases]
        except Exception:
            continue


def _law(rule: Any, case: Case) -> Law:
    def copied(after: Next) -> Next:
        return lambda tokens: after(tokens).clone()  # a bug may write into the laws

    fresh = replace(case, p=copied(case.p), q=copied(case.q))
    return emitted(rule, fresh.p, fresh.drafts(), search=True)


def _suspects(chains: bool) -> Iterator[tuple[str, Any]]:
    """The lossy rules, and the rule for these drafts with every bug of the catalogue that is one of a verifier."""
    for name, rule in verify.VERIFIERS.items():
        if not rule.lossless:
            yield f"the lossy rule '{name}'", rule
    for mutant in mutants.catalogue().values():
        if mutant.lossless or not (mutant.file.startswith("verify/") or mutant.file == "sampling.py"):
            continue
        name = Path(mutant.file).stem
        if name not in verify.VERIFIERS:
            name = "chain" if chains else "tree"
        with mutant.plant() as package:
            yield f"{mutant.id} ({mutant.title})", package("verify").get(name)
