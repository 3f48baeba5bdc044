"""What the target is asked while it writes its own training text.

Nothing is downloaded and no benchmark is read: most questions the model asks itself, from an empty user turn or from
its first words. The others hold functions and prose of the Python packages that happen to be installed.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

OPENERS = (
    *("", "", "", "What is", "What are", "Who", "When did", "Where", "Why do", "Which", "How do I", "How does"),
    *("Write a short", "Write an email", "Write a story about", "Compose", "Describe", "Explain", "Imagine", "Pretend"),
    *("Give me", "List", "Compare", "Suggest", "What would you", "Create a", "Help me", "Tell me about"),
    *("Write a Python function that", "Write a program", "Implement", "A train", "A farmer has", "If a", "Solve"),
    *("Maria buys", "There are", "Tom has", "A shop sells", "The sum of", "Calculate", "In a class of", "Find the"),
    *("Extract the", "Read the following text", "Rewrite", "Correct the grammar", "Classify", "Is it true that"),
)
"""First words of a user's turn, which the model then finishes."""

CODE = (
    "Finish this Python function and show all of it:\n\n```python\n{}\n```",
    "Write the body of the function below. Answer with one code block that holds it all.\n\n```python\n{}\n```",
    "Implement this function in Python.\n\n```python\n{}\n```",
    "Complete the code:\n\n{}",
)
SUMMARY = (
    "Summarize: {}",
    "Summarise this text in a few sentences.\n\n{}",
    "What are the main points of the text below?\n\n{}",
    "Give a short summary of the following.\n\n{}\n\nSummary:",
)
READING = (
    "{}\n\nUsing the text above, answer this: {}",
    "Answer the question from these notes.\n\nNotes: {}\n\nQuestion: {}",
    "Read this and answer. {}\n{}",
)
QUESTIONS = (
    *("What is it about?", "Who is it for?", "What should a reader remember?", "What problem does it describe?"),
    *("Which terms does it define?", "What happens, and why?", "Is there a warning in it?", "How is it used?"),
)
TO_GERMAN = ("Translate English to German: {}", "Translate to German: {}", "How do you say this in German? {}")
FROM_GERMAN = ("Translate German to English: {}", "Translate this German sentence into English: {}")


@dataclass(frozen=True)
class Request:
    """A user's turn. `open`: the model itself writes on before it answers. `kind` names the sort of task."""

    kind: str
    text: str
    open: bool = False


@dataclass
class Asker:
    """Draws requests from a seed. `german` are sentences that the model has translated, to be translated back."""

    functions: list[str]
    passages: list[str]
    seed: int
    german: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def next(self) -> Request:
        """The next request."""
        r = self._random
        kind = r.choices(("own", "code", "summary", "reading", "to-german", "from-german"), (44, 22, 12, 8, 7, 7))[0]
        if kind == "code" and self.functions:
            return Request(kind, r.choice(CODE).format(r.choice(self.functions)))
        if kind == "summary" and self.passages:
            return Request(kind, r.choice(SUMMARY).format(r.choice(self.passages)))
        if kind == "reading" and self.passages:
            return Request(kind, r.choice(READING).format(r.choice(self.passages), r.choice(QUESTIONS)))
        if kind == "from-german" and self.german:
            return Request(kind, r.choice(FROM_GERMAN).format(r.choice(self.german)))
        if kind in ("to-german", "from-german") and self.passages:
            return Request("to-german", r.choice(TO_GERMAN).format(_sentence(r, r.choice(self.passages))))
        return Request("own", r.choice(OPENERS), open=True)


def _sentence(r: random.Random, passage: str) -> str:
    sentences = [s.strip() + "." for s in passage.split(". ") if 5 <= len(s.split()) <= 30]
    return r.choice(sentences) if sentences else passage[:160]


def installed(limit: int = 2000, folder: Path | None = None) -> tuple[list[str], list[str]]:
    """Functions (signature and docstring) and passages of prose out of the packages of this environment.

    Files are read and parsed, never imported. At most `limit` files, spread evenly, in an order that depends on their
    names alone.
    """
    files = sorted(Path(folder or sysconfig.get_path("purelib")).rglob("*.py"))
    functions, passages = set(), set()
    for path in files[:: max(1, len(files) // limit)]:
        for signature, text in _documented(path):
            if signature and 40 <= len(text) <= 600 and len(signature) <= 200:
                functions.add(f'{signature}\n    """{textwrap.indent(text, "    ").strip()}\n    """')
            passages |= {p for p in _paragraphs(text) if 250 <= len(p) <= 900}
    return sorted(functions), sorted(passages)


def _documented(path: Path) -> Iterator[tuple[str, str]]:
    """(signature or "", docstring) of everything in a file that has one."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield f"def {node.name}({ast.unparse(node.args)}):", text
        elif isinstance(node, ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield "", text


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs that are prose: mostly letters, no tables or code."""
    for block in text.split("\n\n"):
        flat = " ".join(block.split())
        letters = sum(c.isalpha() or c == " " for c in flat)
        if flat and letters > 0.9 * len(flat) and not any(mark in flat for mark in (">>>", "::", "---", ":param")):
            yield flat
