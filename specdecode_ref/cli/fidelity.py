"""The command `specdecode fidelity`: is this verifier lossless? It may be anyone's, the current folder's too."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdecode_ref.cli import screen
from specdecode_ref.errors import InputError, SpecDecodeError


@dataclass(frozen=True)
class Request:
    """What was asked for; the names are those of `conformance.examine`."""

    verifier: str
    batched: bool
    kind: str | None
    vocab: int
    gamma: int
    samples: int | None
    seed: int
    time_limit: float
    draws: list[str]
    json: bool


def run(request: Request) -> int:
    """Print the report: 0 lossless, 1 not or any other finding. Raises InputError for what makes no sense."""
    from specdecode_ref.fidelity import conformance

    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not request.verifier.strip():
        raise InputError("a verifier's name, or module:function", repr(request.verifier), "name one")
    with _quiet_output():
        verifier = _loaded(request.verifier)
        with screen.status("examining ..."):
            report = conformance.examine(
                verifier,
                kind=request.kind,  # type: ignore[arg-type]
                batched=request.batched,
                vocab=request.vocab,
                gamma=request.gamma,
                samples=request.samples,
                seed=request.seed,
                time_limit=request.time_limit,
                draws=request.draws or None,  # type: ignore[arg-type]
                name=request.verifier,
            )
    print(json.dumps(report.as_dict()) if request.json else screen.visible(report.text()))
    return 0 if report.lossless else 1


def _loaded(name: str) -> Any:
    """The verifier; whatever its module or a lookup in it raises is bad input."""
    from specdecode_ref.fidelity import conformance

    try:
        return conformance.load(name)
    except (KeyboardInterrupt, SpecDecodeError):
        raise
    except BaseException as error:
        came = f"{type(error).__name__} in {name!r}"[:300]
        raise InputError("a verifier that can be imported", came, "mend it, or name another") from None


@contextlib.contextmanager
def _quiet_output() -> Iterator[None]:
    """What a module writes to standard output, by print or by C code, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
