"""The command `specdecode train`: a bar for each stage, and how to use the head in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_ref.cli import checks, screen
from specdecode_ref.cli.screen import INTERRUPTED

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "draft": {"layers": 3, "intermediate": 1280, "rate": 2e-3},
    "medusa": {"layers": 1, "intermediate": 1536, "rate": 1e-3},
    "eagle": {"layers": 1, "intermediate": 1536, "rate": 2e-3},
}
"""What each kind takes where nobody says."""


@dataclass(frozen=True)
class Request:
    """The options of `specdecode train`, as given; `settings` are those of `train.run.Order`, None where not given."""

    kind: str
    out: str
    text: str | None
    model: str
    settings: Mapping[str, Any]
    dtype: str
    device: str


def run(request: Request) -> int:
    """Train. Returns the exit code; raises SpecDecodeError for bad input."""
    from specdecode_ref.models import zoo
    from specdecode_ref.train import run as training

    out = checks.output_folder(request.out, "--out")
    text = out / "text" if request.text is None else checks.output_folder(request.text, "--text")
    given = {name: value for name, value in request.settings.items() if value is not None}
    order = training.Order(
        kind=request.kind, out=out, text=text, **{**DEFAULTS.get(request.kind, DEFAULTS["eagle"]), **given}
    )
    zoo.resolve(request.dtype, request.device)
    with screen.status(f"Loading {screen.one_line(request.model)}"):
        loaded = zoo.load(request.model, dtype=request.dtype, device=request.device)
    try:
        with screen.progress(f"train {request.kind}") as told:
            training.run(
                order, loaded, lambda stage, done, of, more: told(done / of, f"{stage} {done:,} of {of:,} {more}")
            )
    except KeyboardInterrupt:
        screen.note("interrupted; the same command goes on from the last shard or checkpoint")
        return INTERRUPTED
    drafter = "model" if request.kind == "draft" else request.kind
    print(screen.one_line(f"{out}: weights, a model card (README.md), training.json and loss.svg"))
    print(screen.one_line(f"specdecode generate 'Hello' --model {request.model} --drafter {drafter} --head {out}"))
    return 0
