"""The animation's JavaScript: its own tests, run by node, and the one module that Streamlit is given."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

from specdecode_app.components.animation import MODULES, PLAYER, bundle


def test_node(node: str, here: Path) -> None:
    files = sorted(map(str, here.glob("*.test.mjs")))
    assert files
    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_bundle_is_one_valid_module(node: str, tmp_path: Path) -> None:
    path = tmp_path / "bundle.mjs"
    path.write_text(bundle(), encoding="utf-8")
    done = subprocess.run([node, "--check", str(path)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^import ", bundle(), re.MULTILINE)
    assert re.findall(r"^export .*", bundle(), re.MULTILINE) == [
        "export default function ({ data, parentElement, setStateValue, setTriggerValue }) {"
    ]


def test_modules_share_no_name_at_the_top() -> None:
    names = Counter(
        name
        for module in MODULES
        for name in re.findall(
            r"^(?:export )?(?:const|function|class) (\w+)",
            (PLAYER / f"{module}.mjs").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_text_goes_in_as_text_and_nothing_is_fetched() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|eval\(|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)"
    assert re.findall(forbidden, bundle()) == []
    for name in ("player.html", "player.css"):
        assert not re.search(r"https?://|url\((?!#)|@import|<script", (PLAYER / name).read_text(encoding="utf-8"))
