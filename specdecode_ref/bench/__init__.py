"""Measuring methods side by side: the same weights, dtype, prompts and length, taking turns within one run.

A speed means little alone and moves with the machine; a ratio measured in one run, with tau beside it, travels. Nothing
here prints: `measure` yields a sample a run, `summarise` makes the figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from specdecode_ref.errors import InputError
from specdecode_ref.metrics import Metrics
from specdecode_ref.trace import Trace

if TYPE_CHECKING:
    from specdecode_ref.drafters.base import Drafter
    from specdecode_ref.models.base import Model
    from specdecode_ref.sampling import SamplingRule

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Prompt:
    """One question: the first turn of a line of the prompts file."""

    id: str
    category: str
    text: str


@dataclass(frozen=True)
class Run:
    """What a method did with one prompt. `rounds` are its target forwards; `trace` is kept where there is one."""

    tokens: tuple[int, ...]
    rounds: int
    trace: Trace | None = None


@dataclass(frozen=True)
class Sample:
    """One timed run, prompt processing included."""

    method: str
    prompt: str
    category: str
    repeat: int
    seconds: float
    run: Run


Method = Callable[[Sequence[int], int], Run]
"""(prompt ids, max_new_tokens) -> what came of it."""


def read_prompts(paths: Sequence[str]) -> list[Prompt]:
    """The prompts of JSONL files: `id`, `category`, and `turns`, whose first one is taken. Raises InputError."""
    prompts: list[Prompt] = []
    for path in paths:
        if Path(path).exists() and not Path(path).is_file():
            raise InputError("a prompts file that can be read", f"{path} (not a regular file)", "check the path")
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise InputError("a prompts file that can be read", f"{path} ({reason})", "check the path") from None
        prompts += [_prompt(line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError("at least one prompt", f"none in {', '.join(paths)}", "write one JSON object a line")
    if len({p.id for p in prompts}) < len(prompts):
        raise InputError("prompts with ids of their own", "an id that stands twice", "rename one, or give a file once")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
        found = Prompt(row["id"], row["category"], row["turns"][0])
        if not all(isinstance(value, str) and value.strip() for value in vars(found).values()):
            raise TypeError("texts")
        return found
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise InputError(
            'prompts like {"id": "a", "category": "qa", "turns": ["..."]}, one a line',
            f"another thing on {where}",
            "fix it",
        ) from None


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts, as many of each category as possible, evenly spaced within it; always the same ones."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    share = dict.fromkeys(groups, 0)
    while sum(share.values()) < limit:
        for category, group in groups.items():
            if sum(share.values()) < limit and share[category] < len(group):
                share[category] += 1
    chosen: set[str] = set()
    for category, group in groups.items():
        chosen.update(group[i * len(group) // share[category]].id for i in range(share[category]))
    return [prompt for prompt in prompts if prompt.id in chosen]


def ours(model: Model, drafter: Drafter | None, rule: SamplingRule, seed: int) -> Method:
    """Our own loop at trace level 2."""
    from specdecode_ref.decode import Session

    def run(prompt: Sequence[int], max_new_tokens: int) -> Run:
        session = Session(model, [prompt], drafter, rule=rule, seed=seed, max_new_tokens=max_new_tokens, level=2)
        generation = session.run()[0]
        return Run(generation.tokens, len(generation.trace.rounds), generation.trace)

    return run


def measure(
    methods: Mapping[str, Method],
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    max_new_tokens: int,
    repeats: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> Iterator[Sample]:
    """Time every method on every prompt (with its token ids), in an order that rotates from prompt to prompt.

    A short run of each comes first and is not counted. `wait` blocks until the device has finished.
    """
    for method in methods.values():
        method(prompts[0][1], min(WARM_UP_TOKENS, max_new_tokens))
    names = list(methods)
    for repeat in range(repeats):
        for number, (prompt, ids) in enumerate(prompts):
            first = (number + repeat) % len(names)
            for name in names[first:] + names[:first]:
                wait()
                start = time.perf_counter()
                run = methods[name](ids, max_new_tokens)
                wait()
                seconds = time.perf_counter() - start
                yield Sample(name, prompt.id, prompt.category, repeat, seconds, run)


def complete(samples: Sequence[Sample], methods: int) -> list[Sample]:
    """The samples up to the last prompt that every method has run, when a measurement was interrupted."""
    return list(samples[: len(samples) - len(samples) % methods])


def summarise(samples: Sequence[Sample], baseline: str) -> dict[str, Any]:
    """For every method, over all prompts and by category: see `_figures`."""
    by_method: dict[str, list[Sample]] = {}
    for sample in samples:
        by_method.setdefault(sample.method, []).append(sample)
    categories = list(dict.fromkeys(sample.category for sample in samples))
    return {
        name: {
            "overall": _figures(found, by_method[baseline]),
            "categories": {
                category: _figures(_only(found, category), _only(by_method[baseline], category))
                for category in categories
            },
        }
        for name, found in by_method.items()
    }


def _only(samples: Sequence[Sample], category: str) -> list[Sample]:
    return [sample for sample in samples if sample.category == category]


def _figures(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any]:
    """The figures of one method's samples. A prompt that ran several times counts with its median time.

    tokens_per_second: all tokens over all seconds, prompt processing included; ratio: that, over the baseline's.
    median_*:          the middle one of the prompts.
    same_output:       how many prompts gave the baseline's very tokens.
    first_rate:        how often the first token of a draft was accepted; in a tree, one of those at depth 1.
    *_share:           of the time after the prompt, what went into drafts, target forwards and the rest.
    The last four are known of our own methods only.
    """
    mine, theirs = _by_prompt(samples), _by_prompt(baseline)
    traces = [sample.run.trace for sample in samples if sample.run.trace]
    counted = Metrics.of(*traces) if traces else None
    rounds = sum(sample.run.rounds for sample in samples)
    speed, reference = _speed(mine.values()), _speed(theirs.values())
    return {
        "prompts": len(mine),
        "tokens": sum(len(s.run.tokens) for s in mine.values()),
        "seconds": sum(s.seconds for s in mine.values()),
        "tokens_per_second": speed,
        "ratio": speed / reference,
        "median_tokens_per_second": median(_speed([s]) for s in mine.values()),
        "median_ratio": median(_speed([mine[p]]) / _speed([theirs[p]]) for p in mine),
        "tau": sum(len(s.run.tokens) for s in samples) / rounds if rounds else None,
        "acceptance_rate": counted and counted.acceptance_rate,
        "first_rate": counted and next(iter(counted.unconditional_rates), None),
        "draft_share": counted and counted.draft_share,
        "verify_share": counted and counted.verify_share,
        "overhead_share": counted and counted.overhead_share,
        "same_output": sum(mine[p].run.tokens == theirs[p].run.tokens for p in mine),
    }


def _by_prompt(samples: Sequence[Sample]) -> dict[str, Sample]:
    """One sample a prompt, with the median time of its repeats."""
    times: dict[str, list[float]] = {}
    last: dict[str, Sample] = {}
    for sample in samples:
        times.setdefault(sample.prompt, []).append(sample.seconds)
        last[sample.prompt] = sample
    return {prompt: replace(sample, seconds=median(times[prompt])) for prompt, sample in last.items()}


def _speed(samples: Any) -> float:
    samples = list(samples)
    tokens, seconds = sum(len(s.run.tokens) for s in samples), sum(s.seconds for s in samples)
    return float(tokens / seconds)
