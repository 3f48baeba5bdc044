"""Backends of other packages: found by name, asked for an objection, and no worse than a line when they are broken."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from specdecode_ref import backends
from specdecode_ref.backends import Job, Played, resolve
from specdecode_ref.cli import execute
from specdecode_ref.coins import Coins
from specdecode_ref.decode import Session
from specdecode_ref.errors import InputError, NotApplicableError, UnknownNameError
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace import Nodes
from specdecode_ref.types import Verdict


class Fixed:
    """A backend that emits token 1 in every round, or objects."""

    name = "fixed"

    def __init__(self, complaint: str | None = None) -> None:
        self.complaint = complaint
        self.limits: Sequence[int] = ()
        self.selected: list[Sequence[int]] = []

    def objection(self, job: Job) -> str | None:
        return self.complaint

    def start(self, job: Job, prompts: Sequence[Sequence[int]], limits: Sequence[int], keys: Sequence[Coins]) -> Fixed:
        self.limits, self.live = limits, len(prompts)
        return self

    def play(self) -> list[Played]:
        nodes = Nodes(parent=(-1,), draw=(None,), token=(0,), q=(None,), p=(None,))
        return [Played(nodes, Verdict((0,), 1, "target", (), torch.empty(0)))] * self.live

    def select(self, rows: Sequence[int]) -> None:
        self.selected.append(rows)
        self.live = len(rows)


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name=backend)`: the registered entry points. An error in a backend's place is raised by its import."""

    def run(**found: Any) -> None:
        def load(entry: EntryPoint) -> Any:
            if isinstance(found[entry.name], Exception):
                raise found[entry.name]
            return found[entry.name]

        def entries(group: str, name: str | None = None) -> list[EntryPoint]:
            assert group == backends.GROUP
            return [EntryPoint(n, "nowhere:X", group) for n in found if name in (None, n)]

        monkeypatch.setattr(EntryPoint, "load", load)
        monkeypatch.setattr(backends, "entry_points", entries)

    return run


def job(device: str = "cpu") -> Job:
    model = TableModel.random(5)
    model.device = torch.device(device)
    return Job(model, None, "auto", SamplingRule(), 2)


def test_a_decode_is_played_elsewhere(install: Install) -> None:
    fixed = Fixed()
    install(fixed=fixed)
    session = Session(TableModel.random(5), [[2], [3, 4], [0]], backend="fixed", max_new_tokens=2)
    session.cancel(1)
    assert [g.tokens for g in session.run()] == [(1, 1), (), (1, 1)]
    assert fixed.limits == (3, 4, 3) and fixed.selected == [[0, 2]]
    assert session.trace(0).header.engine["backend"] == "fixed"


def test_a_name_that_nobody_registered(install: Install) -> None:
    install(fixed=Fixed())
    with pytest.raises(UnknownNameError, match="auto, torch, fixed; got 'cuda'"):
        Session(TableModel.random(5), [[1]], backend="cuda")


def test_a_backend_by_name_says_why_it_cannot(install: Install) -> None:
    install(fixed=Fixed("no room"))
    with pytest.raises(NotApplicableError, match="'fixed'; got no room; use the backend torch"):
        resolve("fixed", job())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'triton'"), "got No module named 'triton'; install it"),
        (AttributeError("module has no attribute 'X'"), "got AttributeError: module has no attribute 'X'"),
        (OSError("libcuda.so.1: cannot open\nshared object"), "got OSError: libcuda.so.1: cannot open shared object"),
    ],
)
def test_a_backend_that_cannot_be_imported(install: Install, error: Exception, words: str) -> None:
    install(broken=error)
    with pytest.raises(InputError) as caught:
        resolve("broken", job())
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_auto_is_the_first_that_can_where_there_is_a_gpu(install: Install) -> None:
    able = Fixed()
    install(unable=Fixed("no room"), able=able, other=Fixed())
    assert resolve("auto", job("cuda")) is able
    assert resolve("auto", job()) is None and resolve("torch", job("cuda")) is None
    install(unable=Fixed("no room"))
    assert resolve("auto", job("cuda")) is None


def test_auto_warns_once_of_what_is_broken(install: Install) -> None:
    able = Fixed()
    install(broken=RuntimeError("no driver"), able=able)
    with pytest.warns(UserWarning, match="'broken' cannot be loaded") as caught:
        assert resolve("auto", job("cuda")) is able
    assert len(caught) == 1
    install(broken=ImportError("no triton"))
    with pytest.warns(UserWarning, match="no triton.; decoding in PyTorch") as caught:
        Session(job("cuda").model, [[1]])
    assert [warning.filename for warning in caught] == [__file__], "it points at who asked"


def test_nothing_is_imported_where_nothing_is_asked(install: Install) -> None:
    install(broken=RuntimeError("imported"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve("auto", job()) is None and resolve("torch", job("cuda")) is None


def test_the_command_line_refuses_a_broken_backend_before_it_loads_a_model(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(broken=ImportError("No module named 'triton'"))
    assert execute(["generate", "x", "--backend", "broken", "--model", "no-such-model"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "what the backend 'broken' needs" in shown and "pip install" in shown
