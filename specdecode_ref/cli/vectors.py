"""`specdecode vectors`: write the test vectors, and check a program's answers to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specdecode_ref.cli import checks, screen
from specdecode_ref.errors import InputError
from specdecode_ref.whole_file import whole_file

if TYPE_CHECKING:
    from specdecode_ref.fidelity.vectors import Report, Tally


def write(path: str | None) -> int:
    """Make the vectors anew, into a file or to standard output."""
    from specdecode_ref.fidelity.vectors import making

    target = checks.output_file(path, "FILE")
    text = making.text()
    if target is None:
        print(text, end="")
        return 0
    try:
        with whole_file(target) as part:
            part.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        why = f"{target}: {error.strerror or error}"[:200]
        raise InputError("a place to write the vectors", why, "choose another folder") from None
    return 0


def check(path: str, against: str | None, verifiers: Sequence[str], float32: bool, as_json: bool) -> int:
    """Print how the answers compare; 0 when all are right, 1 otherwise."""
    from specdecode_ref.fidelity import vectors
    from specdecode_ref.fidelity.vectors import file

    due = vectors.cases() if against is None else file.read_cases(against)
    report = vectors.check(file.read_answers(path), against=due, verifiers=verifiers, float32=float32)
    if as_json:
        print(json.dumps(_plain(report), allow_nan=False))
    else:
        _show(report, float32)
    return 0 if report.ok else 1


def _plain(report: Report) -> dict[str, Any]:
    return {"ok": report.ok, "verifiers": {name: _numbers(tally) for name, tally in report.tallies.items()}}


def _numbers(tally: Tally) -> dict[str, Any]:
    out = {name: value for name, value in vars(tally).items() if name != "first"}
    case, came = tally.first or (None, None)
    return out | {"first": {"case": asdict(case), "came": came.told()} if case and came else None}


def _show(report: Report, float32: bool) -> None:
    from rich.table import Table

    out = screen.console()
    table = Table("verifier", "passed", *(["excused"] if float32 else []), "failed", "missing", "", box=None)
    for name, t in report.tallies.items():
        numbers = [t.passed, *([t.excused] if float32 else []), t.failed, t.missing]
        table.add_row(screen.one_line(name), *map(str, numbers), "" if t.lossless else "lossy")
    out.print(table)
    for tally in report.tallies.values():
        if tally.first:
            case, came = tally.first
            shown = asdict(case)
            lines = [f"{case.id} failed: {case.why}", f"  due  {json.dumps(shown.pop('expected'))}"]
            lines += [f"  came {json.dumps(came.told())}", f"  case {json.dumps(shown)}"]
            for line in lines:
                out.print(screen.one_line(line), soft_wrap=True)
    out.print("all right" if report.ok else "not all right")
