"""The shipped recordings are those that `specdecode_app.record` would make: same prompt, seed, rule and drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from specdecode_app.record import RECORDINGS
from specdecode_app.recorded import path
from specdecode_app.session import open_session

from specdecode_ref.trace_file import read_trace


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_is_what_its_settings_say(smollm2: Any, name: str) -> None:
    session, _ = open_session(smollm2, RECORDINGS[name])
    shipped = read_trace(path(name)).header
    assert replace(session.trace(0).header, vocab={}, verifier="") == replace(shipped, vocab={}, verifier="")
