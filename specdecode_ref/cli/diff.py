"""`specdecode diff`: two outputs of one prompt, and whether rounding explains where they part.

The outputs are two traces, two lists of token ids, or made here, plain and speculative. Files are hostile until read:
a trace's model is loaded by its name only where that is the embedded default, so that no file can ask for a download.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdecode_ref.cli import checks, parts, screen
from specdecode_ref.errors import InputError
from specdecode_ref.trace import Trace

if TYPE_CHECKING:
    from specdecode_ref.coins import Coins
    from specdecode_ref.fidelity.divergence import Divergence, Run
    from specdecode_ref.models.zoo import Loaded
    from specdecode_ref.sampling import SamplingRule

MAX_BYTES = 2_000_000
"""The longest file of token ids."""


@dataclass(frozen=True)
class Request:
    """The options of `specdecode diff`, as given."""

    a: str | None
    b: str | None
    model: str | None
    prompt: str | None
    prompt_ids: str | None
    raw: bool
    drafter: str | None
    draft_model: str | None
    verifier: str
    gamma: int | None
    tree: str | None
    sampling: dict[str, float]
    seed: int
    max_new_tokens: int
    dtype: str
    device: str
    json: bool


@dataclass(frozen=True)
class Case:
    """What there is to explain."""

    loaded: Loaded
    prompt: tuple[int, ...]
    runs: tuple[Run, Run]
    rule: SamplingRule
    coins: Coins | None = None
    names: tuple[str, str] = ("A", "B")


def run(request: Request) -> int:
    """Explain and print. 0 for no difference or a tie, 1 for a defect; raises SpecDecodeError for bad input."""
    from specdecode_ref.fidelity.divergence import explain

    case = _case(request)
    with screen.status("Comparing"):
        found = explain(case.loaded.model, case.prompt, *case.runs, case.rule, coins=case.coins, names=case.names)
    words = [_word(case.loaded, token) for token in found.tokens]
    if request.json:
        about = {"model": case.loaded.name, "device": str(case.loaded.model.device), "names": case.names}
        print(json.dumps({**about, **found.as_dict(), "words": words}, allow_nan=False))
    else:
        _show(found, case.names, words)
    return 1 if found.verdict == "defect" else 0


def _case(request: Request) -> Case:
    if request.a is None:
        if request.drafter is None or request.prompt is None or request.prompt_ids is not None:
            raise InputError("two files, or --prompt and --drafter", "neither", "give one or the other")
        return _made(request)
    if request.b is None:
        raise InputError("two files A and B", "one", "give both, or none with --prompt and --drafter")
    if request.drafter is not None:
        raise InputError("two files, or --prompt and --drafter", "both", "leave one out")
    data = [_read(file) for file in (request.a, request.b)]
    kinds = {text.lstrip().startswith(b"{") for text in data}
    if len(kinds) == 2:
        raise InputError("two traces or two lists of token ids", "one of each", "compare like with like")
    return _traces(request, data) if kinds == {True} else _lists(request, data)


def _read(file: str) -> bytes:
    from specdecode_ref.trace_file import MAX_BYTES as LARGEST

    try:
        path = Path(file)
        if path.exists() and not path.is_file():
            raise InputError("a file", f"{checks.brief(file)} (not a regular file)", "check the path")
        with path.open("rb") as opened:
            return opened.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, InputError):
            raise
        came = f"{checks.brief(file)} ({checks.reason(error)})"
        raise InputError("a file that can be read", came, "check the path") from None


def _traces(request: Request, data: list[bytes]) -> Case:
    from specdecode_ref.coins import Coins
    from specdecode_ref.fidelity.divergence import Run
    from specdecode_ref.fidelity.replay import rule_of
    from specdecode_ref.trace_file import read_trace

    if request.prompt is not None or request.prompt_ids is not None or any(_asked(request).values()):
        raise InputError("prompt and rule out of the traces", "others as options", "leave them out")
    a, b = (read_trace(text) for text in data)
    for what in ("prompt", "sampling"):
        if getattr(a.header, what) != getattr(b.header, what):
            raise InputError(f"two traces of one {what}", "two different ones", "record both with the same settings")
    if a.header.target != b.header.target:
        raise InputError("two traces of one model", "two different ones", "record both with the same model")
    runs = tuple(Run(t.tokens, t.header.max_new_tokens, t.footer.finish_reason) for t in (a, b))
    rule = rule_of(a)
    coins = Coins(a.header.seed, a.header.sequence) if rule.temperature else None
    for trace in (a, b) if coins else ():
        if trace.header.method != "autoregressive" and trace.header.verifier != "match":
            came = f"'{trace.header.verifier}' at temperature {rule.temperature}"
            do = "other verifiers draw other tokens from the same law; compare greedy runs"
            raise InputError("runs that are plain or verified by 'match'", came, do)
        if Coins(trace.header.seed, trace.header.sequence) != coins:
            raise InputError("two traces of one seed and sequence", "two", "record both with the same --seed")
    loaded = _load(request, checks.recorded_model(request.model, a), checks.recorded_dtype(request.dtype, a))
    _same_model(loaded, a, request.model is not None)
    return Case(loaded, a.header.prompt, runs, rule, coins)  # type: ignore[arg-type]


def _same_model(loaded: Loaded, trace: Trace, named: bool) -> None:
    """Refuse another tokenizer; another revision, too, unless the model was named by hand."""
    target = trace.header.target
    if target.tokenizer and target.tokenizer != loaded.tokenizer.hash[:16]:
        raise InputError("the model of the traces", f"another tokenizer in {loaded.name}", "check --model")
    if target.revision and target.revision != loaded.revision:
        came = f"revision {loaded.revision[:40]}, recorded with {target.revision[:40]}"
        if not named:
            raise InputError("the weights of the traces", came, "name the recorded ones with --model")
        screen.note(f"other weights than the traces': {came}")


def _lists(request: Request, data: list[bytes]) -> Case:
    from specdecode_ref.fidelity.divergence import Run

    if (request.prompt is None) == (request.prompt_ids is None):
        came = "neither" if request.prompt is None else "both"
        raise InputError("--prompt or --prompt-ids with lists of token ids", came, "give the prompt of both outputs")
    if request.sampling["temperature"] != 0:
        raise InputError("temperature 0 with lists of token ids", "another", "compare traces, which name their seed")
    runs = tuple(Run(_ids(text, name)) for text, name in zip(data, ("A", "B"), strict=True))
    prompt = None if request.prompt is None else checks.prompt(request.prompt, request.raw)
    ids = None if request.prompt_ids is None else _ids(request.prompt_ids.encode(errors="replace"), "--prompt-ids")
    loaded = _load(request, request.model)
    prompt_ids = ids if prompt is None else tuple(parts.encode(loaded, prompt, request.raw))
    return Case(loaded, prompt_ids or (), runs, _eos_rule(request, loaded))  # type: ignore[arg-type]


def _ids(text: bytes, what: str) -> tuple[int, ...]:
    """Token ids out of a JSON list, or with commas or white space between."""
    words = text.decode(errors="replace").strip()
    if len(text) > MAX_BYTES:
        raise InputError(f"at most {MAX_BYTES:,} bytes of token ids in {what}", "more", "cut the outputs")
    parts = words.removeprefix("[").removesuffix("]").replace(",", " ").split()
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and len(part) <= 10)]
    if wrong or words.startswith("[") != words.endswith("]"):
        came = repr(wrong[0])[:40] if wrong else "half a list"
        raise InputError(f"token ids in {what}: a JSON list, or numbers with spaces", came, "check the file")
    if not parts:
        raise InputError(f"at least one token in {what}", "none", "give the whole output")
    return tuple(map(int, parts))


def _made(request: Request) -> Case:
    """Decode twice, plain and speculative, with the same settings."""
    from specdecode_ref.coins import Coins
    from specdecode_ref.decode import Session
    from specdecode_ref.fidelity.divergence import Run

    assert request.prompt is not None and request.drafter is not None
    prompt = checks.prompt(request.prompt, request.raw)
    checks.at_least_one("--max-new-tokens", request.max_new_tokens)
    checks.at_least_one("--gamma", request.gamma)
    shape = checks.tree(request.tree, request.gamma)
    checks.verifier_name(request.verifier, shape)
    if "none" in checks.drafter_name(request.drafter, shape).split("+"):
        raise InputError("a drafter that drafts", "'none'", "plain decoding is compared with it anyway")
    coins = Coins(request.seed)
    if request.sampling["temperature"] and request.verifier != "match":
        do = "add --verifier match: other rules draw other tokens from the same law"
        raise InputError("temperature 0, or the verifier 'match'", f"'{request.verifier}'", do)
    loaded = _load(request, request.model)
    draft = parts.draft_model(loaded, request.draft_model, [request.drafter], request.dtype, request.device)
    drafter = parts.drafter(request.drafter, loaded, shape, draft, None, request.verifier)
    ids, rule = tuple(parts.encode(loaded, prompt, request.raw)), _eos_rule(request, loaded)
    settings: dict[str, Any] = {"rule": rule, "seed": request.seed, "max_new_tokens": request.max_new_tokens}
    with screen.status("Decoding twice"):
        plain = Session(loaded.model, [ids], level=1, **settings).run()[0]
        fast = Session(loaded.model, [ids], drafter, verifier=request.verifier, level=1, **settings).run()[0]
    runs = tuple(Run(g.tokens, request.max_new_tokens, g.trace.footer.finish_reason) for g in (plain, fast))
    names = ("plain", request.drafter)
    return Case(loaded, ids, runs, rule, coins if rule.temperature else None, names)  # type: ignore[arg-type]


def _load(request: Request, name: str | None, dtype: str | None = None) -> Loaded:
    from specdecode_ref.models import zoo

    dtype = dtype or request.dtype
    zoo.resolve(dtype, request.device)
    with screen.status("Loading the model"):
        return zoo.load(name or zoo.DEFAULT, dtype=dtype, device=request.device)


def _asked(request: Request) -> dict[str, bool]:
    return {name: value != (name == "repetition_penalty") for name, value in request.sampling.items()}


def _eos_rule(request: Request, loaded: Loaded) -> SamplingRule:
    from specdecode_ref.sampling import SamplingRule

    return replace(SamplingRule(**request.sampling), eos=loaded.tokenizer.eos_ids)  # type: ignore[arg-type]


def _word(loaded: Loaded, token: int | None) -> str | None:
    return None if token is None else loaded.tokenizer.token_bytes(token).decode(errors="replace")


def _show(found: Divergence, names: tuple[str, str], words: list[str | None]) -> None:
    """The verdict first, then what it rests on."""
    from rich.table import Table

    out = screen.console()
    verdict = {"same": "no difference", "tie": "TIE", "defect": "DEFECT"}[found.verdict]
    out.print(screen.one_line(f"{verdict}: {found.reason.removeprefix('no difference ')}"), soft_wrap=True)
    if found.index is None:
        return
    out.print(f"first difference: token {found.index} of the output, position {found.position} of the text")
    for name, token, word in zip(names, found.tokens, words, strict=True):
        what = "has ended" if token is None else f"token {token} {word!r}"
        out.print(screen.one_line(f"  {name}: {what}"), soft_wrap=True)
    if not found.readings:
        return
    noise = f"noise {found.noise:.3g} over {found.places} places, {found.noise_here:.3g} here"
    out.print(f"{found.dtype}: {noise}; {found.noise_logits:.3g} before the rule; threshold {found.threshold:.3g}")
    heads = [f"{what} {name}" for what in ("logit", "score") for name in names]
    table = Table("computed in", *map(screen.one_line, heads), "top-2 gap", "chooses", box=None, padding=(0, 2, 0, 0))
    for r in found.readings:
        gap = "-" if r.gap is None else f"{r.gap:.6g}"
        table.add_row(r.shape, *(f"{value:.6g}" for value in (*r.logits, *r.scores)), gap, str(r.first))
    out.print(table)
