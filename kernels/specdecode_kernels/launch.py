"""What every launch has in common: where kernels can run, and what they refuse.

A kernel runs on a CUDA device, or anywhere when TRITON_INTERPRET=1 was set before this package was imported: then
Triton runs it in Python, slowly, which is what the tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from specdecode_ref.errors import InputError, NotApplicableError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of logits, keys and values that kernels read."""


def interpreted(kernel: Callable[..., Any]) -> bool:
    """True where the kernel was made for Triton's interpreter."""
    return not isinstance(kernel, triton.JITFunction)


def require_device(kernel: Callable[..., Any], *tensors: Tensor) -> None:
    """Raises NotApplicableError for a device the kernel cannot run on, InputError for tensors of several devices.

    Triton's interpreter copies what is on a CUDA device; a tensor on "meta" has nothing to read anywhere.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise InputError("tensors on one device", ", ".join(sorted(map(str, devices))), "move them together")
    device = devices.pop()
    if interpreted(kernel) and device.type not in ("cpu", "cuda"):
        raise NotApplicableError("tensors in memory for Triton's interpreter", f"'{device}'", "move them to the CPU")
    if device.type != "cuda" and not interpreted(kernel):
        do = "use the PyTorch reference, or set TRITON_INTERPRET=1 before the import to run slowly in Python"
        raise NotApplicableError("tensors on a CUDA device for a Triton kernel", f"'{device}'", do)


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raises NotApplicableError for a dtype that a kernel does not read."""
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        came = str(tensor.dtype).removeprefix("torch.")
        raise NotApplicableError(f"{name} of dtype {names}", came, "convert them, or use the PyTorch reference")


def require_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raises InputError for another shape; -1 stands for any size."""
    if tensor.dim() != len(shape) or any(
        want not in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise InputError(f"{name} of shape [{wanted}]", list(tensor.shape), "pass what its docstring says")


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size` elements."""
    return -(-size // block)


def warps_of(block: int) -> int:
    """Warps for a tile of so many logits: 8 a thread, 16 bytes of bfloat16."""
    return max(4, block // 256)
