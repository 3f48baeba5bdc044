"""The kernel of tree attention: the reference's rows, whatever is in unseen slots, and one read of the cache."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from specdecode_kernels import splits as splits_file
from specdecode_kernels import tree_attention as kernel
from torch import Tensor

from specdecode_ref.batched.tree import topology
from specdecode_ref.batched.tree_attention import tree_attention as reference
from specdecode_ref.errors import SpecDecodeError

ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Of an element, relative; in float32 it is among what is allowed for sums."""

SUMS = 1e-5
"""For float32 scores and sums of some hundred terms."""


def tolerance(dtype: torch.dtype) -> float:
    """The error allowed, relative to the largest value: the weights are rounded once, and so is their result."""
    return 2 * ROUNDING[dtype] + SUMS


@dataclass(frozen=True)
class Case:
    """What `tree_attention` is called with. The planes are one layer of a cache, NaN wherever nobody may look."""

    q: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    ancestors: Tensor

    def run(self, module: ModuleType = kernel, splits: int | None = None) -> Tensor:
        return module.attend(self.q, self.keys, self.values, self.lengths, self.ancestors, splits)

    def expected(self) -> Tensor:
        q, keys, values = (plane.double() for plane in (self.q, self.keys, self.values))
        return reference(q, keys, values, self.lengths, self.ancestors)

    def error(self, out: Tensor) -> float:
        """The largest difference to the reference, relative to the largest value; infinite where only one is NaN."""
        difference = (out.double() - self.expected()).abs()
        return float(difference.nan_to_num(torch.inf).max() / self.values.double().nan_to_num(0).abs().max())


def trees(nodes: int, batch: int, seed: int = 0) -> Tensor:
    """Random parents; from three nodes on one of them is dropped."""
    rng = torch.Generator().manual_seed(seed)
    parents = (torch.rand(batch, nodes, generator=rng) * torch.arange(nodes)).long()
    parents[:, 0] = -1
    if nodes > 2:
        parents[:, nodes // 2] = -1
    return parents


def case(
    nodes: int,
    group: int,
    heads: int,
    lengths: Sequence[int],
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    slots: int | None = None,
    parents: Tensor | None = None,
) -> Case:
    batch = len(lengths)
    slots = max(lengths) + nodes + 3 if slots is None else slots
    rng = torch.Generator().manual_seed(nodes + group)
    q = torch.randn(batch, heads * group, nodes, dim, generator=rng).to(dtype).transpose(1, 2)
    cache = torch.randn(batch, 2, 2, heads, slots, dim, generator=rng).to(dtype)
    parents = trees(nodes, batch) if parents is None else parents
    for b, length in enumerate(lengths):
        dropped = [i for i in range(1, nodes) if parents[b, i] == -1]
        cache[b, ..., length + nodes :, :] = torch.nan
        cache[b, ..., [length + i for i in dropped if length + i < slots], :] = torch.nan
    return Case(q, cache[:, 1, 0], cache[:, 1, 1], torch.tensor(lengths), topology(parents).ancestors)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without a value is NaN."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: torch.full(x.shape, torch.nan, dtype=x.dtype))


SHAPES = {
    "N=1 G=8 D=128 bf16": (1, 8, 2, 128, torch.bfloat16, (1,)),
    "N=1 G=1 D=64 fp16": (1, 1, 1, 64, torch.float16, (0, 2)),
    "N=5 G=3 D=64 fp32": (5, 3, 2, 64, torch.float32, (1,)),
    "N=5 G=4 D=128 fp16": (5, 4, 1, 128, torch.float16, (1,)),
    "N=63 G=1 D=64 bf16": (63, 1, 1, 64, torch.bfloat16, (2,)),
    "N=17 G=1 D=128 fp32": (17, 1, 1, 128, torch.float32, (1,)),
    "N=65 G=1 D=64 bf16": (65, 1, 1, 64, torch.bfloat16, (1,)),
}
"""Nodes, group, key heads, head dimension, dtype, and about how many blocks of slots are committed."""


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_reference(shape: str) -> None:
    """Lengths of whole blocks, one less and one more, in splits of which some stay empty."""
    nodes, group, heads, dim, dtype, counts = SHAPES[shape]
    block = kernel.shape_of(nodes * group, dtype).block
    lengths = sorted({max(0, count * block + step) for count in counts for step in (-1, 0, 1)})
    of = case(nodes, group, heads, lengths, dim, dtype)
    out = of.run(splits=3)
    assert out.shape == of.q.shape and out.dtype == dtype and out.is_contiguous()
    assert of.error(out) < tolerance(dtype)
    assert nodes < 3 or out[:, nodes // 2].eq(0).all(), "a node that was dropped gets 0"


@pytest.mark.usefixtures("poison")
def test_rows_beyond_the_largest_tile() -> None:
    of = case(65, 4, 1, [9], dtype=torch.bfloat16)
    assert of.error(of.run(splits=1)) < tolerance(torch.bfloat16)


@pytest.mark.usefixtures("poison")
def test_a_mask_of_three_words() -> None:
    of = case(130, 1, 1, [3], dtype=torch.float16)
    assert of.ancestors.shape[2] == 3
    assert of.error(of.run(splits=1)) < tolerance(torch.float16)


def test_the_number_of_splits_does_not_matter() -> None:
    of = case(2, 2, 1, [75])
    for splits in (None, 1, 2, 9):
        assert of.error(of.run(splits=splits)) < SUMS


def test_how_many_splits() -> None:
    assert kernel.splits_for(1, 8, 1, 131072) * 8 in range(256, 265), "one request keeps the whole GPU busy"
    assert kernel.splits_for(64, 8, 1, 131072) == 1, "enough without"
    assert kernel.splits_for(1, 1, 1, 300) == 2, "none is tiny"
    assert kernel.splits_for(1, 8, 1, 0) == 1


def test_a_tree_that_runs_out_of_the_cache() -> None:
    """What has no slot is not seen, not even by itself; lengths beyond the capacity end there."""
    of = case(5, 1, 1, [20, 23, 99], slots=23, dtype=torch.float16)
    assert of.error(of.run()) < tolerance(torch.float16)
    inside = replace(of, lengths=of.lengths.clamp(max=23))
    assert torch.equal(of.run(), inside.run())


def test_a_negative_length_is_none() -> None:
    of = case(5, 1, 1, [0, 0])
    for lengths in (torch.tensor([-1, -(2**40)]), torch.full((2,), -(2**63))):
        assert torch.equal(replace(of, lengths=lengths).run(), of.run())


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_scores_of_ten_thousand(dtype: torch.dtype, side: int) -> None:
    """All scores of a node are ten thousand, more or less: in float32 their differences have an error of some ulps of
    that, and so have the weights, but nothing overflows or vanishes."""
    of = case(3, 2, 1, [40, 7], dtype=dtype)
    of.q[..., 0], of.keys[..., 0] = 100, 800 * side  # times 64 ** -0.5
    assert of.error(of.run(splits=2)) < tolerance(dtype) + 16 * 1e4 * 2.0**-24


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_nan_is_not_hidden() -> None:
    """A query of NaN gives NaN, not 0, and to that node only."""
    of = case(5, 1, 1, [20])
    of.q[:, 3] = torch.nan
    out, expected = of.run(), of.expected()
    assert out[:, 3].isnan().all() and torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize(("batch", "nodes", "slots"), [(0, 2, 9), (2, 0, 9), (2, 3, 0)])
def test_no_requests_no_nodes_no_slots(batch: int, nodes: int, slots: int) -> None:
    cache = torch.full((batch, 1, slots, 64), torch.nan)
    masks = torch.ones(batch, nodes, -(-nodes // 64), dtype=torch.int64)
    of = Case(torch.ones(batch, nodes, 1, 64), cache, cache, torch.full((batch,), 4), masks)
    out = of.run()
    assert out.shape == (batch, nodes, 1, 64) and out.eq(0).all()


def test_queries_with_gaps() -> None:
    of = case(3, 2, 1, [20])
    wide = torch.randn(1, 3, 2, 128)
    wide[..., ::2] = of.q
    assert torch.equal(replace(of, q=wide[..., ::2]).run(), of.run())


def test_offsets_beyond_32_bits() -> None:
    """Rows of the batch more than 2^31 elements apart; memory that nobody writes costs nothing."""
    of = case(1, 1, 1, [4, 5], dtype=torch.bfloat16, slots=8)
    far = [torch.empty(2**31 + 2048, dtype=torch.bfloat16).as_strided(of.keys.shape, (2**31, 512, 64, 1)) for _ in "kv"]
    for plane, like in zip(far, (of.keys, of.values), strict=True):
        plane.copy_(like)
    assert torch.equal(replace(of, keys=far[0], values=far[1]).run(), of.run())


@pytest.mark.parametrize(("dtype", "nodes"), [(torch.float32, 5), (torch.bfloat16, 33)], ids=["fp32", "two tiles"])
def test_bytes(traffic: Any, dtype: torch.dtype, nodes: int) -> None:
    """Keys and values are read once for each tile of rows; the formula is exact where a tile's rows see every slot."""
    of = case(nodes, 4, 2, [0, 70], dtype=dtype, parents=torch.arange(-1, nodes - 1).expand(2, -1))
    of.ancestors.fill_(-1)
    tiles = -(-nodes * 4 // kernel.shape_of(nodes * 4, dtype).rows)
    with traffic(cache=[of.keys, of.values]) as moved:
        of.run(splits=3)
    assert moved.loaded["cache"] == 2 * tiles * (70 + 2 * nodes) * 2 * 64 * dtype.itemsize
    assert moved.bytes == kernel.bytes_moved([0, 70], nodes, 8, 2, 64, dtype.itemsize, splits=3)


def test_the_call_is_that_of_the_reference() -> None:
    assert inspect.signature(kernel.tree_attention) == inspect.signature(reference)
    of = case(2, 1, 1, [4])
    assert torch.equal(kernel.tree_attention(of.q, of.keys, of.values, of.lengths, of.ancestors), of.run())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a dtype of float64": ({"q": torch.zeros(2, 3, 4, 64).double()}, "q of dtype"),
    "keys of another dtype": ({"keys": torch.zeros(2, 2, 9, 64).half()}, "keys of dtype"),
    "a head dimension of 32": (
        {"q": torch.zeros(2, 3, 4, 32), "keys": torch.zeros(2, 2, 9, 32), "values": torch.zeros(2, 2, 9, 32)},
        "head dimension",
    ),
    "heads that do not divide": ({"q": torch.zeros(2, 3, 5, 64)}, "multiple of the key heads"),
    "no dimensions": ({"q": torch.zeros(3)}, "q of shape"),
    "values of another shape": ({"values": torch.zeros(2, 2, 8, 64)}, "values of shape"),
    "lengths of another batch": ({"lengths": torch.zeros(3, dtype=torch.int64)}, "lengths of shape"),
    "too few words": ({"ancestors": torch.zeros(2, 3, 0, dtype=torch.int64)}, "ancestors of shape"),
    "queries of integers": ({"q": torch.zeros(2, 3, 4, 64, dtype=torch.int32)}, "q of dtype"),
    "lengths of 32 bits": ({"lengths": torch.zeros(2, dtype=torch.int32)}, "lengths of dtype"),
    "no key heads": (dict.fromkeys(("keys", "values"), torch.zeros(2, 0, 9, 64)), "multiple of the key heads"),
    "32-bit masks": ({"ancestors": torch.zeros(2, 3, 1, dtype=torch.int32)}, "ancestors of dtype"),
    "slots on the last dimension": ({"keys": torch.zeros(2, 2, 64, 9).mT}, "last dimension"),
    "slots far apart": (
        dict.fromkeys(("keys", "values"), torch.zeros(64).as_strided((2, 2, 1, 64), (0, 0, 2**25, 1))),
        "apart",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(SpecDecodeError, match=message) as caught:
        replace(case(3, 2, 2, [4, 2], slots=9), **change).run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", ["a sibling", "the future", "another parent", "one slot less", "one slot more", "another head"]
)
def test_the_comparison_sees_what_a_node_must_not(wrong: str) -> None:
    """The kernel on wrong inputs is far from the reference on the right ones."""
    right = case(5, 2, 2, [33], parents=torch.tensor([[-1, 0, 0, 1, 2]]), slots=40)
    right.keys[:, :, 38], right.values[:, :, 38] = right.keys[:, :, 0], right.values[:, :, 0]
    masks, heads = right.ancestors.clone(), right.q.unflatten(2, (2, 2))
    if wrong in ("a sibling", "the future"):
        masks[0, 2] |= 1 << (1 if wrong == "a sibling" else 3)
    elif wrong == "another parent":
        masks = topology(torch.tensor([[-1, 0, 0, 2, 2]])).ancestors
    step = {"one slot less": -1, "one slot more": 1}.get(wrong, 0)
    q = heads.transpose(2, 3).flatten(2, 3) if wrong == "another head" else right.q
    out = replace(right, q=q, ancestors=masks, lengths=right.lengths + step).run()
    assert right.error(right.run()) < SUMS
    assert right.error(out) > 100 * SUMS


MUTANTS = {
    "siblings and the future": ("(word[:, None] >> (first % WORD + slot)) & 1 == 1", "first + slot <= node[:, None]"),
    "descendants for ancestors": ("& 1 == 1) &", "& 1 == 0) &"),
    "the first word only": ("masks + first // WORD", "masks"),
    "one slot behind the end": ("start + slot < end", "start + slot <= end"),
    "a split that runs into the tree": ("tl.minimum(begin + chunk, length)", "begin + chunk"),
    "a ragged end that is lost": (
        "begin + (end - begin) // BLOCK * BLOCK",
        "begin + tl.cdiv(end - begin, BLOCK) * BLOCK",
    ),
    "no word at all": ("mask=inside & in_tree", "mask=inside & (row < 0)"),
    "what nobody sees": ("tl.max(seen.to(tl.int32), 0) == 1", "start + slot < slots"),
    "no node": ("(bits != 0) & (total != 0)", "total != 0"),
    "the tree left out": ("tl.where(step == filled, splits, step)", "step"),
    "splits of equal weight": ("tl.exp2(one - against)", "tl.exp2(one - one)"),
    "no rescaling": ("acc * fade[:, None], WIDEN", "acc, WIDEN"),
    "base e": ("** -0.5 * LOG2_E", "** -0.5"),
}


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_kills_a_wrong_kernel(
    name: str, tmp_path: Path, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own source with one error, on one case: more than a word of nodes, a dropped one, a ragged end."""
    for module in (kernel, splits_file):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    of = case(66, 1, 1, [200], dtype=torch.float16)
    assert of.error(of.run(mutant(tmp_path, *MUTANTS[name]), splits=3)) > 4 * tolerance(torch.float16)


def mutant(folder: Path, right: str, wrong: str) -> ModuleType:
    """The kernel with one error, which is in its own file or in that of the splits."""
    files = [splits_file, kernel]
    assert sum(Path(file.__file__).read_text().count(right) for file in files) == 1
    for file in files:
        path = folder / Path(file.__file__).name
        path.write_text(Path(file.__file__).read_text().replace(right, wrong))
        spec = spec_from_file_location(file.__name__, path)
        assert spec and spec.loader
        module = module_from_spec(spec)
        sys.modules[file.__name__] = module  # for the next one to import, until the fixture puts the right one back
        spec.loader.exec_module(module)
    return module
