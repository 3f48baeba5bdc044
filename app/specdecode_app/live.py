"""A live run: one worker thread that decodes, and a queue that the page empties at its own pace.

A run belongs to one browser session; runs share the loaded model and nothing else. torch is imported in the worker, so
the page is drawn first.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from specdecode_app.views.replay import mentioned
from specdecode_ref.errors import SpecDecodeError
from specdecode_ref.trace import Header, Round, Trace

_TURN = threading.Lock()
"""Runs take turns, a round each. One round keeps every core busy; several at once would slow each other many times."""


@dataclass(frozen=True)
class Settings:
    """What the form asked for.

    tree:       a shape as `specdecode_ref.drafters.shapes` reads it; empty for a chain of `gamma`.
    exit_layer: how many of the target's layers draft, where the drafter is early exit.
    """

    prompt: str
    drafter: str = "early-exit"
    verifier: str = "auto"
    gamma: int = 4
    tree: str = ""
    exit_layer: int = 27
    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 64


class Run:
    """One generation. `poll` from the page; `cancel` ends it after the round it is in."""

    def __init__(self, settings: Settings, load: Callable[[], Any]) -> None:
        self.id = uuid.uuid4().hex
        self.settings = settings
        self.rounds: list[Round] = []
        self.texts: dict[int, str] = {}
        self.header: Header | None = None
        self.trace: Trace | None = None
        self.error: str | None = None
        self.stage = "Loading the model"
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(load,), daemon=True, name=f"run-{self.id[:8]}")
        self._thread.start()

    @property
    def running(self) -> bool:
        """True until the result or the error has been polled."""
        return self.trace is None and self.error is None

    @property
    def tokens(self) -> int:
        """How many tokens have arrived."""
        return sum(r.kept for r in self.rounds)

    def cancel(self) -> None:
        """Ask the worker to stop."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait for the worker to end."""
        self._thread.join(seconds)

    def poll(self) -> int:
        """Take what the worker has put in the queue; returns how many rounds were new."""
        before = len(self.rounds)
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return len(self.rounds) - before
            match event:
                case Round(), dict() as texts:
                    self.rounds.append(event[0])
                    self.texts.update(texts)
                case Header(), dict() as texts:
                    self.header, self.stage = event[0], "Generating"
                    self.texts.update(texts)
                case Trace():
                    self.trace = event
                case str():
                    self.error = event

    def _work(self, load: Callable[[], Any]) -> None:
        try:
            self._events.put(self._generate(load()))
        except SpecDecodeError as error:
            self._events.put(str(error))
        except Exception as error:
            self._events.put(f"the run failed: {type(error).__name__}: {error}")

    def _generate(self, loaded: Any) -> Trace:
        from specdecode_app.session import open_session

        session, texts = open_session(loaded, self.settings)
        header = session.trace(0).header
        self._events.put((header, texts(header.prompt)))
        steps = iter(session)
        while not self._stop.is_set():
            with _TURN:
                step = next(steps, None)
            if step is None:
                break
            self._events.put((step.round, texts(mentioned(step.round))))
            time.sleep(0.001)  # a run that waits gets its turn
        trace: Trace = session.trace(0)
        return trace
