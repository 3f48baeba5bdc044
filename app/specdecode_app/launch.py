"""How the app is started: Streamlit on `main.py`, on this machine only, sending nothing anywhere.

`specdecode app` runs this command; the browser tests run the same one on a port of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Streamlit would collect all garbage after every run of a page. While a generation is live the page runs three times a
# second, and going through torch's million objects each time would slow the decoding down more than the page itself.
FLAGS = {
    "runner.postScriptGC": "false",
    "server.address": "localhost",
    "server.fileWatcherType": "none",
    "server.maxUploadSize": "20",
    "server.showEmailPrompt": "false",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
}


def command(port: int | None = None, headless: bool = False) -> list[str]:
    """The command line that serves the app; `headless` opens no browser."""
    flags = FLAGS | ({"server.port": str(port)} if port else {}) | ({"server.headless": "true"} if headless else {})
    options = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "streamlit", "run", str(Path(__file__).with_name("main.py")), *options]


def run(port: int | None = None, headless: bool = False) -> int:
    """Serve the app until it is interrupted; returns Streamlit's exit code."""
    try:
        return subprocess.call(command(port, headless))
    except KeyboardInterrupt:
        return 0
