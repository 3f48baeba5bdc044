"""`specdecode compare-verifiers`: every rule on the same drafts, in one table, lossy ones marked as such."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from specdecode_ref.cli import checks, screen
from specdecode_ref.errors import InputError

if TYPE_CHECKING:
    from specdecode_ref.fidelity.compare import Row
    from specdecode_ref.fidelity.laws import Next

DRAWS = ("with_replacement", "without_replacement", "deterministic")


@dataclass(frozen=True)
class Request:
    """The options of `specdecode compare-verifiers`, as given."""

    trace: str | None
    p: str | None
    q: str | None
    random: int | None
    seed: int
    gamma: int | None
    tree: str | None
    draw: str
    model: str | None
    draft_model: str | None
    dtype: str
    rounds: int
    json: bool


def run(request: Request) -> int:
    """Compare and print. Returns the exit code; raises SpecDecodeError for bad input."""
    laws = request.p is not None or request.q is not None
    given = [name for name, is_given in (("TRACE", request.trace is not None), ("--p or --q", laws)) if is_given]
    given += ["--random"] if request.random is not None else []
    if len(given) != 1:
        came = " and ".join(given) or "none"
        raise InputError("one of TRACE, --p with --q, or --random", came, "choose what to compare on")
    about, rows = _on_trace(request) if request.trace is not None else _on_laws(request)
    if request.json:
        print(json.dumps({"about": about, "verifiers": [_as_json(row) for row in rows]}, allow_nan=False))
    else:
        _show(about, rows)
    return 0


def _on_laws(request: Request) -> tuple[str, list[Row]]:
    from specdecode_ref.drafters.shapes import Sampled, chain
    from specdecode_ref.fidelity.compare import compare

    checks.at_least_one("--gamma", request.gamma)
    drawn = checks.tree(request.tree, request.gamma) or chain(2)
    if not isinstance(drawn, Sampled):
        raise InputError("a chain or a sampled tree to enumerate", drawn, "use chain:2 or sampled:2,1")
    shape = drawn.branching
    if request.draw not in DRAWS:
        raise InputError(f"--draw out of {', '.join(DRAWS)}", repr(request.draw)[:80], "choose one of them")
    if math.prod(width * 2 for width in shape) > 4096:
        raise InputError("a draft small enough to enumerate", f"the shape {list(shape)[:20]}", "use a smaller one")
    p, q, names = _random(request) if request.random is not None else _given(request)
    draws: Any = [(request.draw,) * width for width in shape]
    drafted = f"{request.draw.replace('_', ' ')}, children per depth {','.join(map(str, shape))}"
    return f"{names}; drafted {drafted}; exact over all drafts and coins", compare(p, q, draws)


def _given(request: Request) -> tuple[Next, Next, str]:
    """The same p and q after every token."""
    p, q = _law("--p", request.p), _law("--q", request.q)
    if len(p) != len(q):
        raise InputError("--p and --q of one length", f"{len(p)} and {len(q)} entries", "give both over one vocabulary")
    return lambda tokens: p, lambda tokens: q, f"p = {request.p}, q = {request.q} after every token"


def _law(option: str, text: str | None) -> Any:
    import torch

    try:
        law = [float(part) for part in (text or "").split(",")]
    except ValueError:
        law = []
    if not 2 <= len(law) <= 64 or any(not 0 <= x <= 1 for x in law) or abs(sum(law) - 1) > 1e-9:
        raise InputError(
            f"{option} as 2 to 64 probabilities that sum to 1", repr(text)[:80], "write them as 0.5,0.3,0.2"
        )
    return torch.tensor(law, dtype=torch.float64)


def _random(request: Request) -> tuple[Next, Next, str]:
    """Laws that depend on the text so far, which constant ones would not show all of."""
    from specdecode_ref.coins import Coins
    from specdecode_ref.fidelity.laws import definition
    from specdecode_ref.models.table import TableModel
    from specdecode_ref.sampling import SamplingRule

    vocab = request.random or 0
    if not 2 <= vocab <= 64:
        raise InputError("--random with a vocabulary of 2 to 64 tokens", vocab, "use a small one")
    Coins(request.seed)
    seeds = (2 * request.seed % 2**63, (2 * request.seed + 1) % 2**63)
    p, q = (
        definition(TableModel.random(vocab, order=2, scale=1.0, seed=seed), (0, 1), SamplingRule()) for seed in seeds
    )
    return p, q, f"random laws over {vocab} tokens, seed {request.seed}"


def _on_trace(request: Request) -> tuple[str, list[Row]]:
    import torch

    from specdecode_ref.fidelity.compare import on_rounds
    from specdecode_ref.fidelity.replay import replayed
    from specdecode_ref.models import zoo
    from specdecode_ref.trace_file import read_trace

    checks.at_least_one("--rounds", request.rounds)
    trace = read_trace(request.trace or "")
    name, dtype = checks.recorded_model(request.model, trace), checks.recorded_dtype(request.dtype, trace)
    with screen.status(f"Running {screen.one_line(name)} again"):
        target = zoo.load(name, dtype=dtype, device="cpu").model
        draft_name = request.draft_model
        draft_model = (lambda: zoo.load(draft_name, dtype=dtype).model) if draft_name else None
        drafted = (pair for pair in replayed(trace, target, draft_model) if len(pair[0]) > 1)
        rounds = list(islice(drafted, request.rounds))
        torch.set_num_threads(1)  # thousands of small sums: threads would only wait for each other
        rows = on_rounds(rounds)
    about = f"{len(rounds)} drafts of {request.trace}; exact over the coins, on these drafts"
    return screen.one_line(about), rows


def _as_json(row: Row) -> dict[str, Any]:
    law = None if row.law is None else [[list(tokens), mass] for tokens, mass in sorted(row.law.items())]
    return {**asdict(row), "law": law}


def _show(about: str, rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table(title=screen.one_line(about), title_justify="left")
    for head in ("verifier", "keeps the law", "accepted", "tau", "TV from the target", "source"):
        table.add_column(head, justify="right" if head in ("accepted", "tau", "TV from the target") else "left")
    for row in rows:
        law = "yes" if row.lossless else "NO, lossy"
        if row.objection or row.accepted is None:
            table.add_row(row.verifier, law, "not", "applicable", "", f"{row.objection}")
            continue
        distance = "-" if row.tv is None else "0 (rounding)" if row.tv < 1e-12 else f"{row.tv:.4f}"
        table.add_row(row.verifier, law, f"{row.accepted:.4f}", f"{row.accepted + 1:.4f}", distance, row.source)
    screen.console().print(table)
