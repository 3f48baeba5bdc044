"""What a kernel really moves: the bytes that Triton's interpreter loads and stores, under the masks, tensor by tensor.

    with traffic(logits=logits, planes=[keys, values]) as moved:
        out = kernel(logits, ...)
    moved.name(out=out)                                 # what was allocated inside gets its name afterwards
    assert moved.loaded["logits"] == logits.nbytes
    assert moved.stored["out"] == out.nbytes
    assert moved.bytes == bytes_moved(...)              # everything, the unnamed scratch included

Every access counts, also a second one to the same place: what caches hold back is the machine's affair. An atomic is a
load and a store of its element. The bytes of torch operations (a fill, an add) do not pass here and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

REST = "rest"
"""The name of all that has none."""

Named = Tensor | Sequence[Tensor]


class Moved:
    """Every access of the kernels that ran inside `traffic`: addresses and bytes an element, loads and stores apart."""

    def __init__(self, named: dict[str, Named]) -> None:
        self._spans: list[tuple[str, int, int]] = []
        self._loads: list[tuple[np.ndarray, int]] = []
        self._stores: list[tuple[np.ndarray, int]] = []
        self._keep: list[Named] = []
        self.name(**named)

    def name(self, **named: Named) -> None:
        """Name tensors, or lists of tensors, whose bytes are wanted. Tensors of two names must not overlap."""
        for name, tensors in named.items():
            self._keep.append(tensors)  # a freed address could come back as somebody else's
            for start, end in map(_span, [tensors] if isinstance(tensors, Tensor) else tensors):
                for other, low, high in self._spans:
                    assert other == name or end <= low or high <= start, f"{name} and {other} share memory"
                self._spans.append((name, start, end))

    @property
    def loaded(self) -> Counter[str]:
        """Bytes loaded, a name; of the unnamed rest under `rest`."""
        return self._by_name(self._loads)

    @property
    def stored(self) -> Counter[str]:
        """Bytes stored, a name; of the unnamed rest under `rest`."""
        return self._by_name(self._stores)

    @property
    def bytes(self) -> int:
        """All bytes, loaded and stored."""
        return sum(len(places) * size for places, size in self._loads + self._stores)

    def _by_name(self, accesses: list[tuple[np.ndarray, int]]) -> Counter[str]:
        out: Counter[str] = Counter()
        for places, size in accesses:
            free = np.ones(len(places), dtype=bool)
            for name, start, end in self._spans:
                inside = free & (start <= places) & (places < end)
                out[name] += size * int(inside.sum())
                free &= ~inside
            out[REST] += size * int(free.sum())
        return out

    def _watch(self, ptrs: Any, mask: Any, *into: list[tuple[np.ndarray, int]]) -> None:
        places = np.asarray(ptrs.data)
        if mask is not None:
            places = places[np.broadcast_to(mask.data, places.shape).astype(bool)]
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        for accesses in into:
            accesses.append((places.ravel().copy(), size))


@contextmanager
def traffic(**named: Named) -> Iterator[Moved]:
    """Counts what interpreted kernels load and store inside the block; see the top of this file."""
    moved, builder = Moved(named), interpreter.interpreter_builder
    # Plain loads and stores, block pointers and descriptors all end in the masked ones.
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def watched_load(ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        moved._watch(ptrs, mask, moved._loads)
        return load(ptrs, mask, *rest, **options)

    def watched_store(ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        moved._watch(ptrs, mask, moved._stores)
        return store(ptrs, value, mask, *rest, **options)

    def watched_rmw(op: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved._watch(ptrs, mask, moved._loads, moved._stores)
        return rmw(op, ptrs, value, mask, *rest)

    def watched_cas(ptrs: Any, *rest: Any) -> Any:
        moved._watch(ptrs, None, moved._loads, moved._stores)
        return cas(ptrs, *rest)

    with patch.multiple(
        builder,
        create_masked_load=watched_load,
        create_masked_store=watched_store,
        create_atomic_rmw=watched_rmw,
        create_atomic_cas=watched_cas,
    ):
        yield moved


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to behind its last."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
