"""The byte counter counts what is behind the masks, under the right name, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _double(x, out, total, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32)
    tl.store(out + index, value * 2, mask=index < size)
    tl.atomic_add(total, 1)


def test_bytes_are_counted_under_their_masks_by_name(traffic: Any) -> None:
    x, out, total = torch.ones(13, dtype=torch.bfloat16), torch.empty(13), torch.zeros(1, dtype=torch.int64)
    with traffic(x=x, out=out) as moved:
        _double[(4,)](x, out, total, 13, BLOCK=4)
    assert moved.loaded == {"x": 26, "out": 0, "rest": 32}
    assert moved.stored == {"x": 0, "out": 52, "rest": 32}
    moved.name(total=total)
    assert moved.loaded["total"] == moved.stored["total"] == 32
    assert moved.bytes == 26 + 52 + 64
    assert out.eq(2).all() and total == 4, "counting changes nothing"
    _double[(4,)](x, out, total, 13, BLOCK=4)
    assert moved.bytes == 26 + 52 + 64, "what runs later does not count"


def test_views_of_one_tensor_share_a_name_but_not_two(traffic: Any) -> None:
    both = torch.ones(2, 8)
    out, total = torch.empty(8), torch.zeros(1, dtype=torch.int64)
    with traffic(planes=[both[0], both[1]]) as moved:
        _double[(1,)](both[1], out, total, 7, BLOCK=8)
    assert moved.loaded["planes"] == 28
    with pytest.raises(AssertionError, match="share memory"), traffic(one=both, other=both[1]):
        pass
