"""The long run of rung R2: `python -m specdecode_ref.fidelity`, which `make fidelity` calls.

Samples the real decode loop in every configuration of `configurations.covering`, some hundred thousand generations
each, with fresh seeds that are printed before anything is drawn. Ends with 0 if all pass, 1 with the reports of those
that do not, 2 on bad usage, 130 when interrupted, after what was done until then. `mine` makes the hard pairs again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specdecode_ref.errors import InputError, SpecDecodeError
from specdecode_ref.fidelity import pairs, sampled
from specdecode_ref.fidelity.sampled import Outcome, Sample, Tally, configurations

CHUNK = 4096
"""Generations that a process is asked for at once."""
TRIAL = 128
"""Generations by which the time of a configuration is estimated."""
WORTHWHILE = 20_000
"""From so many generations on, the catalogue's laws are bet on too: finding them takes seconds."""

Task = tuple[int, int, int, int]
"""Configuration, generations, seed, number of the first."""


class _Parser(argparse.ArgumentParser):
    """Bad usage is one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(
            "options as `--help` lists them", message.encode("ascii", "backslashreplace").decode(), "see it"
        )


def _parser() -> _Parser:
    parser = _Parser(prog="python -m specdecode_ref.fidelity", description="Sample the decode loop against its law.")
    parser.add_argument("--samples", type=int, default=400_000, help="generations a configuration (400000)")
    parser.add_argument("--minutes", type=int, help="take fewer samples if they would last longer than this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--seed", type=int, help="replay a run; fresh unless given")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="configurations by number (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    commands = parser.add_subparsers(dest="command", metavar="mine")
    mining = commands.add_parser("mine", help="mine the hard pairs again and write pairs.json")
    mining.add_argument("--seed", type=int, default=0, dest="mine_seed", help="of the search (0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    try:
        options = _parser().parse_args(arguments)
        return _mine(options.mine_seed) if options.command else _run(options)
    except SpecDecodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    chosen = _chosen(options)
    fresh = options.seed is None
    base = int.from_bytes(os.urandom(7), "big") if fresh else options.seed
    print(f"seed {base} ({'fresh' if fresh else 'given'}; configuration k has seed + k)", flush=True)
    each = sum(map(_seconds_each, chosen.values())) / options.jobs
    samples = options.samples
    if options.minutes is not None:
        samples = min(samples, max(1, int(60 * options.minutes / each)))
    print(
        f"{len(chosen)} configurations of {samples} generations in {options.jobs} processes: "
        f"about {each * samples / 60:.0f} minutes, if each process has a core",
        flush=True,
    )
    outcomes: list[Outcome] = []
    whole = _sample(chosen, samples, base, options.jobs, outcomes)
    rejected = [outcome for outcome in outcomes if not outcome.passes]
    if options.json:
        _write(options.json, {"seed": base, "whole": whole, "outcomes": [*map(_record, outcomes)]})
    print(f"{len(outcomes) - len(rejected)} passed, {len(rejected)} rejected" + ("" if whole else "; interrupted"))
    return 1 if rejected else 0 if whole else 130


def _chosen(options: argparse.Namespace) -> dict[int, configurations.Configuration]:
    """The configurations to sample, by number."""
    for name in ("samples", "jobs", "minutes"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InputError(f"--{name} of 1 or more", getattr(options, name), "ask for at least one")
    everything = configurations.covering()
    if options.samples > 2**32 - 1:
        raise InputError("--samples below 2^32", options.samples, "a sequence has no larger number")
    if options.seed is not None and not 0 <= options.seed < 2**64 - len(everything):
        raise InputError("--seed from 0 to almost 2^64", options.seed, "use the one that was printed")
    if options.json and not options.json.parent.is_dir():
        raise InputError("--json in a folder that exists", ascii(str(options.json)), "make the folder first")
    numbers = range(len(everything)) if options.only is None else options.only
    if not set(numbers) <= set(range(len(everything))):
        raise InputError(f"--only with numbers from 0 to {len(everything) - 1}", list(numbers), "choose among them")
    return {number: everything[number] for number in numbers}


def _seconds_each(configuration: configurations.Configuration) -> float:
    """How long one generation takes, measured."""
    begin = time.perf_counter()
    sampled.sample(configuration.setup(), TRIAL, seed=0)
    return (time.perf_counter() - begin) / TRIAL


def _sample(
    chosen: dict[int, configurations.Configuration], samples: int, base: int, jobs: int, outcomes: list[Outcome]
) -> bool:
    """Fill `outcomes` in the order in which they end; those that are not whole too. False where interrupted."""
    tasks = [
        (number, min(CHUNK, samples - first), base + number, first)
        for number in chosen
        for first in range(0, samples, CHUNK)
    ]
    tallies: dict[int, Tally] = {}
    ended: set[int] = set()
    # Forked processes inherit the threads of torch in an unknown state; spawned ones start clean.
    with multiprocessing.get_context("spawn").Pool(jobs, _quietly) as pool:
        try:
            for done, (number, batch) in enumerate(pool.imap(_work, tasks), 1):
                if number not in tallies:
                    known = samples >= WORTHWHILE
                    tallies[number] = Tally.begin(chosen[number], base + number, known)
                tallies[number] = tallies[number].after(batch)
                if tallies[number].n == samples:
                    ended.add(number)
                    outcomes.append(_reported(number, tallies[number], done / len(tasks)))
            return True
        except KeyboardInterrupt:
            pool.terminate()
            left = [number for number in tallies if number not in ended]
            outcomes += [_reported(number, tallies[number], None) for number in left]
            return False


def _quietly() -> None:
    """A process of its own: one thread, and interrupts are for the one that asked."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(task: Task) -> tuple[int, Sample]:
    number, n, seed, first = task
    setup = configurations.covering()[number].setup()
    counts: dict[tuple[int, ...], int] = {}
    accepted = 0
    for part in _parts(n, sampled.BATCH):
        batch = sampled.sample(setup, part[1], seed, first + part[0])
        accepted += batch.accepted
        for cell, seen in batch.counts.items():
            counts[cell] = counts.get(cell, 0) + seen
    return number, Sample(counts, accepted)


def _parts(n: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, size):
        yield start, min(size, n - start)


def _reported(number: int, tally: Tally, share: float | None) -> Outcome:
    """One line where it passes, else the whole report."""
    outcome = tally.outcome
    progress = "interrupted" if share is None else f"{100 * share:3.0f}%"
    gate = outcome.gate
    line = (
        f"{progress}  {number}: {outcome.configuration}; n {tally.n}, G {gate.statistic:.1f} of {gate.threshold:.1f}, "
        f"TV {gate.tv:.4f} within {gate.radius:.4f}, accepted {outcome.accepted:.4f} of {outcome.expected:.4f}"
    )
    print(line if outcome.passes else f"{progress}  {number}: {outcome}", flush=True)
    return outcome


def _record(outcome: Outcome) -> dict[str, Any]:
    """An outcome for machines."""
    c, gate = outcome.configuration, outcome.gate
    return {
        **{name: getattr(c, name) for name in ("kind", "shape", "draw", "verifier", "rule", "tables")},
        "seed": outcome.seed,
        "n": gate.n,
        "passes": outcome.passes,
        "g": min(gate.statistic, sys.float_info.max),
        "critical_g": gate.threshold,
        "tv": gate.tv,
        "tv_radius": gate.radius,
        "log_wealth": min(outcome.bets.peak, sys.float_info.max),
        "accepted": outcome.accepted,
        "accepted_expected": outcome.expected,
        "accepted_radius": outcome.radius,
        "best_fit": None if outcome.lossless else outcome.best_fit,
    }


def _write(file: Path, value: object) -> None:
    try:
        file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError("a file that can be written", f"{str(file)!a}: {error.strerror}", "name another") from None


def _mine(seed: int) -> int:
    found = []
    for name in pairs.HUNTS:
        found.append(pairs.mine(name, seed))
        print(name, dict(found[-1].needed), flush=True)
    pairs.store(found)
    return 0
