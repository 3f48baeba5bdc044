"""Child processes in which foreign code may hang, crash or end the process without taking anything else along.

A child is a fork, so that any callable can be examined, closures and all. It has its own process group, no standard
output and a limit on its memory. A page of shared memory says which input it is busy with, so that even a child that
is killed in the middle of C code leaves the input that did it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecode_ref.fidelity.conformance.contract import Question

_PAGE = 1 << 20
_HEAD = struct.Struct("<QBQQ")
MEMORY = 8 << 30
"""How much more memory than now the child may ask for, in bytes."""

MOST_PROCESSES = 32
"""More than these, started by the verifier, are a finding."""


@dataclass(frozen=True)
class Death:
    """The child did not come back with a result. `question`: what it was asked last, as plain data."""

    name: str
    detail: str
    question: dict[str, Any] | None


class BlackBox:
    """Shared memory: how many calls began, whether one is running, and the last question."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _PAGE)
        self._calls = 0
        self._draft: object = None
        self._size = 0

    def enter(self, question: Question) -> None:
        """A call begins. The draft is written down once, the coins each time."""
        if question.draft is not self._draft:
            self._draft = question.draft
            text = json.dumps({**question.data(), "accept_coins": [], "emit_coins": []}).encode()
            self._size = len(text) if len(text) < _PAGE // 2 else 0
            start = _PAGE // 2
            self._map[start : start + self._size] = text[: self._size]
        accept, emit = question.accept, question.emit
        coins = struct.pack(f"<II{len(accept) + len(emit)}d", len(accept), len(emit), *accept, *emit)
        self._calls += 1
        size = len(coins) if len(coins) < _PAGE // 4 else 0
        self._map[64 : 64 + size] = coins[:size]
        self._map[: _HEAD.size] = _HEAD.pack(self._calls, 1, self._size, size)

    def leave(self) -> None:
        """The call has returned."""
        self._map[8] = 0

    @property
    def state(self) -> tuple[int, bool]:
        """(calls, whether one is running), as the parent sees it."""
        calls, busy, _, _ = _HEAD.unpack(self._map[: _HEAD.size])
        return calls, bool(busy)

    def question(self) -> dict[str, Any] | None:
        """What was asked last."""
        _, _, size, coins = _HEAD.unpack(self._map[: _HEAD.size])
        if not size or not coins:
            return None
        data: dict[str, Any] = json.loads(self._map[_PAGE // 2 : _PAGE // 2 + size])
        a, e = struct.unpack("<II", self._map[64:72])
        values = struct.unpack(f"<{a + e}d", self._map[72 : 72 + 8 * (a + e)])
        return {**data, "accept_coins": list(values[:a]), "emit_coins": list(values[a:])}


def available() -> bool:
    """True where a fork is possible: on POSIX, and not once CUDA runs, which does not survive one."""
    torch = sys.modules.get("torch")
    return hasattr(os, "fork") and not (torch and torch.cuda.is_initialized())


def apart(works: Sequence[Callable[[BlackBox], Any]], time_limit: float) -> list[Any]:
    """What each of `works` returns, computed side by side in child processes; a `Death` where one does not come back.

    time_limit: seconds that a single call may take before its child is killed.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    children: list[tuple[int, int, BlackBox]] = []
    pool = ThreadPoolExecutor(len(works))
    try:
        for work in works:
            children.append(_forked(work))
        waiting = [pool.submit(_awaited, *child, time_limit) for child in children]
        return [result.result() for result in waiting]
    finally:
        for child, _, _ in children:
            _end(child)  # before the pool: after a Ctrl-C its threads still wait for the children
        pool.shutdown()
        for _, reading, _ in children:
            os.close(reading)


def _forked(work: Callable[[BlackBox], Any]) -> tuple[int, int, BlackBox]:
    """A child at work: its process, the pipe it answers through, and its black box."""
    box = BlackBox()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several threads may run here, as long as the child starts none of them
        child = os.fork()
    if child == 0:
        os.close(reading)
        _be_a_child(work, box, writing)
    os.close(writing)
    return child, reading, box


def _be_a_child(work: Callable[[BlackBox], Any], box: BlackBox, writing: int) -> None:
    """Never returns."""
    try:
        os.setsid()
        _bind_to_parent()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        faulthandler.disable()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        _limit_memory()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = pickle.dumps(work(box))
        data = struct.pack("<Q", len(result)) + result
        while data:
            data = data[os.write(writing, data) :]
    except BaseException as error:
        message = pickle.dumps(
            Death("the examination failed", f"{type(error).__name__}: {error}"[:300], box.question())
        )
        os.write(writing, struct.pack("<Q", len(message)) + message)
    finally:
        os._exit(0)


def _bind_to_parent() -> None:
    """On Linux: die with the parent, and stay the parent of all that is started from here, however it detaches."""
    set_death_signal, set_child_subreaper = 1, 36
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
        libc.prctl(set_child_subreaper, 1, 0, 0, 0)


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    except (OSError, ValueError):
        return  # no such limit here


def _awaited(child: int, reading: int, box: BlackBox, time_limit: float) -> Any:
    """The result, out of the pipe: its length, then its pickle. Grandchildren may hold the pipe open."""
    data, status = b"", None
    seen, since = box.state, time.monotonic()
    counted = since
    while True:
        if select.select([reading], [], [], 0 if status is not None else 0.05)[0]:
            chunk = os.read(reading, 1 << 16)
            data += chunk
            if len(data) >= 8 and len(data) - 8 >= struct.unpack("<Q", data[:8])[0]:
                return pickle.loads(data[8:])
            if chunk:
                continue
            status = os.waitpid(child, 0)[1] if status is None else status
        if status is not None:
            return Death("ends the process", _how(status), box.question())
        gone, code = os.waitpid(child, os.WNOHANG)
        if gone:
            status = code
        if time.monotonic() - counted > 0.5:
            counted = time.monotonic()
            if len(_descendants(child)) > MOST_PROCESSES:
                return Death("starts processes", f"more than {MOST_PROCESSES} of them", box.question())
        state = box.state
        if state != seen or not state[1]:
            seen, since = state, time.monotonic()
        elif time.monotonic() - since > time_limit:
            return Death("hangs", f"a call did not return within {time_limit:g} s", box.question())


def _how(status: int) -> str:
    """How a child ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by signal {number} ({signal.Signals(number).name})"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _end(child: int) -> None:
    """Kill the child and whatever it started; nothing where it is gone."""
    for number in (signal.SIGSTOP, signal.SIGKILL):  # first stopped, so that none is started meanwhile
        for process in (*_descendants(child), child):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _descendants(root: int) -> list[int]:
    """The processes below `root`, where the system tells (Linux)."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(stat.parent.name))
    found = list(below.get(root, []))
    for process in found:
        found += below.get(process, [])
    return found


class Unwatched:
    """A watch that does not look."""

    def enter(self, question: Question) -> None:
        """See `contract.Watch`."""

    def leave(self) -> None:
        """See `contract.Watch`."""


def here(work: Callable[[Any], Any]) -> Any:
    """What `work` returns, computed in this process: silent, but neither a hang nor a crash is survived."""
    quiet = warnings.catch_warnings(action="ignore")
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null), quiet:
        return work(Unwatched())
