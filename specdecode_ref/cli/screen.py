"""What the command line shows: text that cannot harm a terminal, coloured and marked by where each token came from.

Colour alone would be lost on some readers and under NO_COLOR, so each kind has a mark that needs none.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from specdecode_ref.stream import Piece

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT."""

Marks = Literal["style", "text", "none"]

KINDS = {
    "draft": ("green underline", "[", "]", "accepted draft"),
    "residual": ("magenta bold", "!", "", "residual"),
    "bonus": ("cyan reverse", "+", "", "bonus"),
    "target": ("", "", "", "target"),
}
"""Where a token came from -> its style; what stands around it where there are no styles; what the legend calls it."""


def visible(text: str) -> str:
    """The text with everything that steers a terminal, or hides or reorders letters, made visible.

    Newlines and tabs stay.

    >>> visible("red: " + chr(27) + "[31m")
    'red: ␛[31m'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _picture(c) for c in text)


def _picture(c: str) -> str:
    if c < " " or c == "\x7f":
        return chr(0x2400 + ord(c)) if c < " " else "␡"
    if c in "\u2028\u2029":
        return "\n"
    harmless = unicodedata.category(c) in ("Zs", "Co", "Cn") or c in "\u200c\u200d"  # odd spaces, icons, joiners
    return c if harmless else f"<U+{ord(c):04X}>"


def one_line(text: str) -> str:
    """Visible text on a single line, for messages."""
    return visible(text).replace("\n", "␊").replace("\t", " ")


def console(stderr: bool = False) -> Console:
    """A console that prints what it is given: no markup, no highlighting, no emoji codes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 140
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def marks_for(out: Console) -> Marks:
    """Styles on a terminal (without colour under NO_COLOR), text marks on a dumb one, none in a file or pipe."""
    if not out.is_terminal:
        return "none"
    return "text" if out.is_dumb_terminal else "style"


class Painter:
    """Prints pieces of text as they come, each marked by its kind."""

    def __init__(self, out: Console, marks: Marks) -> None:
        self._out, self._marks, self._open = out, marks, ""

    def paint(self, pieces: Iterable[Piece]) -> None:
        """Print the pieces of one round."""
        for piece in pieces:
            style, before, after, _ = KINDS[piece.tag]
            text = visible(piece.text)
            if self._marks == "text":
                style, same = "", self._open != "" and after == self._open
                text = ("" if same else self._close() + before) + text
                self._open = after
            self._print(text, style if self._marks == "style" else "")

    def finish(self) -> None:
        """End the last line."""
        self._print(self._close() + "\n", "")

    def legend(self, counts: dict[str, int]) -> Any:
        """The kinds as they look, each with how many tokens there were of it."""
        from rich.text import Text

        line = Text()
        for kind, (style, before, after, name) in KINDS.items():
            shown = f"{before}{name}{after}" if self._marks == "text" else name
            line.append(shown, style if self._marks == "style" else "").append(f" {counts.get(kind, 0)}   ")
        line.rstrip()
        return line

    def _close(self) -> str:
        closing, self._open = self._open, ""
        return closing

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text

        self._out.print(Text(text, style, end=""), end="", soft_wrap=True)
        self._out.file.flush()


def status(message: str) -> AbstractContextManager[Any]:
    """A spinner on standard error while something takes its time; nothing where that is not a terminal."""
    err = console(stderr=True)
    return err.status(message) if err.is_terminal else nullcontext()


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on standard error, told (the share that is done, a few words); nothing where that is not a terminal."""
    from rich.progress import Progress, TimeRemainingColumn

    err = console(stderr=True)
    columns = (*Progress.get_default_columns()[:3], TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def told(share: float, words: str) -> None:
            bar.update(task, completed=share, description=f"{title}: {words}" if words else title)

        yield told


def note(message: str) -> None:
    """A remark on standard error."""
    print(f"specdecode: note: {one_line(message)}", file=sys.stderr)


def complain(message: str) -> None:
    """The one line that bad input gets."""
    print(f"specdecode: error: {one_line(message)}", file=sys.stderr)
