"""From the form to a decoding session on the embedded default. Importing this imports torch, so only runs do.

The session itself is `specdecode_ref.decode.Session`, unchanged: the page shows what the library does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from specdecode_app.live import Settings
from specdecode_app.views.replay import text_of
from specdecode_ref.decode import Session
from specdecode_ref.drafters import build
from specdecode_ref.errors import InputError
from specdecode_ref.models import zoo
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace import ModelInfo

LEVEL = 3

Texts = Callable[[Iterable[int]], dict[int, str]]


_loading = threading.Lock()


def load() -> zoo.Loaded:
    """The embedded default, loaded once a process and shared by every run; those that come meanwhile wait for it."""
    with _loading:
        return _load()


@cache
def _load() -> zoo.Loaded:
    return zoo.load(zoo.DEFAULT)


def open_session(loaded: Any, settings: Settings) -> tuple[Session, Texts]:
    """A session of one sequence, ready to iterate, and a function from token ids to their texts.

    Raises SpecDecodeError where the settings are out of range.
    """
    if not settings.prompt.strip():
        raise InputError("a prompt", "an empty one", "type some text")
    tokenizer = loaded.tokenizer
    exits, chained = "early-exit" in settings.drafter, not settings.tree and settings.drafter != "none"
    drafter = build(
        settings.drafter,
        loaded.model,
        gamma=settings.gamma if chained else None,
        tree=settings.tree or None,
        exit_layer=settings.exit_layer if exits else None,
    )
    session = Session(
        loaded.model,
        [tokenizer.chat([{"role": "user", "content": settings.prompt}])],
        drafter,
        verifier=settings.verifier,
        rule=SamplingRule(temperature=settings.temperature, top_p=settings.top_p, eos=tuple(sorted(tokenizer.eos_ids))),
        seed=settings.seed,
        max_new_tokens=settings.max_new_tokens,
        tokenizer=tokenizer,
        level=LEVEL,
        target=ModelInfo(loaded.name, loaded.revision, tokenizer.hash),
    )

    def texts(tokens: Iterable[int]) -> dict[int, str]:
        return {token: text_of(tokenizer.token_bytes(token)) for token in tokens}

    return session, texts
