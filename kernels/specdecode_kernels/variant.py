"""One compiled form of a kernel: what `aot` compiles without a GPU, and what it then expects to find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel with everything fixed that its machine code depends on.

    name:      of the kernel and its shape, as a row of the table: "verify_stats V=128256 bf16".
    types:     of the arguments that are not constants: "*bf16", "*i64", "i32", "fp64", ... An integer that is always a
               multiple of 16 says so: "i32:16", as in `triton.tools.compile`; for a pointer that goes without saying.
    constants: its `tl.constexpr` arguments.
    registers: the most it may use of them, a thread.
    wide:      its large reads must be 16 bytes a thread.
    dot:       it multiplies matrices, so on sm_90 it must use wgmma.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    registers: int = 128
    wide: bool = True
    dot: bool = False


def int32(value: int) -> str:
    """The type of an argument with this value."""
    return "i32" if value % 16 else "i32:16"
