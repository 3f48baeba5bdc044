"""What all kernels refuse in the same words: tensors nowhere, tensors in two places, other shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specdecode_kernels import cache, coins, cuts, launch, ngram, sampling, tree, tree_attention

from specdecode_ref.batched.records import Rules
from specdecode_ref.errors import InputError, NotApplicableError
from specdecode_ref.sampling import SamplingRule


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """Every function of a file of its own, with small tensors on a device, all of them right."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    logits, ones = torch.zeros(2, 5, device=device), torch.zeros(2, dtype=torch.float64, device=device)
    plain, cut = (Rules.of([SamplingRule(1.0, top_k=k)] * 2, device) for k in (0, 2))
    heads, plane = torch.zeros(2, 3, 1, 64, device=device), torch.zeros(2, 1, 4, 64, device=device)
    return {
        "law": lambda: sampling.law(logits, plain),
        "pick": lambda: sampling.pick(logits, plain, ones),
        "top_k": lambda: sampling.top_k(logits, 2),
        "cuts": lambda: cuts.cuts(logits, cut),
        "tree_attention": lambda: tree_attention.tree_attention(heads, plane, plane, ints(2), ints(2, 3, 1)),
        "topology": lambda: tree.topology(ints(2, 3) - 1),
        "commit": lambda: cache.commit([plane], ints(2), ints(2, 3), ints(2)),
        "find": lambda: ngram.find(ints(2, 6), ints(2), 2, 3, 1),
        "accept": lambda: coins.accept(0, ints(2), ints(2), 3),
    }


@pytest.mark.parametrize("name", calls("cpu"))
def test_a_tensor_without_memory_is_refused(name: str) -> None:
    calls("cpu")[name]()
    with pytest.raises(NotApplicableError, match=r"expected tensors in memory .*; got 'meta'; move them") as caught:
        calls("meta")[name]()
    assert "\n" not in str(caught.value)


def test_two_devices_are_refused() -> None:
    both = torch.zeros(1), torch.zeros(1, device="meta")
    with pytest.raises(InputError, match="tensors on one device; got cpu, meta"):
        launch.require_device(sampling._law, *both)


def test_shapes_are_told_in_full() -> None:
    launch.require_shape("x", torch.zeros(2, 3), 2, -1)
    for shape in ((2, 3), (4, 1, 1), ()):
        with pytest.raises(InputError, match=r"expected x of shape \[4, any\]; got \["):
            launch.require_shape("x", torch.zeros(shape), 4, -1)


def test_dtypes_are_told_in_full() -> None:
    launch.require_dtype("x", torch.zeros(1, dtype=torch.float16), *launch.FLOATS)
    with pytest.raises(NotApplicableError, match="expected x of dtype float32, bfloat16, float16; got int32"):
        launch.require_dtype("x", torch.zeros(1, dtype=torch.int32), *launch.FLOATS)
