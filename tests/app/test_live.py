"""Live runs: a worker and a queue, on the toy model; several at once, cancelled, refused, broken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from specdecode_app.live import Run, Settings

SETTINGS = Settings("hello", drafter="none", temperature=1.0, max_new_tokens=12)


def finish(run: Run) -> Run:
    run.join(20)
    run.poll()
    assert not run.running
    return run


def test_a_run_ends_with_the_trace_of_the_rounds_it_sent(toy: Callable[..., Any]) -> None:
    run = finish(Run(SETTINGS, toy))
    assert run.error is None
    assert run.trace is not None and run.trace.rounds == tuple(run.rounds)
    assert run.tokens == 12
    assert run.header is not None and run.header.prompt == run.trace.header.prompt
    assert {token for r in run.rounds for token in r.tokens} <= run.texts.keys()


def test_runs_at_once_share_the_model_and_nothing_else(toy: Callable[..., Any]) -> None:
    loaded = toy()
    runs = [Run(replace(SETTINGS, drafter="ngram", seed=seed, max_new_tokens=40), lambda: loaded) for seed in (0, 1, 2)]
    alone = [finish(Run(run.settings, toy)) for run in runs]
    for run, same in zip(map(finish, runs), alone, strict=True):
        assert run.trace is not None and same.trace is not None
        assert run.trace.tokens == same.trace.tokens
    assert len({run.id for run in runs}) == 3


def test_cancel_leaves_a_valid_partial_trace(toy: Callable[..., Any]) -> None:
    started, go_on = threading.Event(), threading.Event()
    loaded = toy()
    forward = loaded.model.forward

    def slow(*args: Any) -> Any:
        started.set()
        go_on.wait(20)
        return forward(*args)

    loaded.model.forward = slow
    run = Run(replace(SETTINGS, max_new_tokens=1000), lambda: loaded)
    assert started.wait(20)
    run.cancel()
    go_on.set()
    finish(run)
    assert run.error is None and run.trace is not None
    assert run.trace.footer.finish_reason == "cancelled"
    assert len(run.trace.rounds) <= 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (replace(SETTINGS, prompt="  "), "expected a prompt"),
        (replace(SETTINGS, top_p=0.0), "top_p"),
        (replace(SETTINGS, temperature=float("nan")), "temperature"),
        (replace(SETTINGS, max_new_tokens=0), "max_new_tokens"),
        (replace(SETTINGS, drafter="oracle"), "a drafter out of"),
        (replace(SETTINGS, drafter="early-exit"), "early-exit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings_are_one_clear_line(toy: Callable[..., Any], settings: Settings, words: str) -> None:
    run = finish(Run(settings, toy))
    assert run.trace is None and run.error is not None
    assert words in run.error and "\n" not in run.error


def test_a_failure_in_the_worker_is_told() -> None:
    def broken() -> Any:
        raise OSError("disk full")

    assert finish(Run(SETTINGS, broken)).error == "the run failed: OSError: disk full"
