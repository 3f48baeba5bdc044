"""All cases of a run in a process of their own, which may crash or hang without taking the others along.

    parent   watches, prints, keeps the file      <- began, ended -     worker   runs one case after the other
               |
               +- no word for too long, or the worker is dead: the case has failed, another worker takes the next one

An illegal access leaves a CUDA context that answers nothing but errors, so a worker that sees one leaves, and its
successor begins behind the failed case. No case begins after the deadline of its section; what a section leaves of its
time is the next one's.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import triton

from specdecode_kernels.bench import attention, checks, loop, small, verify
from specdecode_kernels.bench.stand import Case, Figures, Record, Stand, outcome

SECONDS = {"bandwidth": 10, "checks": 90, "verify": 55, "attention": 50, "small": 15, "loop": 50}
"""What each section may take, in the order they run: 270 in all, and the last case may end late."""

PATIENCE = 90
"""Seconds without a word after which a case is taken to hang."""

LEAVING = 20
"""Seconds that a worker has to end when its work has."""

COPY_BYTES = 2**31

Plan = Callable[[bool], Iterator[Case]]
"""smoke -> cases."""


@dataclass(frozen=True)
class Task:
    """What a worker is to do. began: on the monotonic clock, which all processes share. done: (section, name)."""

    plan: Plan
    smoke: bool
    began: float
    done: frozenset[tuple[str, str]]


def cases(smoke: bool) -> Iterator[Case]:
    """All of the bench."""
    yield Case("bandwidth", "copy", _copy)
    for section in (checks, verify, attention, small, loop):
        yield from section.cases(smoke)


def _copy(stand: Stand) -> Figures:
    """From one place on the device to another: what can be had of the memory, read and written."""
    size = 2**16 if stand.smoke else COPY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=stand.device)
    target = torch.empty_like(source)
    return stand.timed([lambda: target.copy_(source)], 2 * size, launches=4)


def environment(smoke: bool) -> dict[str, str]:
    """What the figures were found on and with."""
    card = platform.processor() or platform.machine() if smoke else torch.cuda.get_device_name()
    return {
        "card": card,
        "driver": "" if smoke else _driver(),
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": " ".join(("python -m specdecode_kernels.bench", *sys.argv[1:])),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return out.split("\n")[0].strip()


def here(plan: Plan = cases) -> Iterator[Record]:
    """The records of a smoke run, in this process."""
    stand = Stand(smoke=True)
    for case in plan(True):
        yield outcome(case, stand)


def apart(
    plan: Plan = cases, smoke: bool = False, patience: float = PATIENCE, start_by: str = "spawn"
) -> Iterator[dict[str, str] | Record]:
    """The environment, then a record for each case, from workers that are replaced when they die.

    start_by: as `multiprocessing` names it; a fork cannot use a GPU.
    """
    context: Any = multiprocessing.get_context(start_by)
    began, told = time.monotonic(), False
    done: set[tuple[str, str]] = set()
    while True:
        mine, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(theirs, Task(plan, smoke, began, frozenset(done))))
        worker.start()
        theirs.close()
        running: tuple[tuple[str, str], bool] | None = None
        start = time.monotonic()
        known = len(done)
        word: Any = ("started", None)
        try:
            while (word := _next(mine, patience))[0] not in ("left", "hangs", "finished"):
                if word[0] == "environment" and not told:
                    told = True
                    yield word[1]
                elif word[0] == "began":
                    running, start = word[1], time.monotonic()
                elif word[0] == "ended":
                    running = None
                    done.add((word[1].section, word[1].name))
                    yield word[1]
        finally:
            if word[0] not in ("left", "finished"):
                worker.kill()
            worker.join(LEAVING)
            worker.kill()
        if word[0] == "finished":
            return
        if running is None and len(done) > known:  # it left between two cases, having reported why
            continue
        (section, name), peer = running or (("checks", "a worker starts"), False)
        reason = f"no word in {patience:.0f} s" if word[0] == "hangs" else f"its process ended ({worker.exitcode})"
        yield Record(section, name, "skipped" if peer else "failed", reason, seconds=time.monotonic() - start)
        if running is None:
            return
        done.add((section, name))


def _next(connection: Connection, patience: float) -> tuple[str, Any]:
    try:
        return connection.recv() if connection.poll(patience) else ("hangs", None)
    except (EOFError, OSError):
        return "left", None


def work(connection: Connection, task: Task) -> None:
    """Run what is not done yet, and tell. Ctrl-C is the parent's to hear: it ends its worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stand = Stand(task.smoke)
    connection.send(("environment", environment(task.smoke)))
    ends = _deadlines(task.began)
    for case in task.plan(task.smoke):
        key = (case.section, case.name)
        if key in task.done:
            continue
        if time.monotonic() > ends[case.section]:
            connection.send(("ended", Record(*key, "skipped", "the time of its section was used up")))
            continue
        connection.send(("began", (key, case.peer)))
        record = outcome(case, stand)
        connection.send(("ended", record))
        if not _answers(stand):
            os._exit(1)  # the device would not let it end in order
        stand.sweep()
    connection.send(("finished", None))


def _deadlines(began: float) -> Mapping[str, float]:
    ends, total = {}, began
    for section, seconds in SECONDS.items():
        total += seconds
        ends[section] = total
    return ends


def _answers(stand: Stand) -> bool:
    if stand.smoke:
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def failures(records: Sequence[Record]) -> list[Record]:
    """What failed of ours."""
    return [record for record in records if record.status == "failed"]
