"""Files that appear whole or not at all, however their writing ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Another name in the same folder to write to; at the end that file takes the place of `path` in one step.

    After an exception, an interrupt among them, `path` is what it was before and nothing is left beside it.
    """
    part = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    try:
        yield part
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
