"""Every kernel compiled ahead of time, without a GPU: does it fit, does it spill, does it read 16 bytes at a time?

    python -m specdecode_kernels.aot --arch 90 --json table.json      # the default shapes
    python -m specdecode_kernels.aot --arch 80,90,100 --full          # every shape in use
    python -m specdecode_kernels.aot --update                         # rewrites the committed table, `aot.json`

Triton needs no device to produce machine code, and the code tells what no interpreted test can:

    variants(full) of each module  ->  Triton  ->  PTX: width of the loads, wgmma or mma
                                               ->  cubin: registers, stack, shared memory, instructions

What must hold for each: no stack and no spills, registers within the variant's cap, shared memory within the machine's,
at least one 16-byte read where reads are large (`wide`), and wgmma on sm_90 where matrices are multiplied (`dot`; only
for tiles of 64 rows or more, since wgmma has no smaller one). The committed table adds what no cap can say: nothing has
grown. It holds for one version of Triton; another's code is judged by the rest alone.

When a kernel is launched, Triton looks which pointers and integers are multiples of 16, and the width of the loads
depends on it. Here pointers are taken to be, as torch allocates them, and of the integers those whose type says so
(`Variant.types`), such as vocabularies and strides.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdecode_kernels.variant import Variant
from specdecode_ref.errors import InputError, SpecDecodeError, UnknownNameError

SHARED = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory a program can have."""

TENSOR_CORES = {80: ("mma.sync",), 90: ("wgmma.mma_async",), 100: ("tcgen05.mma", "mma.sync")}
"""The instructions of PTX that multiply matrices as they should; any of them will do."""

COMMITTED = Path(__file__).with_name("aot.json")

WORKERS = 2

SLACK = 1.02
"""Growth over the committed table that is let pass."""

_WIDE = re.compile(
    r"\bld\.(?:relaxed\.\w+\.|volatile\.)?global\S*\.(?:v4\.[busf]32|v2\.[busf]64|v8\.[busf]16|v8\.[busf]32|v4\.[busf]64)\b"
    r"|\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (?:0x10|16)\b"
    r"|\bcp\.async\.bulk\."
)
_LOAD = re.compile(r"\bld\.(?:relaxed\.\w+\.|volatile\.)?global|\bcp\.async\.(?:c[ag]|bulk\S*)\.shared")


@dataclass(frozen=True)
class Row:
    """What one compiled variant came to.

    spills: instructions that load or store local memory. code: bytes of it. wide, narrow: reads of global memory in the
    PTX, of 16 bytes or more and of less. tensor: which instruction multiplies matrices, "" for none.
    """

    name: str
    arch: int
    registers: int
    stack: int
    shared: int
    spills: int
    code: int
    instructions: int
    wide: int
    narrow: int
    tensor: str


def compiled(variant: Variant, arch: int) -> Row:
    """Compile one variant for sm_<arch>. Raises SpecDecodeError where Triton cannot."""
    kernel = variant.kernel
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    types = {name: variant.types.get(name, "") for name in kernel.arg_names if name not in variant.constants}
    if missing := [name for name, type_ in types.items() if not type_]:
        raise InputError(
            f"a type or a constant for each argument of {variant.name}", missing, "add them to its variant"
        )
    constants = {name: value for name, value in variant.constants.items() if name in kernel.arg_names}
    signature = {name: types[name].removesuffix(":16") if name in types else "constexpr" for name in kernel.arg_names}
    aligned = [name for name, type_ in types.items() if type_.startswith("*") or type_.endswith(":16")]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, hints)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    try:
        out = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # the compiler's own, of many kinds: the reader wants to know which kernel it was
        raise SpecDecodeError(f"{variant.name} to compile for sm_{arch}", error, "mend the kernel") from error
    return _row(variant.name, arch, out)


def _row(name: str, arch: int, out: Any) -> Row:
    ptx, cubin = out.asm["ptx"], out.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("cuobjdump", "-sass", file.name)
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    # One line an instruction, its address first: /*0a50*/ LDGSTS.E.BYPASS.128 ...;
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+ )?(\w+)[^;]*;", code, re.MULTILINE)
    wide, loads = len(_WIDE.findall(ptx)), len(_LOAD.findall(ptx))
    return Row(
        name=name,
        arch=arch,
        registers=used["REG"],
        stack=used["STACK"],
        shared=max(used["SHARED"], out.metadata.shared),
        spills=sum(operation in ("STL", "LDL") for _, operation in lines),
        code=int(lines[-1][0], 16) + 16,
        instructions=sum(operation != "NOP" for _, operation in lines),
        wide=wide,
        narrow=loads - wide,
        tensor=next((op for op in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if op in ptx), ""),
    )


def _tool(name: str, *arguments: str) -> str:
    """What one of the CUDA tools prints that come with Triton."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def faults(variant: Variant, row: Row) -> list[str]:
    """What is wrong with a compiled variant, a sentence each."""
    limit, wanted = SHARED[row.arch] * 1024, TENSOR_CORES[row.arch]
    wrong = [
        (row.stack > 0, f"has a stack of {row.stack} bytes, it must have none"),
        (row.spills > 0, f"spills: {row.spills} loads and stores of local memory"),
        (row.registers > variant.registers, f"takes {row.registers} registers, the cap is {variant.registers}"),
        (row.shared > limit, f"takes {row.shared} bytes of shared memory, sm_{row.arch} has {limit}"),
        (variant.wide and not row.wide, f"has no read of 16 bytes, and {row.narrow} of less"),
        (variant.dot and row.tensor not in wanted, f"has no {' or '.join(wanted)}, but {row.tensor or 'no product'}"),
    ]
    return [f"{row.name} on sm_{row.arch} {text}" for holds, text in wrong if holds]


def regressions(rows: Iterable[Row], table: dict[str, Any]) -> list[str]:
    """What has grown since the committed table, or is not in it. Nothing, if that is of another version of Triton."""
    if table["triton"] != triton.__version__:
        return []
    known = {(old["name"], old["arch"]): old for old in table["rows"]}
    out = []
    for row in rows:
        old = known.get((row.name, row.arch))
        if old is None:
            out.append(f"{row.name} on sm_{row.arch} is not in {COMMITTED.name}")
            continue
        for what in ("registers", "shared", "instructions", "narrow"):
            if getattr(row, what) > old[what] * SLACK:
                out.append(f"{row.name} on sm_{row.arch} has grown: {what} {old[what]} -> {getattr(row, what)}")
    return out


def modules() -> list[str]:
    """The modules of this package that have kernels: those that define `variants`."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem for file in files if "\ndef variants(" in file.read_text())


def compile_all(full: bool, archs: Sequence[int], names: Sequence[str] = ()) -> tuple[list[Row], list[str]]:
    """The rows of all variants for all machines, and all their faults. Compiles in processes of their own.

    names: of modules; all that have kernels where none is given.
    """
    found = [(name, i) for name in names or modules() for i, _ in enumerate(_variants(name, full))]
    jobs = [(name, i, full, arch) for arch in archs for name, i in found]
    with tempfile.TemporaryDirectory() as cache:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(WORKERS, context, _start, (cache,)) as pool:
            results = list(pool.map(_job, jobs))
    rows = [row for row, _ in results if row]
    return rows, list(chain.from_iterable(wrong for _, wrong in results))


def _start(cache: str) -> None:
    """A worker compiles afresh: nothing of an earlier run's cache."""
    os.environ["TRITON_CACHE_DIR"] = cache


def _job(job: tuple[str, int, bool, int]) -> tuple[Row | None, list[str]]:
    module, i, full, arch = job
    variant = _variants(module, full)[i]
    try:
        row = compiled(variant, arch)
    except SpecDecodeError as error:
        return None, [str(error)]
    return row, faults(variant, row)


def _variants(module: str, full: bool) -> list[Variant]:
    return list(import_module(f"specdecode_kernels.{module}").variants(full))


def _show(rows: Sequence[Row]) -> None:
    table = Table("kernel", "sm", "regs", "shared", "code", "instr", "wide", "narrow", "product")
    for row in rows:
        numbers = (row.arch, row.registers, row.shared, row.code, row.instructions, row.wide, row.narrow)
        table.add_row(row.name, *map(str, numbers), row.tensor.partition(".")[0])
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _json(rows: Sequence[Row]) -> str:
    """A row a line, so that a change of the committed table reads well."""
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    return f'{{"triton": "{triton.__version__}", "rows": [\n{lines}\n]}}\n'


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m specdecode_kernels.aot", description="Compile all kernels, without a GPU."
    )
    parser.add_argument("--arch", default="90", help="machines, for instance 80,90,100")
    parser.add_argument("--full", action="store_true", help="every shape in use, not the default ones alone")
    parser.add_argument("--module", action="append", choices=modules(), help="of this module only; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--update", action="store_true", help=f"rewrite {COMMITTED.name}, the table of sm_90")
    return parser.parse_args(argv)


def _archs(text: str) -> list[int]:
    for arch in text.split(","):
        if arch not in map(str, SHARED):
            raise UnknownNameError(
                f"--arch with some of {', '.join(map(str, SHARED))}", repr(arch), "separate by commas"
            )
    return [int(arch) for arch in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table, say on standard error what is wrong. Returns 1 where something is."""
    arguments = _arguments(argv)
    try:
        archs = _archs(arguments.arch)
    except SpecDecodeError as error:
        print(error, file=sys.stderr)
        return 1
    rows, wrong = compile_all(arguments.full, archs, arguments.module or ())
    _show(rows)
    if arguments.json:
        arguments.json.write_text(_json(rows))
    if arguments.update and not wrong:
        if arguments.full or archs != [90] or arguments.module:
            wrong = ["expected --update of the default shapes of all modules for sm_90; got others; leave them away"]
        else:
            COMMITTED.write_text(_json(rows))
    elif not arguments.full:
        grown = regressions((row for row in rows if row.arch == 90), json.loads(COMMITTED.read_text()))
        wrong += [f"{text}; if that is meant: python -m specdecode_kernels.aot --update" for text in grown]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    if os.environ.pop("TRITON_INTERPRET", None):  # kernels made for the interpreter cannot be compiled: start again
        os.execv(sys.executable, [sys.executable, "-m", "specdecode_kernels.aot", *sys.argv[1:]])
    sys.exit(main())
