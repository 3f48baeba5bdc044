"""The README's promises: its example runs, its commands exist, its links lead somewhere; and so do the docstrings'."""

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import specdecode_ref
from specdecode_ref import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.mark.usefixtures("embedded")
def test_the_python_example_runs() -> None:
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    instead = re.search(r"(\d+) target passes instead of (\d+)", done.stdout)
    assert instead, done.stdout
    assert int(instead[1]) < int(instead[2])


def test_every_command_line_is_understood(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each `specdecode` line names a command and options that exist."""
    for name, value in {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    shells = [*blocks("sh"), *(block for page in pages for block in re.findall(r"```sh\n(.*?)```", page, re.S))]
    lines = [line.split("#")[0] for block in shells for line in block.splitlines()]
    commands = [c.strip() for line in lines for c in line.split("&&") if c.strip().startswith("specdecode ")]
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command)[1:]
        depth = 2 if words[0] in ("trace", "vectors") else 1
        code = cli.execute([*words[:depth], "--help"])
        shown = capsys.readouterr()
        assert code == 0, (command, shown.err)
        for option in [word for word in words if word.startswith("--")]:
            assert option in shown.out, (command, option)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_links_and_pictures_exist() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), (document.name, link)


def test_contributing_is_short() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 60
    assert "add a drafter" in text.lower()
    assert "add a kernel twin" in text.lower()


def modules() -> list[str]:
    found = pkgutil.walk_packages(specdecode_ref.__path__, "specdecode_ref.")
    return ["specdecode_ref", *(m.name for m in found if not m.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0


@pytest.mark.parametrize("name", specdecode_ref.__all__)
def test_every_export_is_documented(name: str) -> None:
    thing = getattr(specdecode_ref, name)
    assert name == "__version__" or thing.__doc__
