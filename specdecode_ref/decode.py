"""The decode loop: draft, one target forward, verdict, commit. Start reading here.

`autoregressive` and `speculative` return a `Generation`; both are a `Session`, which yields one `Step` a round for each
live sequence, so that text can be streamed, watched and cancelled. Plain decoding is the same loop with an empty draft.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import specdecode_ref
from specdecode_ref import backends, verify
from specdecode_ref import trace as traces
from specdecode_ref.coins import Coins
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.errors import InputError
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import Laws, SamplingRule
from specdecode_ref.sequence import Running
from specdecode_ref.stream import Piece, Stream
from specdecode_ref.trace import Footer, Header, ModelInfo, Nodes, Round, TopK, Trace
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Verdict


class Tokenizer(Protocol):
    """What decoding needs of a tokenizer."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, control tokens included."""
        ...

    def text_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text: none for control tokens."""
        ...


@dataclass(frozen=True)
class Generation:
    """What a decode returns. `text` is empty without a tokenizer."""

    tokens: tuple[int, ...]
    text: str
    trace: Trace


@dataclass(frozen=True)
class Step:
    """One round of one sequence (`row` of the batch), and the text that became certain in it."""

    row: int
    round: Round
    pieces: tuple[Piece, ...]


def autoregressive(model: Model, prompt: Sequence[int], **settings: Any) -> Generation:
    """Plain decoding: one token a target forward. Settings as in `Session`."""
    return Session(model, [prompt], **settings).run()[0]


def speculative(model: Model, drafter: Drafter, prompt: Sequence[int], **settings: Any) -> Generation:
    """Speculative decoding with the same output law as `autoregressive`. Settings as in `Session`.

    >>> from specdecode_ref.drafters.ngram import NGram
    >>> from specdecode_ref.models.table import TableModel
    >>> len(speculative(TableModel.random(5), NGram(), [1, 2, 3], max_new_tokens=8).tokens)
    8
    """
    return Session(model, [prompt], drafter, **settings).run()[0]


class Session:
    """Decodes a batch of prompts. Iterate for steps, or `run` to the end; `generation(row)` may be asked at any time.

    verifier:       a name out of `verify.VERIFIERS`, or "auto": `chain` for a chain, `tree` for anything else.
    rule:           one sampling rule for target and draft.
    seed:           with a sequence's number, the only source of randomness.
    sequences:      the numbers of the sequences, 0, 1, ... unless told; a sequence has the same output in any batch.
    max_new_tokens: at least 1; the model's context length ends a generation too.
    stop:           strings that end the text (needs a tokenizer); they are not part of it.
    level:          how much the trace records, 0 to 3.
    backend:        who plays the rounds: "torch" is this file; "auto" is another one where the model is on a CUDA
                    device and one is installed that can do the job (see `backends`).
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        drafter: Drafter | None = None,
        *,
        verifier: str = "auto",
        rule: SamplingRule | None = None,
        seed: int = 0,
        sequences: Sequence[int] | None = None,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
        level: int = 2,
        backend: str = backends.AUTO,
        target: ModelInfo | None = None,
        draft: ModelInfo | None = None,
    ) -> None:
        rule = rule or SamplingRule()
        rule.require_tokens_below(model.vocab_size)
        stop = (stop,) if isinstance(stop, str) else stop  # a string is a sequence of strings, but not of stop strings
        _check(model, prompts, drafter)
        if max_new_tokens < 1:
            raise InputError("max_new_tokens of 1 or more", max_new_tokens, "ask for at least one token")
        if stop and tokenizer is None:
            raise InputError("a tokenizer for stop strings", "none", "pass tokenizer=, or no stop strings")
        if level not in (0, 1, 2, 3):
            raise InputError("a trace level from 0 to 3", level, "choose one of them")
        self._verifier = None if verifier == "auto" else verify.get(verifier)
        self._job = backends.Job(model, drafter, verifier, rule, level)
        self._backend = backends.resolve(backend, self._job)
        self._model, self._drafter, self._rule, self._level = model, drafter, rule, level
        numbers = range(len(prompts)) if sequences is None else sequences
        if len(numbers) != len(prompts):
            raise InputError(f"{len(prompts)} sequence numbers, one a prompt", len(numbers), "pass as many as prompts")
        self._rows = [
            Running(
                prompt=tuple(map(int, prompt)),
                limit=min(len(prompt) + max_new_tokens, model.context_length),
                coins=Coins(seed, number),
                stream=Stream(tokenizer.text_bytes if tokenizer else lambda _: b"", stop),
            )
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        self._live = list(range(len(prompts)))
        self._tokenizer = tokenizer
        self._about = {
            "max_new_tokens": max_new_tokens,
            "target": target or ModelInfo(model.name),
            "draft": draft,
        }
        self._started = False
        self._rounds: backends.Rounds | None = None

    def __iter__(self) -> Iterator[Step]:
        if self._live and not self._started:
            self._start()
        while self._live:
            try:
                steps = self._round() if self._rounds is None else self._played(self._rounds)
            except BaseException:
                self._live = []  # the cache may stand in the middle of the round: nothing sound can follow
                raise
            yield from steps

    def run(self) -> list[Generation]:
        """Decode to the end."""
        for _ in self:
            pass
        return [self.generation(row) for row in range(len(self._rows))]

    def cancel(self, row: int) -> None:
        """Stop a sequence after the rounds it has had; the others go on."""
        if row in self._live:
            self._rows[row].cancel()
            self._leave([row])

    def _start(self) -> None:
        """Prefill everything but the roots; start the drafters."""
        begin = time.perf_counter_ns()
        if self._backend:
            prompts, limits, coins = zip(*((row.prompt, row.limit, row.coins) for row in self._rows), strict=True)
            self._rounds = self._backend.start(self._job, prompts, limits, coins)
        else:
            self._prefill()
        for row in self._rows:
            row.ns_prefill = time.perf_counter_ns() - begin
        self._started = True
        if len(self._live) < len(self._rows):  # some were cancelled before they began
            self._select(self._live)

    def _prefill(self) -> None:
        wanted = self._drafter.features if self._drafter else ()
        room = max(row.limit for row in self._rows) + 32
        self._cache = self._model.new_cache(len(self._rows), room)
        features: list[tuple[Tensor, ...]] = [() for _ in self._rows]
        if any(len(row.prompt) > 1 for row in self._rows):
            features = self._model.prefill([row.prompt[:-1] for row in self._rows], self._cache, wanted)
        if self._drafter:
            for row, seen in zip(self._rows, features, strict=True):
                row.proposer = self._drafter.start(row.prompt, self._rule, seen)

    def _round(self) -> list[Step]:
        """Draft, verify, commit: one round of every live sequence."""
        rows = [self._rows[i] for i in self._live]
        begin = time.perf_counter_ns()
        drafts = [row.propose() for row in rows]
        drafted = time.perf_counter_ns()
        wanted = self._drafter.features if self._drafter else ()
        logits, features = self._model.forward(
            _padded(drafts, self._model.device), [draft.parents for draft in drafts], self._cache, wanted
        )
        verified = time.perf_counter_ns()
        steps, paths = [], []
        for b, (i, row, draft) in enumerate(zip(self._live, rows, drafts, strict=True)):
            judging = time.perf_counter_ns()
            p, verdict = self._judge(row, draft, logits[b])
            if row.proposer:
                row.proposer.observe(verdict, [f[b, list(verdict.path)] for f in features])
            nodes = traces.columns(self._level, draft, p)
            largest = traces.largest_of(draft, p, verdict) if self._level >= 3 else {}
            sample = time.perf_counter_ns() - judging
            ns = {"draft": drafted - begin, "verify": verified - drafted, "sample": sample}
            steps.append(self._take(i, nodes, verdict, ns, largest))
            paths.append(verdict.path[: steps[-1].round.kept])
        self._cache.commit(paths)
        for row in rows:
            row.ns_total += time.perf_counter_ns() - begin
        self._leave([step.row for step in steps if step.round.cut])
        return steps

    def _played(self, rounds: backends.Rounds) -> list[Step]:
        """One round of every live sequence, on the device of a backend; it tells one time for all that it did."""
        begin = time.perf_counter_ns()
        played = rounds.play()
        ns = {"draft": 0, "verify": time.perf_counter_ns() - begin, "sample": 0}
        steps = [self._take(i, *one, ns) for i, one in zip(self._live, played, strict=True)]
        for i in self._live:
            self._rows[i].ns_total += time.perf_counter_ns() - begin
        self._leave([step.row for step in steps if step.round.cut])
        return steps

    def _take(
        self, i: int, nodes: Nodes, verdict: Verdict, ns: dict[str, int], largest: dict[int, TopK] | None = None
    ) -> Step:
        """Add a round to a sequence: its tokens, its text, its place in the trace."""
        row = self._rows[i]
        base = len(row.tokens)
        cut, pieces = row.take(nodes.token, verdict, self._rule.eos)
        row.rounds.append(traces.record(self._level, len(row.rounds), base, nodes, verdict, cut, ns, largest))
        return Step(i, row.rounds[-1], tuple(pieces))

    def _judge(self, row: Running, draft: DraftTree, logits: Tensor) -> tuple[Laws, Verdict]:
        """The target's laws after the draft's nodes [N], and the verdict on the draft."""
        tokens, base = tuple(row.tokens), len(row.tokens)
        p = Laws(logits, self._rule, lambda node: [*tokens, *draft.history(node)], len(row.prompt))
        verifier = self._verifier or verify.get("chain" if draft.is_chain else "tree")
        return p, verifier(draft, p, row.coins.accept(base, len(draft)), row.coins.emits(base, draft.depth + 1))

    def _leave(self, finished: Sequence[int]) -> None:
        """Finished and cancelled rows leave the batch."""
        if not finished:
            return
        stay = [b for b, i in enumerate(self._live) if i not in finished]
        self._live = [self._live[b] for b in stay]
        if self._live and self._started:
            self._select(stay)

    def _select(self, rows: Sequence[int]) -> None:
        (self._cache if self._rounds is None else self._rounds).select(rows)

    def generation(self, row: int = 0) -> Generation:
        """The result so far; a sequence that has not ended counts as cancelled."""
        r = self._rows[row]
        output = sum(past.kept for past in r.rounds)
        return Generation(tuple(r.tokens[len(r.prompt) :][:output]), r.text, self.trace(row))

    def trace(self, row: int = 0) -> Trace:
        """The trace so far, valid at any time."""
        r = self._rows[row]
        engine = {"name": "specdecode-ref", "version": specdecode_ref.__version__}
        header = Header(
            engine=engine | ({"backend": self._backend.name} if self._backend else {}),
            verifier=self._verifier.name if self._verifier else "tree" if any(map(_branches, r.rounds)) else "chain",
            method=self._drafter.name if self._drafter else "autoregressive",
            sampling=json.loads(json.dumps(asdict(self._rule))),
            seed=r.coins.seed,
            sequence=r.coins.sequence,
            drafting=dict(self._drafter.settings) if self._drafter else {},
            prompt=r.prompt,
            level=self._level,  # type: ignore[arg-type]
            **self._about,  # type: ignore[arg-type]
        )
        last = r.rounds[-1].cut if r.rounds else None
        footer = Footer(
            last.reason if last else "cancelled",
            traces.counts(r.rounds),
            {"prefill": r.ns_prefill, "total": r.ns_prefill + r.ns_total},
        )
        whole = Trace(header, tuple(r.rounds), footer)
        return whole.with_vocab(self._tokenizer.token_bytes) if self._tokenizer else whole


def _padded(drafts: Sequence[DraftTree], device: torch.device) -> Tensor:
    """The drafts' tokens [B, N], zeros behind the shorter ones."""
    width = max(map(len, drafts))
    return torch.tensor([[*d.tokens, *[0] * (width - len(d))] for d in drafts], device=device)


def _branches(r: Round) -> bool:
    """True where two drafted nodes share a parent; on chains `tree` and `chain` are the same rule."""
    return len(set(r.nodes.parent)) < len(r.nodes.parent)


def _check(model: Model, prompts: Sequence[Sequence[int]], drafter: Drafter | None) -> None:
    """Refuse prompts and drafters that do not fit the model, before it runs."""
    if len(prompts) == 0:
        raise InputError("at least one prompt", "none", "pass a list of prompts")
    for prompt in prompts:
        if len(prompt) == 0:
            raise InputError("a prompt of at least one token", "an empty one", "type some text")
        if len(prompt) >= model.context_length:
            raise InputError(
                f"a prompt shorter than the context of {model.context_length} tokens",
                f"{len(prompt)} tokens",
                "shorten it or choose a model with a longer context",
            )
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise InputError(
                f"token ids from 0 to {model.vocab_size - 1}",
                (min(prompt), max(prompt)),
                "use the model's tokenizer",
            )
    if drafter and drafter.vocab_size not in (None, model.vocab_size):
        raise InputError(
            f"a drafter with the target's vocabulary of {model.vocab_size} tokens",
            drafter.vocab_size,
            "choose a draft model of the same family",
        )
