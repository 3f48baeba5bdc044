"""The draft heads that come with this package, by the name of their target. `specdecode train` made them."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from specdecode_ref.models.base import Model

HEADS = Path(str(files("specdecode_ref"))) / "heads"
"""heads/<target>/<kind>, each with its weights, configuration and model card."""


def folder(kind: str, target: Model) -> Path | None:
    """Where the head of that kind ("eagle", "medusa" or "draft") for this target lies, if there is one."""
    place = HEADS / target.name.replace("/", "--") / kind
    return place if (place / "config.json").is_file() else None


def fingerprint(folder: Path) -> str:
    """What tells the weights in a folder from others of that name: the start of their SHA-256."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:12]
