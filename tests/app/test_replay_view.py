"""What the animation receives is the trace itself: nothing invented, nothing lost that is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from specdecode_app.views import replay


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("branching", [(1, 1, 1, 1), (3, 2, 1)], ids=["chain", "tree"])
def test_rounds_are_those_of_the_trace(make_trace: Callable[..., Any], branching: tuple[int, ...], level: int) -> None:
    trace = make_trace(branching, level)
    data = json.loads(json.dumps(replay.replay(trace, "x"), allow_nan=False))
    assert len(data["rounds"]) == len(trace.rounds)
    for shown, r in zip(data["rounds"], trace.rounds, strict=True):
        assert shown["nodes"]["parent"] == list(r.nodes.parent)
        assert shown["nodes"]["token"] == list(r.nodes.token)
        assert shown["nodes"]["draw"] == list(r.nodes.draw)
        assert shown["nodes"].get("q", []) == list(r.nodes.q)
        assert shown["path"] == list(r.path)
        assert [(t["node"], t["u"], t["accepted"]) for t in shown["tests"]] == [
            (t.node, t.u, t.accepted) for t in r.tests
        ]
    mentioned = {token for r in trace.rounds for token in (*r.nodes.token, r.emitted.token)} | set(trace.header.prompt)
    assert {str(token) for token in mentioned} <= data["vocab"].keys()


def test_windows_hold_the_same_rounds_as_the_whole(make_trace: Callable[..., Any]) -> None:
    trace = make_trace()
    whole = replay.replay(trace, "x")
    part = replay.window(trace.header, trace.rounds, lambda token: "a", "x", first=2, live=True)
    assert part["rounds"] == whole["rounds"][2:]
    assert (part["first"], part["live"], whole["first"], whole["live"]) == (2, True, 0, False)


def test_bytes_that_are_no_text_are_spelled_out() -> None:
    assert replay.text_of("é".encode()) == "é"
    assert replay.text_of(b"\xe2\x96") == "‹E2 96›"
    assert replay.text_of(b"") == ""


def test_only_what_is_drawn_of_the_laws_is_sent(make_trace: Callable[..., Any]) -> None:
    for shown, r in zip(replay.replay(make_trace((3, 2)), "x")["rounds"], make_trace((3, 2)).rounds, strict=True):
        assert list(shown["topk"]) == [str(r.path[-1])]
        assert (shown["topk"][str(r.path[-1])]["residual"] is not None) == (r.emitted.kind == "residual")


def test_summary_counts(make_trace: Callable[..., Any]) -> None:
    trace = make_trace(tokens=24)
    assert replay.summary(trace).startswith(
        f"24 tokens in {len(trace.rounds)} rounds · {24 / len(trace.rounds):.2f} tokens a round"
    )


def test_summary_names_a_lossy_verifier(make_trace: Callable[..., Any]) -> None:
    trace = make_trace()
    lossy = replace(trace, header=replace(trace.header, verifier="typical"))
    assert "LOSSY" in replay.summary(lossy) and "LOSSY" not in replay.summary(trace)
