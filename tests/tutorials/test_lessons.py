"""The lessons run: as plain Python, as notebooks, and exercise by exercise.

For every exercise the learner's stub must fail its check with a message that helps, and the solution must pass it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.py"))
EXERCISE = ("exercise", "solution", "check")

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)


def notebook(lesson: Path) -> Any:
    return jupytext.read(lesson)


def tag(cell: Any) -> str:
    """The cell's tag: one of EXERCISE, or "" for a cell that belongs to no exercise."""
    tags = cell.metadata.get("tags", [])
    assert len(tags) < 2 and set(tags) <= set(EXERCISE), f"unknown tags {tags}"
    return tags[0] if tags else ""


@pytest.fixture
def runnable(lesson: Path, request: pytest.FixtureRequest) -> Path:
    """A lesson whose model, if it loads one, is installed."""
    if "models.zoo" in lesson.read_text(encoding="utf-8"):
        request.getfixturevalue("embedded")
    return lesson


def test_the_lessons_are_the_only_thing_committed_here() -> None:
    assert [path.name for path in LESSONS] == [
        "01_rejection_sampling.py",
        "02_chain_on_a_real_model.py",
        "03_how_decoders_break.py",
    ]
    others = {path.name for path in (ROOT / "tutorials").iterdir()} - {path.name for path in LESSONS}
    assert others <= {"__pycache__", ".ipynb_checkpoints"}, "notebooks are built, not committed"


@each_lesson
def test_cells_are_short_and_exercises_complete(lesson: Path) -> None:
    cells = notebook(lesson).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# Lesson {int(lesson.stem[:2])}: ")
    code = [cell for cell in cells if cell.cell_type == "code"]
    for cell in code:
        assert 0 < len(cell.source.splitlines()) <= 25, f"not a short cell:\n{cell.source}"
    tagged = [(number, tag(cell)) for number, cell in enumerate(cells) if tag(cell)]
    assert [name for _, name in tagged] == list(EXERCISE) * 3
    for (first, _), (last, _) in zip(tagged[::3], tagged[2::3], strict=True):
        assert last == first + 2, "a stub, its solution and its check stand one after another"
        assert "### Exercise" in cells[first - 1].source


@each_lesson
def test_builds_a_valid_notebook(lesson: Path) -> None:
    built = nbformat.reads(jupytext.writes(notebook(lesson), fmt="ipynb"), as_version=4)
    nbformat.validate(built)
    assert built.metadata.kernelspec.name == "python3"
    for cell in built.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
    back = jupytext.reads(jupytext.writes(built, fmt="py:percent"), fmt="py:percent")
    assert [(c.cell_type, c.source, tag(c)) for c in back.cells] == [
        (c.cell_type, c.source, tag(c)) for c in notebook(lesson).cells
    ]


@each_lesson
def test_is_formatted(lesson: Path) -> None:
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(lesson)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@each_lesson
def test_runs_as_plain_python(runnable: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(runnable)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [f"exercise {n}:" in done.stdout for n in (1, 2, 3)] == [True] * 3
    assert list(tmp_path.iterdir()) == [], "a lesson leaves no files behind"


@each_lesson
def test_stubs_fail_and_solutions_pass(runnable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in notebook(runnable).cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"__name__": "lesson"}

    def run(cell: Any) -> None:
        exec(compile(cell.source, runnable.name, "exec"), names)

    for number, cell in enumerate(cells):
        if tag(cell) == "exercise":
            run(cell)
            with pytest.raises(AssertionError, match=r"\w+ \w+ \w+"):
                run(cells[number + 2])
        else:
            run(cell)
    passed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("exercise ")]
    assert {line[:10] for line in passed} == {"exercise 1", "exercise 2", "exercise 3"}
