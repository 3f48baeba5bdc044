"""What the app's tests share: traces decoded on a model small enough for any machine, a served app, a browser.

The browser and node come from the fixtures of all tests: where CI is set, a machine without them fails.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from specdecode_app import launch

WORDS = [" the", " cat", " sat", " on", " mat", " sky", " is", " blue", ",", ".", "\n", " and"]
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>document.title='owned'</script>",
    "\u202eolleh",
    "שלום",
    "a\u0000\u0007",
    *"bcdefgh",
]


class ToyTokenizer:
    """Twelve tokens, a word each; the whole of what a session asks of a tokenizer."""

    eos_ids = frozenset[int]()
    hash = "toy"

    def __init__(self, words: list[str] = WORDS) -> None:
        self.words = words

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(m["content"]) % len(self.words) for m in messages] + [0, 1, 2]

    def token_bytes(self, token: int) -> bytes:
        return self.words[token].encode()

    text_bytes = token_bytes


@pytest.fixture(scope="session")
def toy() -> Callable[..., Any]:
    """Makes what `load` returns in the app, with a table for a model."""
    from specdecode_ref.models.table import TableModel

    def make(words: list[str] = WORDS) -> Any:
        model = TableModel.random(len(words), order=2, seed=1)
        return SimpleNamespace(model=model, tokenizer=ToyTokenizer(words), name="toy", revision="0")

    return make


@pytest.fixture(scope="session")
def make_trace(toy: Callable[..., Any]) -> Callable[..., Any]:
    """Decodes a trace on the toy model: a chain or a tree, at any level, with any words."""

    def make(
        branching: tuple[int, ...] = (1, 1, 1, 1), level: int = 3, words: list[str] = WORDS, tokens: int = 24
    ) -> Any:
        from specdecode_ref.decode import Session
        from specdecode_ref.drafters.model import ModelDrafter
        from specdecode_ref.models.table import TableModel

        loaded = toy(words)
        draft = TableModel.random(len(words), order=1, seed=1)
        session = Session(
            loaded.model,
            [[0, 1, 2]],
            ModelDrafter(draft, branching),
            seed=3,
            max_new_tokens=tokens,
            level=level,
            tokenizer=loaded.tokenizer,
        )
        return session.run()[0].trace

    return make


@pytest.fixture(scope="session")
def served() -> Iterator[str]:
    """The app on a free port of localhost, started as `specdecode app` starts it; its address."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        launch.command(port, headless=True), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    address = f"http://localhost:{port}"
    try:
        _wait(address, process)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server prints that it serves, or ends; then ask its health."""
    assert process.stdout is not None
    for line in process.stdout:
        if b"URL" in line:
            break
    else:
        pytest.fail(f"the app ended with code {process.wait()} before it served")
    with urllib.request.urlopen(f"{address}/_stcore/health", timeout=20) as answer:
        assert answer.status == 200


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    """Headless Chromium that asks nothing of the network by itself."""
    from playwright.sync_api import sync_playwright

    quiet = [
        "--no-sandbox",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=quiet)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, served: str) -> Iterator[Callable[..., Any]]:
    """Opens the page; afterwards no error may be on its console and no request may have left localhost."""
    said: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def open_page(query: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1360, "height": 940}} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{served}/{query}")
        page.locator(".board").wait_for(timeout=20_000)
        page.locator('[data-test-script-state="notRunning"]').wait_for(timeout=20_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith((served, "blob:", "data:"))] == []


@pytest.fixture(scope="session")
def here() -> Path:
    """This folder."""
    return Path(__file__).parent


@pytest.fixture(scope="session")
def hostile_words() -> list[str]:
    """A vocabulary that tries to be markup, to turn the line around, and to be invisible."""
    return HOSTILE
