"""What a command line can get wrong, found before a model is loaded: each check returns the value or raises InputError.

Values that other rooms check themselves (the sampling rule, the seed, the prompt's length) are not checked again here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from specdecode_ref.cli import screen
from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.trace import Trace
from specdecode_ref.types import Draw

if TYPE_CHECKING:
    from specdecode_ref.drafters.shapes import Wanted


def prompt(text: str, raw: bool) -> str:
    """The prompt as it goes to the model; "-" reads it from standard input.

    Without `raw` a last newline (what `echo` adds) is dropped, and white space alone counts as empty.
    """
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise InputError("a prompt in UTF-8", str(error), "convert the text first") from None
        text = text if raw else text.removesuffix("\n")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("a prompt in UTF-8", repr(text)[:80], "convert the text first") from None
    if not (text if raw else text.strip()):
        raise InputError("a prompt of at least one character", repr(text)[:80], "type some text")
    return text


def tree(spec: str | None, gamma: int | None) -> Wanted | None:
    """The shape that was asked for, by --tree or as the length of a chain; None where neither was given."""
    from specdecode_ref.drafters import shapes

    if spec is not None and gamma is not None:
        raise InputError("--gamma or --tree", "both", "give the length of a chain or the shape of a tree")
    if gamma is not None:
        return shapes.chain(gamma)
    return None if spec is None else shapes.parse(spec)


def at_least_one(option: str, value: int | None) -> None:
    """Refuse 0 and less; None means "not given"."""
    if value is not None and value < 1:
        raise InputError(f"{option} of 1 or more", value, "give a larger number")


def output_file(path: str | None, option: str) -> Path | None:
    """Where to write in the end, links followed. Refused now if it could not be written then."""
    if path is None:
        return None
    try:
        target = Path(path).resolve()
        target.exists()
    except (OSError, RuntimeError, ValueError) as error:
        came = f"{brief(path)} ({reason(error)})"
        raise InputError(f"a file to write for {option}", came, "choose another name") from None
    if target.exists() and not target.is_file():
        raise InputError(f"a file to write for {option}", f"{brief(path)} (not a regular file)", "choose another name")
    if target.exists() and not os.access(target, os.W_OK):
        raise InputError(f"a file to write for {option}", f"{brief(path)} (write-protected)", "choose another name")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        came = f"{brief(path)} ({reason(error)})"
        raise InputError(f"a writable place for {option}", came, "choose another folder") from None
    return target


def output_folder(path: str, option: str) -> Path:
    """A folder that exists or can be made, links followed. Nothing is made yet."""
    try:
        if not path.strip():
            raise ValueError("no name")
        folder = Path(path).expanduser().resolve()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        tempfile.TemporaryFile(dir=there).close()
    except (OSError, RuntimeError, ValueError) as error:
        came = f"{brief(path)!r} ({reason(error)})"
        raise InputError(f"a writable folder for {option}", came, "choose another") from None
    return folder


def brief(path: str) -> str:
    """A path for a line of error: of a long one the end, which tells it from others."""
    return path if len(path) <= 120 else f"…{path[-119:]}"


def reason(error: Exception) -> str:
    """Why a path is of no use, without the path itself."""
    return getattr(error, "strerror", None) or str(error)[:80]


def drafter_name(name: str, shape: Wanted | None = None) -> str:
    """A drafter's name, or several joined by +; one that can draft the shape."""
    from specdecode_ref import drafters

    for part in name.split("+"):
        if part not in drafters.NAMES:
            raise UnknownNameError(
                f"a drafter out of {', '.join(drafters.NAMES)}", repr(part)[:80], "choose one, or join several with +"
            )
    if shape is not None and name in ("none", "ngram") and not is_chain(shape):
        raise InputError("a drafter that guesses with probabilities", repr(name), "use --gamma, or another drafter")
    return name


def is_chain(shape: Wanted | None) -> bool:
    """Whether no node of the shape can have two children."""
    from specdecode_ref.drafters import shapes

    return isinstance(shape, shapes.Sampled) and max(shape.branching) == 1


def verifier_name(name: str, shape: Wanted | None = None) -> str:
    """A verifier's name, or "auto"; one that judges trees where one was asked for."""
    from specdecode_ref import verify

    if name == "auto":
        return name
    verifier = verify.get(name)
    if shape is not None and not is_chain(shape) and "tree" not in verifier.shapes:
        able = ", ".join(v.name for v in verify.VERIFIERS.values() if "tree" in v.shapes)
        raise InputError("a verifier that judges trees", repr(name), f"use {able}, or a chain")
    return name


def judges_chains_only(verifier: str) -> bool:
    """Whether a tree would be refused by the verifier of that name."""
    from specdecode_ref import verify

    return verifier != "auto" and "tree" not in verify.get(verifier).shapes


def recorded_model(named: str | None, trace: Trace) -> str:
    """The model to run a trace with again; by the trace's own word only the embedded default, which asks no hub."""
    from specdecode_ref.models import zoo

    name = trace.header.target.name
    if named is None and name != zoo.DEFAULT:
        raise InputError("--model for traces of another model", repr(name)[:80], "name its folder or file")
    return named or name


def recorded_dtype(named: str, trace: Trace) -> str:
    """The dtype to run a trace in again: as recorded, unless told."""
    return trace.header.target.dtype or named if named == "auto" else named


def backend_name(name: str) -> str:
    """The name of a backend that can be imported; whether it can do the job is known once the model is there."""
    from specdecode_ref import backends

    backends.loaded(name)
    return name


def warn_of_loss(verifier: str) -> None:
    """A remark where the output will not have the target's law."""
    from specdecode_ref import verify

    if verifier != "auto" and not verify.get(verifier).lossless:
        screen.note(f"'{verifier}' is lossy: the output law is not the target's")


def draw_for(verifier: str) -> Draw:
    """How to draw siblings for this verifier: without replacement where it can judge that."""
    from specdecode_ref import verify

    able = verifier == "auto" or "without_replacement" in verify.get(verifier).draws
    return "without_replacement" if able else "with_replacement"
