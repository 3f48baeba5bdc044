"""Compiled without a GPU: the kernels as they are, and kernels with a fault that must be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import triton
from specdecode_kernels import aot
from specdecode_kernels.variant import Variant

VARIANT = Variant("k", None, {}, registers=64, dot=True)
ROW = aot.Row("k", 90, 64, 0, 227 * 1024, 0, 1600, 100, 4, 1, "wgmma.mma_async")


def test_all_kernels(tmp_path: Path) -> None:
    """The default shapes for sm_90, against the caps and the committed table; TRITON_INTERPRET is not in the way."""
    file = tmp_path / "table.json"
    done = subprocess.run(
        [sys.executable, "-m", "specdecode_kernels.aot", "--arch", "90", "--json", file],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(file.read_text())
    assert table["triton"] == triton.__version__
    assert all(f"{row['registers']}" in done.stdout for row in table["rows"])
    products = {row["tensor"] for row in table["rows"] if row["name"].startswith("tree_attention")}
    assert products == {"", "mma.sync", "wgmma.mma_async"}


def test_no_kernel_is_forgotten() -> None:
    folder = Path(aot.__file__).parent
    launched = {
        file.stem for file in folder.glob("*.py") if "](" in file.read_text() and "@triton.jit" in file.read_text()
    }
    assert launched <= set(aot.modules())


def test_what_a_row_may_be() -> None:
    assert aot.faults(VARIANT, ROW) == []
    plain = replace(VARIANT, wide=False, dot=False)
    assert aot.faults(plain, replace(ROW, wide=0, tensor="")) == []
    assert aot.faults(VARIANT, replace(ROW, arch=80, shared=163 * 1024, tensor="mma.sync")) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stack": 8}, "stack of 8 bytes"),
        ({"spills": 2}, "spills"),
        ({"registers": 65}, "65 registers, the cap is 64"),
        ({"shared": 227 * 1024 + 1}, "shared memory"),
        ({"arch": 80, "tensor": "mma.sync"}, "shared memory"),
        ({"wide": 0}, "no read of 16 bytes"),
        ({"tensor": "mma.sync"}, "no wgmma.mma_async"),
        ({"tensor": ""}, "no product"),
    ],
)
def test_what_a_row_must_not_be(change: dict[str, object], message: str) -> None:
    (fault,) = aot.faults(VARIANT, replace(ROW, **change))
    assert message in fault


def test_growth_is_told() -> None:
    table = {"triton": triton.__version__, "rows": [asdict(ROW)]}
    assert aot.regressions([ROW, replace(ROW, registers=50, instructions=102)], table) == []
    for what in ("registers", "shared", "instructions", "narrow"):
        grown = replace(ROW, **{what: 2 * getattr(ROW, what)})
        (text,) = aot.regressions([grown], table)
        assert what in text
        assert aot.regressions([grown], {**table, "triton": "3.6.0"}) == [], "another compiler, another code"
    (text,) = aot.regressions([replace(ROW, name="new")], table)
    assert "not in aot.json" in text


def test_an_unknown_machine_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert aot.main(["--arch", "90,70"]) == 1
    assert capsys.readouterr().err == "expected --arch with some of 80, 90, 100; got '70'; separate by commas\n"


KERNELS = """
import triton
import triton.language as tl


@triton.jit
def copy(x, y, stride, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y + index, tl.load(x + index * stride))


@triton.jit
def shift(x, y, start, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y + index, tl.load(x + start + index))


@triton.jit
def hold(x, y, count, SIZE: tl.constexpr):
    held = tl.load(x + tl.arange(0, SIZE))
    for i in range(count):
        held = held * held + tl.load(x + i)
    tl.store(y + tl.arange(0, SIZE), held)


@triton.jit
def product(x, y, ROWS: tl.constexpr):
    tile = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)
    a = tl.load(x + tile)
    tl.store(y + tile, tl.dot(a, a).to(tl.bfloat16))
"""

JOB = """
import json
from bad import *
from specdecode_kernels import aot
from specdecode_kernels.variant import Variant, int32

floats, halves = {"x": "*fp32", "y": "*fp32"}, {"x": "*bf16", "y": "*bf16"}
found = {}
for variant in (
    Variant("good", copy, floats, {"SIZE": 1024, "stride": 1}),
    Variant("strided", copy, floats | {"stride": "i32"}, {"SIZE": 1024}),
    Variant("aligned", shift, floats | {"start": int32(64)}, {"SIZE": 1024}),
    Variant("not aligned", shift, floats | {"start": int32(65)}, {"SIZE": 1024}),
    Variant("greedy", copy, floats, {"SIZE": 1024, "stride": 1}, registers=8),
    Variant("spilled", hold, floats | {"count": "i32"}, {"SIZE": 8192}, warps=1, registers=255),
    Variant("large tile", product, halves, {"ROWS": 64}, dot=True),
    Variant("small tile", product, halves, {"ROWS": 16}, wide=False, dot=True),
):
    row = aot.compiled(variant, 90)
    found[variant.name] = aot.faults(variant, row)
try:
    aot.compiled(Variant("typeless", copy, floats, {"SIZE": 1024}), 90)
except aot.InputError as error:
    found["typeless"] = [str(error)]
print(json.dumps(found))
"""


def test_faults_of_real_code_are_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(KERNELS)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {
        "good": [],
        "strided": ["no read of 16 bytes"],
        "aligned": [],
        "not aligned": ["no read of 16 bytes"],
        "greedy": ["registers, the cap is 8"],
        "spilled": ["stack of", "spills"],
        "large tile": [],
        "small tile": ["no wgmma.mma_async, but mma.sync"],
        "typeless": ["expected a type or a constant for each argument of typeless; got ['stride']"],
    }
    assert found.keys() == expected.keys()
    for name, faults in found.items():
        assert len(faults) == len(expected[name]), name
        assert all(text in fault for text, fault in zip(expected[name], faults, strict=True)), name
