"""The animated draft tree as a Streamlit component: plain JavaScript, SVG and CSS from the folder `player`.

Inline JavaScript cannot import by relative path, so the modules are joined into one here, in reading order. They share
one scope after that; a test checks that no two of them use a name at the top level for different things.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

PLAYER = Path(__file__).parent / "player"
MODULES = ("replay", "words", "tree", "stream", "panel", "strip", "flight", "player")


def bundle() -> str:
    """The modules as one: their imports of each other taken out, and only the last one's default export left in."""
    parts = []
    for name in MODULES:
        source = (PLAYER / f"{name}.mjs").read_text(encoding="utf-8")
        source = re.sub(r"^import \{[^}]*\} from \"\./\w+\.mjs\";\n", "", source, flags=re.MULTILINE)
        parts.append(re.sub(r"^export (?!default)", "", source, flags=re.MULTILINE))
    return "\n".join(parts)


@cache
def _component() -> Callable[..., Any]:
    import streamlit as st

    return st.components.v2.component(
        "specdecode_player",
        html=(PLAYER / "player.html").read_text(encoding="utf-8"),
        css=(PLAYER / "player.css").read_text(encoding="utf-8"),
        js=bundle(),
    )


def animation(data: dict[str, Any], *, key: str, on_cursor: Callable[[], None] = lambda: None) -> Any:
    """Draw the trace in `data` (see `specdecode_app.views.replay`). Returns the `cursor`, or `resend` after a gap.

    The cursor comes back when the animation pauses or a seek ends, never on every frame.
    """
    return _component()(key=key, data=data, on_cursor_change=on_cursor, on_resend_change=lambda: None)
