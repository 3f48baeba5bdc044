"""Where a case of the bench runs: a device, a clock, and enough sets of inputs that none is left in the L2 cache.

    warm-up, once eagerly  ->  many calls captured in one CUDA graph  ->  replayed between two events  ->  median

In a graph no launch waits for the host, so the time of a call is that of the GPU alone. Calls take turns over several
sets of inputs that together exceed the L2 cache: each finds its own in memory, as behind a forward pass that has read
the weights in between. A spin in front keeps the GPU busy until the graph has been queued.

Without a GPU there is the smoke run: each call once, through Triton's interpreter, for the sake of the code alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch

Figures = dict[str, Any]
"""What a case found; the unit stands in each key."""

Call = Callable[[], object]

LAUNCHES, REPEATS = 32, 11
"""Calls captured in a graph at least, and its replays that are timed."""

SPIN = 2_000_000
"""Cycles in front of a replay, about a millisecond."""

CACHE_TIMES = 3
"""How often all sets of inputs would fill the L2 cache."""

MOST_SETS = 128


class Skip(Exception):
    """A case that cannot run here; the message says why."""


class Stand:
    """smoke: on the CPU, at tiny shapes. kept: what is too dear to be made again for every case, by name."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.kept: dict[str, Any] = {}

    def generator(self, seed: int) -> torch.Generator:
        """Of random inputs, on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def sets(self, size: int) -> int:
        """How many sets of inputs of `size` bytes it takes, so that a set's turn comes when the cache has lost it."""
        if self.smoke:
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(1, min(MOST_SETS, -(-CACHE_TIMES * cache // size)))

    def microseconds(
        self, calls: Sequence[Call], before: Call | None = None, launches: int = LAUNCHES, repeats: int = REPEATS
    ) -> float:
        """The time of a call, the median over `repeats` replays of a graph that calls all in turn.

        before: called ahead of each replay, outside of the time.
        """
        if self.smoke:
            start = time.perf_counter()
            calls[0]()
            return (time.perf_counter() - start) * 1e6
        for call in calls:
            call()
        torch.cuda.synchronize()
        turns = max(1, launches // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in [*calls] * turns:
                call()
        graph.replay()
        found = []
        for _ in range(repeats):
            if before:
                before()
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN)
            start_event.record()
            graph.replay()
            end_event.record()
            end_event.synchronize()
            found.append(1000 * start_event.elapsed_time(end_event) / (turns * len(calls)))
        return median(found)

    def timed(self, calls: Sequence[Call], moved: int | None, warm: bool = False, **settings: Any) -> Figures:
        """The figures of calls.

        moved: bytes of each, if they are known. warm: inputs lie in the L2 cache. settings: of `microseconds`.
        """
        found = self.microseconds(calls, **settings)
        out = {"microseconds": found, "sets_of_inputs": len(calls), "l2_cache": "warm" if warm else "cold"}
        if moved is None:
            return out
        return out | {"bytes_moved": moved, "gigabytes_per_second": moved / found / 1e3}

    def require_gpu(self, what: str) -> None:
        """Raises Skip in a smoke run."""
        if self.smoke:
            raise Skip(f"{what}: needs a GPU")

    def sweep(self) -> None:
        """Give back what a case has left in memory."""
        gc.collect()
        if not self.smoke:
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Case:
    """One line of the bench.

    name: unlike any other of its section. run: raises Skip where it cannot run, anything else where it fails.
    peer: it runs what others would, so its failure is none of ours.
    """

    section: str
    name: str
    run: Callable[[Stand], Figures]
    peer: bool = False


@dataclass
class Record:
    """What became of a case. reason: of a failure or a skip, one line."""

    section: str
    name: str
    status: Literal["ok", "failed", "skipped"]
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


def outcome(case: Case, stand: Stand) -> Record:
    """Run a case, whatever happens in it."""
    start = time.perf_counter()
    record = Record(case.section, case.name, "ok")
    try:
        record.figures = case.run(stand)
    except Skip as error:
        record.status, record.reason = "skipped", _line(error)
    except torch.OutOfMemoryError:
        record.status, record.reason = "skipped", "out of memory"
    except Exception as error:  # of any kind: the other cases must run
        record.status = "skipped" if case.peer else "failed"
        record.reason = f"{type(error).__name__}: {_line(error)}"
    record.seconds = time.perf_counter() - start
    return record


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
