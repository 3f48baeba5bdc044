"""The command line: `specdecode generate | bench | trace | models | app`; its options are in `commands`, those of the
fidelity laboratory in `laboratory`.

Bad input is one line on standard error and exit code 2, never a traceback; what is already written stays whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer

from specdecode_ref.cli import laboratory, screen
from specdecode_ref.errors import SpecDecodeError


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code. Raises nothing for bad input."""
    usage: Any = typer.BadParameter.__bases__[0]  # Typer brings its own Click and does not export this name
    try:
        code = laboratory.app(args=arguments, prog_name="specdecode", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except SpecDecodeError as error:
        screen.complain(str(error))
        return 2
    except usage as error:
        screen.complain(_usage_line(error, sys.argv[1:] if arguments is None else arguments))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it ends
        return 1


def _usage_line(error: Any, arguments: Sequence[str]) -> str:
    """A usage error in a line; Typer says what it expected, this adds what came."""
    command = error.ctx.command_path if error.ctx else "specdecode"
    options = getattr(getattr(error, "param", None), "opts", [])
    given = [value for option, value in pairwise(arguments) if option in options]
    given += [value for option, _, value in (word.partition("=") for word in arguments) if value and option in options]
    came = f"; got {given[-1]!r}" if given else ""
    return f"{error.format_message().rstrip('.')}{came}; see `{command} --help`"


def main() -> None:
    """The console script `specdecode`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(execute())
