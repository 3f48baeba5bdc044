"""Watch: a generation, round by round. A recording is drawn at once; a prompt runs the model live.

The page's state is one `source`: a recording's name, an uploaded trace, or a live run. Everything below the controls is
a fragment, so that a live run redraws the animation and leaves the rest of the page alone.
"""

from __future__ import annotations

import string
from typing import Any

import streamlit as st
from specdecode_app import form, recorded
from specdecode_app.components.animation import animation
from specdecode_app.live import Run
from specdecode_app.views import replay as views

from specdecode_ref.errors import TraceError
from specdecode_ref.trace import Trace
from specdecode_ref.trace_file import MAX_BYTES, read_trace

POLL_SECONDS, LOAD_POLL_SECONDS = 0.3, 1.0
OVERLAP = 48
LEDE = (
    "A **drafter** guesses a few tokens ahead. The **target** model reads all guesses in one pass and keeps those that "
    "pass a fair test: several tokens can come from one pass, and the text still follows the target's own law."
)

TIGHT = "<style>.stMainBlockContainer { padding: 3rem 2.5rem 2rem; }</style>"


@st.cache_resource(max_entries=8, show_spinner=False)
def recording(name: str) -> tuple[Trace, dict[str, Any]]:
    """A bundled trace and what the animation needs of it."""
    trace = read_trace(recorded.path(name))
    return trace, views.replay(trace, f"recorded-{name}")


def model() -> Any:
    """The loaded model, shared by every session; called in a run's own thread, which imports torch."""
    from specdecode_app import session

    return session.load()


def plain(text: str) -> str:
    """Text from outside, safe inside Markdown: every sign that could be markup is escaped."""
    return "".join(f"\\{c}" if c in string.punctuation else c for c in " ".join(text.split()))


def run() -> Run | None:
    """This session's live run, if it is what the page shows."""
    found: Run | None = st.session_state.get("run")
    return found


def choose_recording() -> None:
    """A recording was chosen: leave the live run or the upload."""
    leave_run()
    st.session_state.pop("uploaded", None)


def leave_run() -> None:
    """Stop and forget this session's run."""
    if found := st.session_state.pop("run", None):
        found.cancel()


def take_upload() -> None:
    """An upload arrived: check it whole, then show it, or say in one line what is wrong."""
    file = st.session_state.upload
    st.session_state.pop("upload_error", None)
    if file is None:
        return
    try:
        trace = read_trace(file.getvalue())
        if trace.header.level < 1 or not trace.rounds:
            what = "no round" if not trace.rounds else "level 0, counts only"
            raise TraceError("a trace with tokens (level 1 or more) to draw", what, "record it again with more detail")
    except TraceError as error:
        st.session_state.upload_error = str(error)
        return
    leave_run()
    st.session_state.uploaded = (file.file_id, trace)


def start_run() -> None:
    """Start the model on the prompt in the form."""
    leave_run()
    st.session_state.pop("uploaded", None)
    st.session_state.run = Run(form.read(), model)


def shown_trace() -> Trace | None:
    """The finished trace on the page: what a download would hold."""
    if found := run():
        return found.trace
    if "uploaded" in st.session_state:
        uploaded: Trace = st.session_state.uploaded[1]
        return uploaded
    name = st.session_state.get("recording")
    return recording(name)[0] if name else None


def heading() -> None:
    """The title, what this is, and the recordings."""
    left, right = st.columns([3, 2], vertical_alignment="bottom", gap="large")
    with left:
        st.subheader("Watch a model write with speculative decoding", anchor=False)
        st.markdown(LEDE)
    with right:
        names = recorded.names()
        st.segmented_control(
            "Recorded examples",
            names,
            key="recording",
            default=names[0],
            required=True,
            bind="query-params",
            format_func=str.capitalize,
            on_change=choose_recording,
        )


def controls() -> None:
    """Prompt, Run or Cancel, settings, files."""
    found = run()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        form.prompt(disabled=bool(found and found.running))
        if found and found.running:
            st.button("Cancel", icon=":material/stop:", on_click=found.cancel, key="cancel")
        else:
            st.button("Run live", icon=":material/play_arrow:", type="primary", on_click=start_run, key="run_live")
        with st.popover("Settings", icon=":material/tune:"):
            form.settings()
        with st.popover("Trace file", icon=":material/description:"):
            files()


def files() -> None:
    """Bring a trace, take this one away."""
    st.file_uploader(
        "Open a trace (.jsonl)",
        type="jsonl",
        key="upload",
        on_change=take_upload,
        max_upload_size=MAX_BYTES // 1_000_000,
    )
    if trace := shown_trace():
        st.download_button(
            "Download this trace",
            lambda: "".join(trace.lines()),
            "trace.jsonl",
            "application/jsonl",
            icon=":material/download:",
            on_click="ignore",
            key="download",
        )


def stage() -> None:
    """The animation, and while a run is live its progress. Until its first round arrives the last picture stays."""
    if error := st.session_state.get("upload_error"):
        st.error(plain(error), icon=":material/error:")
    found = run()
    if found:
        before = pace(found)
        found.poll()
        if pace(found) != before:
            st.rerun()
        report(found)
    if found and found.header and found.rounds:
        lost = st.session_state.get("player", {}).get("resend") == found.id
        first = 0 if lost or not found.running else max(0, len(found.rounds) - OVERLAP)
        data = views.window(found.header, found.rounds, found.texts.get, found.id, first, found.running)
        animation(data, key="player")
        return
    trace, data = still()
    if not found:
        st.caption(plain(views.summary(trace)))
    animation(data, key="player")


def pace(found: Run | None) -> float | None:
    """Seconds between two looks at a run: few while the model loads, none once it has ended."""
    if found is None or not found.running:
        return None
    return POLL_SECONDS if found.header else LOAD_POLL_SECONDS


def report(found: Run) -> None:
    """How far a live run is, or how it ended."""
    if found.error:
        st.error(plain(found.error), icon=":material/error:")
    elif found.running:
        share = found.tokens / found.settings.max_new_tokens
        words = f"{found.stage} · {found.tokens} of at most {found.settings.max_new_tokens} tokens"
        st.progress(min(1.0, share), words)
    elif found.trace:
        st.caption(plain(views.summary(found.trace)))


def still() -> tuple[Trace, dict[str, Any]]:
    """The trace that is looked at when none is being made: an upload or a recording."""
    if "uploaded" in st.session_state:
        name, trace = st.session_state.uploaded
        return trace, views.replay(trace, f"upload-{name}")
    return recording(st.session_state.recording)


st.html(TIGHT)
heading()
controls()
st.fragment(stage, run_every=pace(run()))()
