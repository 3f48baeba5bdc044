"""What the animation receives: the rounds of a trace in their own shape, and the text of every token they mention.

The animation draws numbers and plain text only, so a token's bytes are decoded here; it makes invisible characters
visible itself and never reads any of this as markup.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from specdecode_ref.trace import Header, Round, Trace
from specdecode_ref.trace_file import LOSSY

TOP = 6


def replay(trace: Trace, run: str) -> dict[str, Any]:
    """The whole of a finished trace; `run` names it, so that the animation keeps its place when it is sent again."""
    vocab = {token: text_of(base64.b64decode(encoded)) for token, encoded in trace.header.vocab.items()}
    return window(trace.header, trace.rounds, vocab.get, run)


def window(
    header: Header,
    rounds: Sequence[Round],
    text: Callable[[int], str | None],
    run: str,
    first: int = 0,
    live: bool = False,
) -> dict[str, Any]:
    """The rounds from `first` on. Windows may overlap and may be sent twice; the animation joins them by index."""
    tokens = set(header.prompt).union(*(mentioned(r) for r in rounds[first:]))
    return {
        "id": run,
        "header": {"method": header.method, "verifier": header.verifier, "level": header.level},
        "prompt": list(header.prompt),
        "vocab": {str(token): known for token in sorted(tokens) if (known := text(token)) is not None},
        "first": first,
        "rounds": [round_of(r) for r in rounds[first:]],
        "live": live,
    }


def round_of(r: Round) -> dict[str, Any]:
    """A round as in the file, without the laws that are not drawn: only the last token's own remains."""
    tip = r.path[-1]
    top = r.topk.get(tip)
    laws = {"p": top.p[:TOP], "residual": top.residual[:TOP] if top.residual else None} if top else None
    columns = {"draw": r.nodes.draw, "token": r.nodes.token, "q": r.nodes.q, "p": r.nodes.p}
    return {
        "committed": r.committed,
        "nodes": {"parent": r.nodes.parent} | {name: column for name, column in columns.items() if column},
        "tests": [
            {"node": t.node, "p_eff": t.p_eff, "q_eff": t.q_eff, "u": t.u, "accepted": t.accepted} for t in r.tests
        ],
        "path": r.path,
        "emitted": {"token": r.emitted.token, "kind": r.emitted.kind},
        "cut": {"reason": r.cut.reason, "kept": r.cut.kept} if r.cut else None,
        "topk": {str(tip): laws} if laws else {},
        "ns": dict(r.ns) or None,
    }


def text_of(raw: bytes) -> str:
    """The text of a token, or its bytes in hexadecimal where they are only a part of a character."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"‹{raw.hex(' ').upper()}›"


def summary(trace: Trace) -> str:
    """One line: what ran, and how well the guesses did."""
    counts = trace.footer.metrics
    rounds = len(trace.rounds)
    drafted, accepted, emitted = (
        int(counts[name])  # type: ignore[arg-type]
        for name in ("num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
    )
    rate = f"{accepted} of {drafted} draft tokens accepted" if drafted else "nothing drafted"
    tau = f"{emitted / rounds:.2f} tokens a round (tau)" if rounds else "no round"
    verifier = trace.header.verifier
    loss = f" · LOSSY: '{verifier}' does not keep the target's law" if verifier in LOSSY else ""
    return f"{emitted} tokens in {rounds} rounds · {tau} · {rate}{loss}"


def mentioned(r: Round) -> set[int]:
    """The tokens that drawing a round needs a text for."""
    top = r.topk.get(r.path[-1])
    laws = [law for law in (top.p, top.residual) if law] if top else []
    last = () if r.emitted.token is None else (r.emitted.token,)
    return {*r.nodes.token, *last, *(token for law in laws for token, _ in law)}
