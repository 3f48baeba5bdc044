"""The user's cache folder: each GGUF is converted once, whole or not at all, and checked before it is used again.

A conversion is built in a folder of its own and moved into place by one rename, so that a crash, a full disk or a
second process leaves either a finished model or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdecode_ref.errors import ModelError

VERSION = 1
"""Raised when a conversion would give other files than before; older ones are then made anew."""

MANIFEST = "manifest.json"


def cache_folder() -> Path:
    """Where converted models live: `SPECDECODE_CACHE`, else ~/.cache/specdecode-ref."""
    chosen = os.environ.get("SPECDECODE_CACHE")
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "specdecode-ref"
    except RuntimeError as error:
        raise ModelError("a cache folder", f"{chosen or '~'} ({error})", "set SPECDECODE_CACHE to a folder") from error


def converted(source: Path, name: str, convert: Callable[[Path, Path], None]) -> tuple[Path, str]:
    """The folder that `convert(source, folder)` filled, now or earlier, and the SHA-256 of the source.

    It is made anew when the source has changed, or when a file in it is not the one that was written. Raises ModelError
    when the cache folder cannot be written.
    """
    digest = sha256(source)
    target = cache_folder() / "models" / f"{name}-{digest[:12]}-v{VERSION}"
    if is_whole(target):
        return target, digest
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            convert(source, made)
            _seal(made, source, digest)
            _move(made, target, Path(scratch))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        do = "set SPECDECODE_CACHE to a folder that can be written"
        raise ModelError("a cache folder that can be written", f"{cache_folder()} ({reason})", do) from error
    return target, digest


def is_whole(folder: Path) -> bool:
    """Whether every file of a conversion is the one that was written.

    A file whose size and time are those noted is taken as it is; any other is hashed.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return len(files) > 0 and all(_same(folder / name, note) for name, note in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _same(path: Path, note: dict[str, Any]) -> bool:
    found = path.stat()
    if found.st_size != note["size"]:
        return False
    return found.st_mtime_ns == note["mtime_ns"] or sha256(path) == note["sha256"]


def _seal(folder: Path, source: Path, digest: str) -> None:
    """Note what was written, last of all: a folder without this note is not a finished conversion."""
    files = {
        path.name: {"size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    note = {"source": source.name, "sha256": digest, "files": files}
    (folder / MANIFEST).write_text(json.dumps(note, indent=1))


def _move(made: Path, target: Path, scratch: Path) -> None:
    """Put the finished folder in place; another process may have been quicker, and then its folder stays."""
    if target.exists() and not is_whole(target):
        os.replace(target, scratch / "damaged")
    try:
        os.replace(made, target)
    except OSError:
        if not is_whole(target):
            raise
    shutil.rmtree(scratch / "damaged", ignore_errors=True)
