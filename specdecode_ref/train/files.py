"""Files of a training run appear whole or not at all, and a full disk is one clear line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from specdecode_ref.errors import ModelError
from specdecode_ref.whole_file import whole_file

DO = "make room or choose another folder; the same command goes on from what is whole"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write safetensors with that metadata. Raises ModelError where that fails."""
    from safetensors.torch import save_file

    with _whole(path) as part:
        save_file(dict(tensors), part, metadata=dict(about or {}))


def save_text(path: Path, text: str) -> None:
    """Write a text in UTF-8. Raises ModelError where that fails."""
    with _whole(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Another name to write to; the file gets its own once it is complete."""
    from safetensors import SafetensorError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            yield part
    except (OSError, SafetensorError) as error:  # the library reports a full disk as an error of its own
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"room for {path}", reason, DO) from None
