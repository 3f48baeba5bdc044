"""What an examination found, for a reader and as plain values; several processes' findings joined into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdecode_ref.fidelity.conformance.state import MIXED

LOSSLESS, NOT = "lossless", "not lossless"

RUNGS = ("contract", "D", "R1", "R2", "repeat")
"""In the order in which they are tried."""

UNDECIDED = ("too slow", "refuses")
"""Findings that say less than any other."""


@dataclass(frozen=True)
class Report:
    """What an examination found.

    verdict:    "lossless", "not lossless", or the name of a finding ("raises", "hangs", "mutates its input", ...).
    detail:     the finding in a sentence.
    rung:       the first that failed: "contract", "D" (boundaries), "R1" (exact law), "R2" (samples), or "repeat".
    tv:         the largest total variation of an exact law from the target's; `bound`: how far off it may be.
    tolerance:  the largest distance that counts as rounding.
    samples, sampled_tv, radius: rung R2: sequences, their distance, and what a right sampler stays below.
    worst:      up to five sequences with what came and what was due.
    known_bug:  the known bug that this law is, or that is nearest.
    example:    the smallest input that shows the failure; `replay` asks it again.
    judged, refused, notes: the shapes of drafts that were judged, those that the verifier refuses, and remarks.
    """

    verdict: str
    detail: str = ""
    rung: str | None = None
    tv: float | None = None
    bound: float | None = None
    tolerance: float | None = None
    samples: int = 0
    sampled_tv: float | None = None
    radius: float | None = None
    worst: tuple[dict[str, Any], ...] = ()
    known_bug: str | None = None
    example: dict[str, Any] | None = None
    judged: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    laws: int = 0
    calls: int = 0
    seconds: float = 0.0
    verifier: str = ""

    @property
    def lossless(self) -> bool:
        """True for the verdict "lossless" only."""
        return self.verdict == LOSSLESS

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"lossless": self.lossless, **asdict(self)}

    def text(self) -> str:
        """The report for a reader."""
        return "\n".join(_lines(self))


def _lines(r: Report) -> list[str]:
    out = [f"{r.verifier}: {r.verdict}" + (f": {r.detail}" if r.detail else "")]
    if r.rung:
        out.append(f"first failing rung: {r.rung}")
    if r.tv is not None and (r.bound or 0) < MIXED:
        out.append(
            f"exact law: total variation {r.tv:.3g} +- {r.bound or 0:.1g} over {r.laws} laws; "
            f"up to {r.tolerance:g} counts as rounding"
        )
    if r.samples:
        out.append(f"sampled law: total variation {r.sampled_tv:.4f}, radius {r.radius:.4f}, {r.samples} sequences")
        if r.lossless and (r.tv is None or (r.bound or 0) >= MIXED):
            out.append(f"only samples could be had: a difference well below {r.radius:.4f} would not be seen")
    for cell in r.worst:
        out.append(f"  tokens {cell['tokens']}: came {cell['came']:.6g}, due {cell['due']:.6g}")
    if r.known_bug:
        out.append(f"known bug: {r.known_bug}")
    if r.example:
        out.append("smallest input found:")
        out += [f"  {name}: {value}" for name, value in r.example.items()]
    if r.judged:
        out.append(f"judged: {'; '.join(r.judged)}")
    if r.refused:
        out.append(f"refused: {'; '.join(r.refused)}")
    out += [f"note: {note}" for note in r.notes]
    out.append(f"{r.calls} calls, {r.seconds:.1f} s")
    return out


def joined(reports: Sequence[Report]) -> Report:
    """One report out of those of several processes: the first rung that failed anywhere, and the sums of the rest."""

    def gravity(r: Report) -> tuple[int, int, int, int]:
        return (r.lossless, r.verdict in UNDECIDED, RUNGS.index(r.rung) if r.rung else len(RUNGS), r.verdict != NOT)

    first = min(reports, key=gravity)
    sampled = max(reports, key=lambda r: (r.rung == "R2", r.samples > 0, r.sampled_tv or 0.0))
    return replace(
        first,
        tv=_largest(r.tv for r in reports),
        bound=_largest(r.bound for r in reports),
        tolerance=_largest(r.tolerance for r in reports),
        samples=sampled.samples,
        sampled_tv=sampled.sampled_tv,
        radius=sampled.radius,
        judged=_all(r.judged for r in reports),
        refused=_all(r.refused for r in reports),
        notes=_all(r.notes for r in reports),
        laws=sum(r.laws for r in reports),
        calls=sum(r.calls for r in reports),
    )


def _all(parts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for part in parts for value in part))


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
