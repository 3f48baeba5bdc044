"""The kernels on a CPU: Triton's interpreter, which has to be asked for before they are imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
