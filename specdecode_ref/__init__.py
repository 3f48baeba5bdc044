"""specdecode_ref: speculative decoding you can read, watch and trust.

Reading order: `decode`, `verify/chain`, `tree`, `verify/tree`. Importing this package loads nothing heavy; names load
their module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specdecode_ref.decode import Generation, Session, autoregressive, speculative
    from specdecode_ref.drafters import build
    from specdecode_ref.models.zoo import load
    from specdecode_ref.sampling import SamplingRule
    from specdecode_ref.trace import Trace
    from specdecode_ref.trace_file import read_trace

_HOMES = {
    "Generation": "decode",
    "Session": "decode",
    "autoregressive": "decode",
    "speculative": "decode",
    "build": "drafters",
    "load": "models.zoo",
    "SamplingRule": "sampling",
    "Trace": "trace",
    "read_trace": "trace_file",
}

__all__ = [
    "Generation",
    "SamplingRule",
    "Session",
    "Trace",
    "__version__",
    "autoregressive",
    "build",
    "load",
    "read_trace",
    "speculative",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
