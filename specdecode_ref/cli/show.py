"""`specdecode trace stats` and `specdecode models`: tables of what a trace counts and of what can be loaded."""

from __future__ import annotations

import json
from typing import Any

from specdecode_ref.cli import screen
from specdecode_ref.metrics import FIGURES, Metrics
from specdecode_ref.trace import Trace
from specdecode_ref.trace_file import read_trace


def stats(file: str, names: bool, as_json: bool) -> int:
    """Print every figure of a trace, and what it is or, with `names`, what other engines call it."""
    from rich.table import Table

    trace = read_trace(file)
    found = Metrics.of(trace).as_dict()
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return 0
    out = screen.console()
    out.print(_heading(trace))
    heads = ("vLLM", "SGLang", "llama.cpp") if names else ("what it is",)
    table = Table("figure", "value", *heads, box=None, padding=(0, 2, 0, 0))
    for name, figure in FIGURES.items():
        cells = (figure.vllm, figure.sglang, figure.llama_cpp) if names else (figure.definition,)
        table.add_row(name, shown(found[name]), *(cell or "-" for cell in cells))
    for name, value in found["seconds"].items():
        table.add_row(f"seconds: {name}", shown(value))
    out.print(table)
    return 0


def models() -> int:
    """Print what can be loaded."""
    from specdecode_ref.models import zoo

    out = screen.console()
    for entry in zoo.available():
        state = "ready" if entry.ready else "missing"
        out.print(screen.one_line(f"{entry.name}: {state}; {entry.note}; {entry.source}"), soft_wrap=True)
    out.print(
        "Also: a folder with config.json, safetensors and tokenizer.json; a .gguf file; org/name from a model hub."
    )
    return 0


def shown(value: Any) -> str:
    """A figure for reading: ratios with three digits, lists with commas, "-" where there is nothing to divide by."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _heading(trace: Trace) -> str:
    h = trace.header
    drafting = ", ".join(f"{name} {value}" for name, value in h.drafting.items())
    return screen.one_line(
        f"{h.target.name}, {h.method} ({drafting or 'nothing drafted'}), verifier {h.verifier}, "
        f"temperature {h.sampling.get('temperature')}, seed {h.seed}; ended by {trace.footer.finish_reason}"
    )
