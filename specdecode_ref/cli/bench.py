"""`specdecode bench`: sets up the methods, shows progress, prints the tables, writes the JSON.

The measuring itself is in `bench`. The configuration is printed above the figures, which mean nothing without it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specdecode_ref
from specdecode_ref import bench
from specdecode_ref.cli import checks, parts, screen
from specdecode_ref.cli.screen import INTERRUPTED
from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.metrics import Metrics
from specdecode_ref.whole_file import whole_file

if TYPE_CHECKING:
    from specdecode_ref.models.zoo import Loaded
    from specdecode_ref.sampling import SamplingRule

SCHEMA = "specdec-bench/1"


@dataclass(frozen=True)
class Request:
    """The options of `specdecode bench`, as given."""

    prompts: tuple[str, ...]
    drafters: tuple[str, ...]
    peers: tuple[str, ...]
    limit: int | None
    repeats: int
    model: str
    draft_model: str | None
    head: str | None
    gamma: int | None
    tree: str | None
    temperature: float
    top_p: float
    seed: int
    max_new_tokens: int
    dtype: str
    device: str
    json: str | None


def run(request: Request) -> int:
    """Measure, print, write. Returns the exit code; raises SpecDecodeError for bad input."""
    from specdecode_ref.models import zoo

    target_file, prompts = _check(request)
    rule = _rule(request)
    with screen.status(f"Loading {screen.one_line(request.model)}"):
        loaded = zoo.load(request.model, dtype=request.dtype, device=request.device)
        encoded = _encode(loaded, prompts, request.max_new_tokens)
        methods = _methods(request, loaded, rule)
    config = _config(request, loaded, prompts)
    out = screen.console()
    out.print(_headline(config))
    samples, interrupted = _measure(methods, encoded, request, loaded)
    if interrupted:
        samples = bench.complete(samples, len(methods))
        screen.note(f"interrupted: the figures are those of {len(samples) // len(methods)} finished prompts")
        if not samples:
            return INTERRUPTED
    summary = bench.summarise(samples, next(iter(methods)))
    for table in _tables(summary, greedy=request.temperature == 0):
        out.print(table)
    if target_file:
        _write(target_file, {"schema": SCHEMA, "config": config, "summary": summary, "samples": list(_rows(samples))})
    return INTERRUPTED if interrupted else 0


def _check(request: Request) -> tuple[Path | None, list[bench.Prompt]]:
    from specdecode_ref.bench.peers import PEERS

    checks.at_least_one("--max-new-tokens", request.max_new_tokens)
    checks.at_least_one("--limit", request.limit)
    checks.at_least_one("--repeats", request.repeats)
    checks.at_least_one("--gamma", request.gamma)
    checks.tree(request.tree, request.gamma)
    if not request.drafters:
        raise InputError("at least one drafter in --drafters", "none", "name some, such as none,ngram")
    for method in request.drafters:
        name, own = _named(method)
        checks.drafter_name(name, checks.tree(own, None))
    for name in request.peers:
        if name not in PEERS:
            raise UnknownNameError(f"peers out of {', '.join(PEERS)}", repr(name)[:80], "choose among them")
    names = (*request.drafters, *request.peers)
    if len(set(names)) < len(names):
        raise InputError("every method once", ", ".join(names), "drop the one that stands twice")
    target_file = checks.output_file(request.json, "--json")
    return target_file, bench.spread(bench.read_prompts(request.prompts), request.limit)


def _named(method: str) -> tuple[str, str | None]:
    """The drafter of a method and its own tree, if it has one: eagle@chain:4."""
    name, at, tree = method.partition("@")
    return name, tree if at else None


def _rule(request: Request) -> SamplingRule:
    from specdecode_ref.coins import Coins
    from specdecode_ref.models import zoo
    from specdecode_ref.sampling import SamplingRule

    Coins(request.seed)
    zoo.resolve(request.dtype, request.device)
    return SamplingRule(temperature=request.temperature, top_p=request.top_p)


def _encode(
    loaded: Loaded, prompts: Sequence[bench.Prompt], max_new_tokens: int
) -> list[tuple[bench.Prompt, list[int]]]:
    """The prompts with their token ids, each of them short enough for every method to end at the same place."""
    encoded = [(prompt, parts.encode(loaded, prompt.text, raw=False)) for prompt in prompts]
    for prompt, ids in encoded:
        if len(ids) + max_new_tokens > loaded.model.context_length:
            raise InputError(
                f"prompts and answers of at most {loaded.model.context_length} tokens",
                f"{len(ids)} + {max_new_tokens} tokens for '{prompt.id}'",
                "shorten it or lower --max-new-tokens",
            )
    return encoded


def _methods(request: Request, loaded: Loaded, rule: SamplingRule) -> dict[str, bench.Method]:
    from specdecode_ref.bench.peers import transformers_methods

    rule = replace(rule, eos=tuple(sorted(loaded.tokenizer.eos_ids)))
    names = [_named(method)[0] for method in request.drafters]
    draft = parts.draft_model(loaded, request.draft_model, names, request.dtype, request.device)
    methods = {}
    for method in request.drafters:
        name, own = _named(method)
        shape = checks.tree(request.tree, request.gamma) if own is None else checks.tree(own, None)
        fits = checks.is_chain(shape) or name not in ("none", "ngram")
        drafter = parts.drafter(name, loaded, shape if fits else None, draft, request.head)
        methods[method] = bench.ours(loaded.model, drafter, rule, request.seed)
    return methods | transformers_methods(request.peers, request.model, loaded, rule, request.seed)


def _measure(
    methods: dict[str, bench.Method],
    encoded: Sequence[tuple[bench.Prompt, Sequence[int]]],
    request: Request,
    loaded: Loaded,
) -> tuple[list[bench.Sample], bool]:
    """The samples, and whether a Ctrl-C kept some from being taken."""
    import torch
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    cuda = loaded.model.device.type == "cuda"
    wait = (lambda: torch.cuda.synchronize()) if cuda else (lambda: None)
    samples = []
    err = screen.console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(methods) * len(encoded) * request.repeats)
        try:
            for sample in bench.measure(methods, encoded, request.max_new_tokens, request.repeats, wait):
                samples.append(sample)
                progress.advance(bar)
        except KeyboardInterrupt:
            return samples, True
    return samples, False


def _config(request: Request, loaded: Loaded, prompts: Sequence[bench.Prompt]) -> dict[str, Any]:
    import torch

    return {
        **asdict(request),
        "prompts": [Path(path).name for path in request.prompts],
        "json": None,
        "prompt_ids": [prompt.id for prompt in prompts],
        "model": loaded.name,
        "revision": loaded.revision,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if loaded.model.device.type == "cuda" else "cpu",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {
            "specdecode-ref": specdecode_ref.__version__,
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            "python": platform.python_version(),
        },
    }


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _headline(config: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in config["versions"].items() if number)
    law = "greedy" if config["temperature"] == 0 else f"temperature {config['temperature']}, top-p {config['top_p']}"
    return screen.visible(
        f"{config['model']} in {config['dtype']} on {config['device']} ({config['cpu']}, {config['threads']} threads)\n"
        f"{len(config['prompt_ids'])} prompts, up to {config['max_new_tokens']} new tokens, {law}, "
        f"{config['repeats']} run(s) each; {versions}"
    )


def _tables(summary: dict[str, Any], greedy: bool) -> Iterable[Any]:
    from rich.table import Table

    baseline = next(iter(summary))
    overall = Table(title="All prompts, prompt processing included", title_justify="left")
    last = f"same tokens as {baseline}" if greedy else ""
    heads = (
        "method",
        "tokens/s",
        f"ratio to {baseline}",
        "median ratio",
        "tau",
        "accepted",
        "first",
        "draft / verify / rest",
    )
    for head in (*heads, *([last] if last else [])):
        overall.add_column(head, justify="left" if head == "method" else "right")
    for name, method in summary.items():
        f = method["overall"]
        row = [
            name,
            f"{f['tokens_per_second']:.1f}",
            f"{f['ratio']:.2f}",
            f"{f['median_ratio']:.2f}",
            _or_dash(f["tau"], ".2f"),
            _or_dash(f["acceptance_rate"], ".0%"),
            _or_dash(f["first_rate"], ".0%"),
            _shares(f),
        ]
        overall.add_row(*row, *([f"{f['same_output']} of {f['prompts']}"] if last else []))
    yield overall
    by_category = Table(title=f"By category: ratio to {baseline} (tau)", title_justify="left")
    by_category.add_column("category")
    for name in summary:
        by_category.add_column(name, justify="right")
    for category in summary[baseline]["categories"]:
        cells = [summary[name]["categories"][category] for name in summary]
        by_category.add_row(
            screen.one_line(category), *(f"{f['ratio']:.2f} ({_or_dash(f['tau'], '.2f')})" for f in cells)
        )
    yield by_category


def _shares(figures: dict[str, Any]) -> str:
    """Where the time after the prompt went."""
    shares = [figures[f"{part}_share"] for part in ("draft", "verify", "overhead")]
    return "-" if None in shares else " / ".join(f"{share:.0%}" for share in shares)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _rows(samples: Iterable[bench.Sample]) -> Iterable[dict[str, Any]]:
    for sample in samples:
        row = {name: value for name, value in vars(sample).items() if name != "run"}
        metrics = Metrics.of(sample.run.trace).as_dict() if sample.run.trace else None
        yield {**row, "rounds": sample.run.rounds, "tokens": list(sample.run.tokens), "metrics": metrics}


def _write(path: Path, result: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    try:
        with whole_file(path) as part:
            part.write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("a results file that can be written", f"{path} ({reason})", "choose another place") from None
