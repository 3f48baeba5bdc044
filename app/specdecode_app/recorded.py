"""The traces that ship with the app: recordings of the embedded default, drawn before any model is loaded.

How they were recorded, and the commands that record them again, is in `traces/README.md`.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "traces"


def names() -> list[str]:
    """The recordings, by name."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def path(name: str) -> Path:
    """The file of a recording; `name` is one of `names`."""
    return FOLDER / f"{name}.jsonl"
