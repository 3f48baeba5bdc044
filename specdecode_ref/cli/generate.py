"""`specdecode generate`: one prompt, decoded before your eyes, every token marked by where it came from.

Everything that can be refused is refused before the model is loaded; a first Ctrl-C ends after the round in progress.
"""

from __future__ import annotations

import json
import platform
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import specdecode_ref
from specdecode_ref.cli import checks, parts, screen
from specdecode_ref.cli.screen import INTERRUPTED
from specdecode_ref.errors import InputError
from specdecode_ref.metrics import Metrics
from specdecode_ref.stream import Piece
from specdecode_ref.trace import Trace

if TYPE_CHECKING:
    from specdecode_ref.decode import Generation, Session
    from specdecode_ref.drafters.base import Drafter
    from specdecode_ref.drafters.shapes import Wanted
    from specdecode_ref.models.zoo import Loaded
    from specdecode_ref.sampling import SamplingRule


@dataclass(frozen=True)
class Request:
    """The options of `specdecode generate`, as given."""

    prompt: str
    model: str
    drafter: str
    draft_model: str | None
    verifier: str
    head: str | None
    gamma: int | None
    tree: str | None
    backend: str
    sampling: dict[str, Any]
    seed: int
    max_new_tokens: int
    stop: tuple[str, ...]
    raw: bool
    dtype: str
    device: str
    trace: str | None
    json: bool


def run(request: Request) -> int:
    """Generate and print. Returns the exit code; raises SpecDecodeError for bad input."""
    from specdecode_ref.models import zoo

    prompt, shape, trace_file = _check(request)
    rule = _rule(request)
    with screen.status(f"Loading {screen.one_line(request.model)}"):
        loaded = zoo.load(request.model, dtype=request.dtype, device=request.device)
        draft = parts.draft_model(loaded, request.draft_model, [request.drafter], request.dtype, request.device)
        drafter = parts.drafter(request.drafter, loaded, shape, draft, request.head, request.verifier)
    ids = parts.encode(loaded, prompt, request.raw)
    session = _session(request, loaded, draft, drafter, rule, ids)
    out = screen.console()
    painter = None if request.json else screen.Painter(out, screen.marks_for(out))
    cancelled = _stream(session, painter)
    generation = session.generation()
    if trace_file:
        write_trace(generation.trace, trace_file)
    config = _config(request, loaded, drafter, generation.trace)
    if request.json:
        print(json.dumps(_result(generation, config), allow_nan=False))
    elif painter:
        _report(generation.trace, painter)
    return INTERRUPTED if cancelled else 0


def _check(request: Request) -> tuple[str, Wanted | None, Path | None]:
    """Refuse what can be refused without torch; the prompt, the tree's shape and the file of the trace."""
    prompt = checks.prompt(request.prompt, request.raw)
    checks.at_least_one("--max-new-tokens", request.max_new_tokens)
    checks.at_least_one("--gamma", request.gamma)
    shape = checks.tree(request.tree, request.gamma)
    if not all(request.stop):
        raise InputError("--stop with at least one character", "an empty string", "drop it or type some text")
    trace_file = checks.output_file(request.trace, "--trace")
    checks.drafter_name(request.drafter, shape)
    checks.verifier_name(request.verifier, shape)
    checks.backend_name(request.backend)
    checks.warn_of_loss(request.verifier)
    if request.draft_model and "model" not in request.drafter.split("+"):
        screen.note(f"--draft-model is not used by the drafter '{request.drafter}'; say --drafter model")
    if request.head and set(request.drafter.split("+")) <= {"none", "ngram", "early-exit"}:
        screen.note(f"--head is not used by the drafter '{request.drafter}'; say --drafter eagle, medusa or model")
    return prompt, shape, trace_file


def _rule(request: Request) -> SamplingRule:
    """The sampling rule; refuses, as `_check` does, a seed, dtype or device that cannot be."""
    from specdecode_ref.coins import Coins
    from specdecode_ref.models import zoo
    from specdecode_ref.sampling import SamplingRule

    Coins(request.seed)
    zoo.resolve(request.dtype, request.device)
    rule = SamplingRule(**request.sampling)
    idle = [name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if request.sampling[name] != off]
    if rule.temperature == 0 and idle:
        names = ", ".join("--" + name.replace("_", "-") for name in idle)
        screen.note(f"{names} changes nothing at temperature 0, which is greedy; add --temperature 1")
    return rule


def _session(
    request: Request, loaded: Loaded, draft: Loaded | None, drafter: Drafter | None, rule: SamplingRule, ids: list[int]
) -> Session:
    from specdecode_ref.backends import AUTO, TORCH
    from specdecode_ref.decode import Session

    return Session(
        loaded.model,
        [ids],
        drafter,
        verifier=request.verifier,
        rule=replace(rule, eos=tuple(sorted(loaded.tokenizer.eos_ids))),
        seed=request.seed,
        max_new_tokens=request.max_new_tokens,
        stop=request.stop,
        tokenizer=loaded.tokenizer,
        level=3 if request.trace and request.backend in (AUTO, TORCH) else 2,
        backend=request.backend,
        target=parts.model_info(loaded),
        draft=parts.model_info(draft) if draft else None,
    )


def _stream(session: Session, painter: screen.Painter | None) -> bool:
    """Run the session and print its text as it becomes certain. True when it was interrupted."""
    printed = 0
    steps = iter(session)
    with _interruptible() as pressed:
        with screen.status("Reading the prompt"):
            step = next(steps, None)
        while step:
            if painter:
                painter.paint(step.pieces)
            printed += sum(len(piece.text) for piece in step.pieces)
            if pressed:
                session.cancel(0)
                break
            step = next(steps, None)
    generation = session.generation()
    if painter:
        rest = generation.text[printed:]  # what the stream still held when it was interrupted
        painter.paint([Piece(rest, "target")] if rest else [])
        painter.finish()
    return generation.trace.footer.finish_reason == "cancelled"


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C fills the list that this gives; the second one interrupts at once."""
    pressed: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def write_trace(trace: Trace, path: Path) -> None:
    """Write the file whole or not at all."""
    try:
        trace.write(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("a trace file that can be written", f"{path} ({reason})", "choose another place") from None


def _config(request: Request, loaded: Loaded, drafter: Drafter | None, trace: Trace) -> dict[str, Any]:
    import torch

    return {
        "model": loaded.name,
        "revision": loaded.revision,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "drafter": drafter.name if drafter else "none",
        "drafting": trace.header.drafting,
        "draft_model": request.draft_model,
        "verifier": trace.header.verifier,
        "sampling": trace.header.sampling,
        "seed": request.seed,
        "max_new_tokens": request.max_new_tokens,
        "stop": list(request.stop),
        "raw": request.raw,
        "versions": {
            "specdecode-ref": specdecode_ref.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _result(generation: Generation, config: dict[str, Any]) -> dict[str, Any]:
    """The object that `--json` prints."""
    trace = generation.trace
    return {
        "text": generation.text,
        "tokens": list(generation.tokens),
        "prompt_tokens": len(trace.header.prompt),
        "finish_reason": trace.footer.finish_reason,
        "metrics": Metrics.of(trace).as_dict(),
        "config": config,
    }


def provenance(trace: Trace) -> Counter[str]:
    """How many output tokens came from where."""
    found: Counter[str] = Counter()
    for r in trace.rounds:
        accepted = min(len(r.path) - 1, r.kept)
        found["draft"] += accepted
        found[r.emitted.kind] += r.kept - accepted
    return found


def _report(trace: Trace, painter: screen.Painter) -> None:
    """The legend and the figures, where somebody is looking."""
    err = screen.console(stderr=True)
    if err.is_terminal:
        err.print()
        err.print(painter.legend(provenance(trace)))
        err.print(summary(Metrics.of(trace), trace.footer.finish_reason), style="dim", soft_wrap=True)


def summary(m: Metrics, finish_reason: str) -> str:
    """A generation in a line.

    >>> summary(Metrics(2, 2, 6, 3, 5, (2, 1), (2, 2)), "eos")
    '5 tokens in 2 rounds (tau 2.50), 3 of 6 drafted accepted (50%); ended by eos'
    """
    line = f"{m.emitted} tokens in {m.rounds} rounds"
    if m.tau is not None:
        line += f" (tau {m.tau:.2f})"
    if m.acceptance_rate is not None:
        line += f", {m.accepted} of {m.drafted} drafted accepted ({m.acceptance_rate:.0%})"
    if m.tokens_per_second is not None:
        line += f"; {m.tokens_per_second:.1f} tokens/s after {m.seconds.prefill:.2f} s of prefill"
    return f"{line}; {'cancelled' if finish_reason == 'cancelled' else f'ended by {finish_reason}'}"
