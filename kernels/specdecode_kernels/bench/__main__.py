"""Check and time all kernels on the GPU that is there, beside what others do.

    python -m specdecode_kernels.bench --json results.json          # up to five minutes on an H100 or H200
    python -m specdecode_kernels.bench --model                      # what the byte counts predict; needs no GPU
    TRITON_INTERPRET=1 python -m specdecode_kernels.bench --smoke   # every case once on a CPU; its figures mean nothing

Correctness comes first, beside the copy bandwidth that all shares refer to, then the kernels one by one, and the whole
loop with SYNTHETIC acceptance. The file is written anew after every case. Exit code: 0, 1 where a check or a kernel
failed, 2 where nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdecode_kernels import launch, picking
from specdecode_kernels.bench import goals, model, run
from specdecode_kernels.bench.stand import Record
from specdecode_ref.whole_file import whole_file

SCHEMA = "specdec-kernel-bench/1"

MEASURED, SMOKE = "measured", "smoke run: figures mean nothing"
"""What stands above the figures."""

FAILED, NOTHING_RUN, INTERRUPTED = 1, 2, 130
"""Exit codes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench as the arguments say; returns the exit code."""
    arguments = _arguments(argv)
    if arguments.model:
        return _model(arguments)
    if objection := _objection(arguments.smoke) or _written(arguments.json, report({}, [], arguments.smoke)):
        print(objection, file=sys.stderr)
        return NOTHING_RUN
    out = Console(width=None if sys.stdout.isatty() else 120)
    about = run.environment(smoke=True) if arguments.smoke else {}
    records: list[Record] = []
    interrupted, unwritten = False, None
    try:
        for item in run.here() if arguments.smoke else run.apart():
            if isinstance(item, dict):
                about = item
            else:
                records.append(item)
                out.print(_line(item, records, arguments.smoke), markup=False, highlight=False)
            unwritten = _written(arguments.json, report(about, records, arguments.smoke))
    except KeyboardInterrupt:
        interrupted = True
    _show(out, about, records, arguments.smoke)
    failed = run.failures(records)
    for record in failed:
        print(f"failed: {record.section}: {record.name}: {record.reason}", file=sys.stderr)
    if unwritten:
        print(unwritten, file=sys.stderr)
    return INTERRUPTED if interrupted else FAILED if failed or unwritten else 0


def report(about: dict[str, str], records: Iterable[Record], smoke: bool) -> dict[str, Any]:
    """The run as JSON. Figures of a smoke run stand under another key, and no goal is judged by them."""
    records = list(records)
    judged = goals.goals([] if smoke else records, about.get("card", ""))
    return {
        "schema": SCHEMA,
        "label": SMOKE if smoke else MEASURED,
        "measured": not smoke,
        "environment": about,
        "cases": [_case(record, records, smoke) for record in records],
        "goals": [goal._asdict() for goal in judged],
    }


def _case(record: Record, records: Sequence[Record], smoke: bool) -> dict[str, Any]:
    out = asdict(record)
    if smoke:
        out["smoke_figures"] = out.pop("figures")
    elif (share := _share(record, records)) is not None:
        out["figures"]["share_of_copy_bandwidth"] = share
    return out


def _share(record: Record, records: Sequence[Record]) -> float | None:
    rate = record.figures.get("gigabytes_per_second")
    copy = goals.Board(records, "").copy
    return rate / copy if rate and copy else None


def _line(record: Record, records: Sequence[Record], smoke: bool) -> str:
    text = f"{record.section:<9} {record.name:<60} {record.status}"
    if record.reason:
        return f"{text}: {record.reason}"
    if smoke:
        return text
    figures = record.figures
    if "speedup" in figures:
        rates = [figures[name]["tokens_per_second"] for name in ("plain", "speculative")]
        text += f"  {rates[0]:.0f} and {rates[1]:.0f} tokens/s, ratio {figures['speedup']:.2f}"
        text += f", predicted {figures['predicted_speedup']:.2f}"
        return f"{text}, host gap {100 * figures['speculative']['host_gap_share']:.1f}%"
    if "microseconds" in figures:
        text += f"  {figures['microseconds']:9.2f} µs"
    if "gigabytes_per_second" in figures:
        text += f"  {figures['gigabytes_per_second']:7.0f} GB/s"
        share = _share(record, records)
        text += f"  {100 * share:5.1f}% of copy" if share is not None else ""
    return text


def _show(out: Console, about: dict[str, str], records: Sequence[Record], smoke: bool) -> None:
    """The goals, each beside what was found; of a smoke run, which can meet none, how its cases ended."""
    if smoke:
        ended = Counter(record.status for record in records)
        out.print(f"{SMOKE}; {', '.join(f'{count} {status}' for status, count in ended.items())}", highlight=False)
        return
    table = Table("goal", "found", "", title=f"{MEASURED}: {about.get('card', '')}")
    for goal in goals.goals(records, about.get("card", "")):
        table.add_row(goal.goal, goal.found, goal.verdict)
    out.print(table)


def _model(arguments: argparse.Namespace) -> int:
    bandwidths = dict(zip(map(str, arguments.bandwidth), arguments.bandwidth, strict=True))
    bandwidths = {f"{name} TB/s": value for name, value in bandwidths.items()} or model.BANDWIDTHS
    found = model.report(bandwidths)
    columns = [f"{card}, µs" for card in bandwidths]
    speeds = ", ".join(f"{card} {value} TB/s" for card, value in bandwidths.items())
    table = Table("kernel", "MB", *columns, title=f"{model.LABEL}: bytes moved over {speeds}")
    for line in model.lines():
        times = (f"{model.expected_microseconds(line.bytes, value):.2f}" for value in bandwidths.values())
        table.add_row(line.what, f"{line.bytes / 1e6:.3f}", *times)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if complaint := _written(arguments.json, {"schema": SCHEMA, **found}):
        print(complaint, file=sys.stderr)
        return NOTHING_RUN
    return 0


def _objection(smoke: bool) -> str | None:
    """Why nothing can be run, one line, or None."""
    interpreted = launch.interpreted(picking.first_above)
    if smoke and not interpreted:
        return "a smoke run goes through Triton's interpreter: set TRITON_INTERPRET=1"
    if smoke:
        return None
    if not torch.cuda.is_available():
        return "no CUDA device: run it on one, or see --model, or --smoke with TRITON_INTERPRET=1"
    return "TRITON_INTERPRET is set, so no kernel would run on the GPU: unset it" if interpreted else None


def _written(path: Path | None, content: dict[str, Any]) -> str | None:
    """Write the file, if one was asked for; why that failed, one line, or None."""
    if path is None:
        return None
    try:
        with whole_file(path) as part:
            part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    except (OSError, ValueError) as error:
        return f"--json {path} cannot be written ({getattr(error, 'strerror', None) or error}): choose another place"
    return None


def _speed(text: str) -> float:
    """A bandwidth that something can be divided by."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a bandwidth above 0 is wanted, not {text}")
    return value


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m specdecode_kernels.bench", description="Check and time the kernels.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, anew after every case")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--model", action="store_true", help="print what the byte counts predict; measures nothing")
    how.add_argument("--smoke", action="store_true", help="every case once on the CPU, to see that it runs")
    parser.add_argument(
        "--bandwidth",
        type=_speed,
        nargs="+",
        default=[],
        metavar="TB/S",
        help="for --model, in place of H100's and H200's",
    )
    arguments = parser.parse_args(argv)
    if arguments.bandwidth and not arguments.model:
        parser.error("--bandwidth goes with --model: a run measures its own")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
