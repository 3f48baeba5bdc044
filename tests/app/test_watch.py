"""The page without a browser: what it draws first, what it says about bad files, and that torch stays out of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specdecode_app import launch, recorded

from specdecode_ref.trace_file import read_trace

PAGE = Path(launch.__file__).parent / "app_pages" / "watch.py"


@pytest.fixture
def page() -> Any:
    from streamlit.testing.v1 import AppTest

    return AppTest.from_file(str(PAGE), default_timeout=30)


def payload(page: Any) -> dict[str, Any]:
    """What the animation was given."""
    (component,) = page.get("bidi_component")
    data: dict[str, Any] = json.loads(component.proto.json)
    return data


def test_recordings_are_valid_small_and_say_how_they_were_made() -> None:
    assert recorded.names()
    notes = (recorded.FOLDER / "README.md").read_text(encoding="utf-8")
    for name in recorded.names():
        path = recorded.path(name)
        trace = read_trace(path)
        assert path.stat().st_size < 300_000
        assert (trace.header.level, trace.header.target.name) == (3, "smollm2")
        assert f"`{name}.jsonl`" in notes


def test_the_first_picture_is_a_recording(page: Any) -> None:
    page.run()
    assert not page.exception
    assert payload(page)["id"] == f"recorded-{recorded.names()[0]}"
    assert not payload(page)["live"]


def test_each_recording_can_be_chosen(page: Any) -> None:
    page.run()
    for name in recorded.names():
        page.session_state["recording"] = name
        page.run()
        assert not page.exception
        assert payload(page)["id"] == f"recorded-{name}"


def test_the_page_is_drawn_without_torch() -> None:
    script = (
        "import sys; from streamlit.testing.v1 import AppTest\n"
        f"page = AppTest.from_file({str(PAGE)!r}, default_timeout=60).run()\n"
        "assert not page.exception and page.get('bidi_component')\n"
        "loaded = {'torch', 'transformers', 'tokenizers', 'gguf'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=_environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_an_uploaded_trace_is_drawn(page: Any, make_trace: Callable[..., Any]) -> None:
    trace = make_trace((3, 2, 1))
    page.run()
    page.file_uploader(key="upload").set_value(
        ("mine.jsonl", "".join(trace.lines()).encode(), "application/jsonl")
    ).run()
    assert not page.exception and not page.error
    assert payload(page)["id"].startswith("upload-")
    assert len(payload(page)["rounds"]) == len(trace.rounds)


def broken(make_trace: Callable[..., Any]) -> dict[str, bytes]:
    """Files that are no trace, each for a reason of its own."""
    good = "".join(make_trace((3, 2, 1)).lines())
    parent = good.replace('"parent":[-1,0,0,0,', '"parent":[-1,0,0,9,', 1)
    assert parent != good
    return {
        "empty": b"",
        "truncated": good[: len(good) // 2].encode(),
        "not JSON": b"![x](http://example.org/x.png)\n<script>alert(1)</script>\n",
        "wrong parents": parent.encode(),
        "NaN": good.replace('"u":0.', '"u":NaN,"x":0.', 1).encode(),
        "binary": bytes(range(256)) * 40,
        "counts only": "".join(make_trace((1, 1), level=0).lines()).encode(),
    }


def test_a_bad_file_is_one_line_and_changes_nothing(page: Any, make_trace: Callable[..., Any]) -> None:
    page.run()
    before = payload(page)
    for name, content in broken(make_trace).items():
        page.file_uploader(key="upload").set_value((f"{name}.jsonl", content, "application/jsonl")).run()
        assert not page.exception, name
        (error,) = page.error
        assert "\n" not in error.value, name
        assert error.value.startswith("expected"), name
        assert "](" not in error.value and "<script" not in error.value, name
        assert payload(page) == before, name


def test_live_run_on_the_page(page: Any, toy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_app import session

    monkeypatch.setattr(session, "load", toy)
    page.run()
    page.selectbox(key="drafter").set_value("ngram").run()
    page.number_input(key="max_new_tokens").set_value(9).run()
    page.button(key="run_live").click().run()
    run = page.session_state["run"]
    run.join(20)
    page.run()
    page.run()
    assert not page.exception and not page.error
    shown = payload(page)
    assert (shown["id"], shown["live"], shown["first"]) == (run.id, False, 0)
    assert sum(len(r["path"]) if not r["cut"] else r["cut"]["kept"] for r in shown["rounds"]) == 9
    page.text_input(key="prompt").set_value(" ").run()
    page.button(key="run_live").click().run()
    page.session_state["run"].join(20)
    page.run()
    page.run()
    assert [e.value.startswith("expected a prompt") for e in page.error] == [True]
