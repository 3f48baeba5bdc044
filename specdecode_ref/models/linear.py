"""One matrix product, y = x W^T + b, with W stored the way this machine multiplies it fastest.

Decoding reads every weight once a step, so on a CPU the bytes of the weights are the speed. Where the x86 kernels of
FBGEMM are built in, a weight that float16 can hold is kept in float16 and multiplied in float32. All products of a
step of the default model, for 1 and for 8 rows, on two idle Zen 3 cores: 42 and 91 ms in float32, 18 and 126 ms in
bfloat16 (there is no bfloat16 arithmetic before AVX-512), 17 and 29 ms so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

Linear = Callable[[Tensor], Tensor]
"""x [..., in] -> y [..., out], in x's dtype."""

TOLERANCE = 2.0**-25
"""Half the spacing of float16's smallest numbers: what a bfloat16 checkpoint's tiniest weights may lose."""


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Linear:
    """The linear layer of `weight` [out, in] and `bias` [out] or None, for inputs of `dtype` on `device`.

    float16 holds every number of a bfloat16 or float16 checkpoint between 2^-14 and 65504 exactly and the smaller ones
    to 2^-25, so float32 arithmetic on it gives what float32 weights give. Any other weight is kept in `dtype`.
    """
    narrow = dtype in (torch.float32, torch.bfloat16)
    if device.type == "cpu" and narrow and _multiplies_float16() and _fits_float16(weight):
        return _float16(weight, bias, dtype)
    held = weight.to(device, dtype)
    offset = None if bias is None else bias.to(device, dtype)
    return lambda x: linear(x, held, offset)


def unpack(product: Linear, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weight [out, inputs] of a packed layer: what it makes of each unit vector, less what it makes of nothing."""
    units = torch.eye(inputs, dtype=dtype, device=device)
    bias = product(torch.zeros_like(units[:1]))
    return torch.cat([product(some) - bias for some in units.split(64)]).T.contiguous()


def _float16(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    offset = None if bias is None else bias.float()
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), offset)
    multiply = torch.ops.quantized.linear_dynamic_fp16
    if dtype == torch.float32:
        return lambda x: multiply(x, packed)
    return lambda x: multiply(x.float(), packed).to(dtype)


def _fits_float16(weight: Tensor) -> bool:
    """Whether float16 keeps the weight within `TOLERANCE`; in blocks that stay in the processor's cache."""
    if weight.dtype == torch.float64:
        return False
    for block in weight.split(256):
        lost = block.half().float().sub_(block).abs_().max()
        if not lost <= TOLERANCE:
            return False
    return True


@cache
def _multiplies_float16() -> bool:
    """Whether this build of torch has the float16 kernels and they multiply rightly."""
    weight = torch.arange(-32.0, 32.0).view(8, 8) / 64
    try:
        got = _float16(weight, None, torch.float32)(weight)
    except (RuntimeError, AttributeError):
        return False
    return bool(torch.allclose(got, weight @ weight.T))
