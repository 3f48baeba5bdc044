"""The contract of a verifier, held against code that nobody here has read: one call, and all that may be wrong with it.

`Caller` puts questions to a verifier of the documented signature, (draft, p, accept_coins, emit_coins) -> Verdict or
(path, token). What breaks the contract raises `Breach`, which has a name; what the verifier says is not its business
raises `Refusal`.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specdecode_ref.fidelity.cube import Lazy
from specdecode_ref.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Question:
    """One input: a draft, the target's laws p [N, V], accept coins [N] and emit coins [depth + 1]."""

    draft: DraftTree
    p: Tensor
    accept: tuple[float, ...]
    emit: tuple[float, ...]

    def data(self) -> dict[str, Any]:
        """As plain values for JSON; `Question.of` makes the question again."""
        d = self.draft
        q = [None if row is None else row.tolist() for row in d.q]
        laws = {"p": self.p.tolist(), "q": q}
        coins = {"accept_coins": list(self.accept), "emit_coins": list(self.emit)}
        return {"tokens": list(d.tokens), "parents": list(d.parents), "draws": list(d.draws), **laws, **coins}

    @classmethod
    def of(cls, data: dict[str, Any]) -> Question:
        """The question that `data` was made of."""
        q = tuple(None if row is None else torch.tensor(row, dtype=torch.float64) for row in data["q"])
        draft = DraftTree(tuple(data["tokens"]), tuple(data["parents"]), tuple(data["draws"]), q)
        p = torch.tensor(data["p"], dtype=torch.float64)
        return cls(draft, p, tuple(data["accept_coins"]), tuple(data["emit_coins"]))


class Answer(NamedTuple):
    """What came: the accepted path, the last token, which coins were read, in order, and the object itself.

    Coins are numbered: those of the nodes first, then the emit coins.
    """

    path: tuple[int, ...]
    token: int
    reads: tuple[int, ...] = ()
    said: Any = None

    @property
    def outcome(self) -> tuple[tuple[int, ...], int]:
        """What the law is about."""
        return self.path, self.token

    def tokens(self, draft: DraftTree) -> tuple[int, ...]:
        """The tokens that the round emits."""
        return (*(draft.tokens[node] for node in self.path[1:]), self.token)


class Breach(Exception):
    """The contract is broken. `name` is the finding; `question` the input that shows it, `came` what came."""

    def __init__(self, name: str, detail: str, question: Question | None = None, came: object = None) -> None:
        super().__init__(f"{name}: {detail}")
        self.name, self.detail, self.question, self.came = name, detail, question, came


class Refusal(Exception):
    """The verifier says that it does not judge such drafts."""


class OutOfTime(Exception):
    """The time for the whole examination is over."""


class Deadline:
    """The end of an examination: so many seconds of work, or five times as many by the clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._work, self._clock = time.process_time(), time.monotonic()
        self.share = 1.0

    def passed(self) -> bool:
        """True when it is time to stop, that is, when the `share` of the time that may be used now is used."""
        limit = self.share * self._seconds
        return time.process_time() - self._work > limit or time.monotonic() - self._clock > 5 * limit


class Watch(Protocol):
    """Told what is going on, so that a call that never returns leaves a trace."""

    def enter(self, question: Question) -> None:
        """A call begins."""
        ...

    def leave(self) -> None:
        """It has returned."""
        ...


class Asker(Protocol):
    """Puts questions to whatever is examined."""

    calls: int
    deadline: Deadline
    chains_only: bool
    step: float
    """Coins are resolved to this width."""

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers, in order. Raises Breach, Refusal or OutOfTime."""
        ...

    def place(self, key: int, answer: Answer, draft: DraftTree) -> tuple[str, int, bool]:
        """What coin `key` stands for: ("accept", node, False), or ("emit", node it follows, whether it is the last)."""
        ...

    def unspent(self, key: int, answer: Answer, draft: DraftTree) -> bool:
        """True for an emit coin that the next round will read too."""
        ...

    def check_inputs(self) -> None:
        """Raises Breach if any tensor that was handed over has changed."""
        ...


REFUSALS = frozenset({"NotApplicableError", "NotImplementedError"})
"""Names of exceptions by which a verifier says that a draft is outside its premises."""


class Caller:
    """An `Asker` for a verifier of the documented signature."""

    chains_only = False
    step = 1e-14

    def __init__(self, verify: Callable[..., Any], watch: Watch, deadline: Deadline) -> None:
        self.calls, self.deadline = 0, deadline
        self.lazy = True
        self._verify, self._watch = verify, watch
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._last: DraftTree | None = None
        self._tensors: list[Tensor] = []

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """See `Asker`."""
        return [self.put(question) for question in questions]

    def put(self, question: Question) -> Answer:
        """One call. The coins are read lazily where the verifier can do with any sequence, otherwise they are lists."""
        if self.deadline.passed():
            raise OutOfTime
        draft, p = question.draft, question.p
        if draft is not self._last:
            self._hold(draft, p)
        n = len(draft)
        reads: dict[int, None] = {}

        def read(key: int, u: float) -> float:
            reads[key] = None
            return u

        accept: Any = Lazy(n, lambda i: read(i, question.accept[i])) if self.lazy else list(question.accept)
        emit: Any = Lazy(draft.depth + 1, lambda i: read(n + i, question.emit[i])) if self.lazy else list(question.emit)
        versions = [t._version for t in self._tensors]
        self.calls += 1
        self._watch.enter(question)
        try:
            said = self._verify(draft, p, accept, emit)
            path, token = parsed(said, question)
        except Breach:
            raise
        except BaseException as error:
            raise raised(error, question) from None
        finally:
            self._watch.leave()
        if versions != [t._version for t in self._tensors]:
            raise Breach("mutates its input", "it changes a law of p or q in place", question)
        if not self.lazy and (accept != list(question.accept) or emit != list(question.emit)):
            raise Breach("mutates its input", "it changes a list of coins", question)
        return Answer(path, token, tuple(reads) if self.lazy else tuple(range(n + draft.depth + 1)), said)

    def place(self, key: int, answer: Answer, draft: DraftTree) -> tuple[str, int, bool]:
        """See `Asker`."""
        depth = key - len(draft)
        if depth < 0:
            return "accept", key, False
        return "emit", answer.path[min(depth, len(answer.path) - 1)], depth >= len(answer.path) - 1

    def unspent(self, key: int, answer: Answer, draft: DraftTree) -> bool:
        """See `Asker`. Emit coins belong to a position of the output, and a round uses as many as it emits tokens."""
        return key - len(draft) >= len(answer.path)

    def check_inputs(self) -> None:
        """See `Asker`. Also finds what bypasses torch's own record, such as a NumPy view."""
        for now, before in self._held.values():
            if not torch.equal(now.nan_to_num(-1), before.nan_to_num(-1)):
                raise Breach("mutates its input", "a law of p or q has changed behind torch's back", None)
        self._held.clear()
        self._last = None

    def _hold(self, draft: DraftTree, p: Tensor) -> None:
        self._last = draft
        self._tensors = [p, *(q for q in draft.q if q is not None)]
        for tensor in self._tensors:
            if id(tensor) not in self._held:
                self._held[id(tensor)] = tensor, tensor.clone()


def raised(error: BaseException, question: Question) -> Exception:
    """What an exception of the verifier means."""
    names = {cls.__name__ for cls in type(error).__mro__}
    message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if names & REFUSALS:
        return Refusal(message)
    return Breach("raises", message, question)


def parsed(said: Any, question: Question) -> tuple[tuple[int, ...], int]:
    """(path, token) of a Verdict or a pair. Raises Breach where it is neither, or not about this draft."""
    draft, vocab = question.draft, question.p.shape[-1]
    if hasattr(said, "path") and hasattr(said, "token"):
        path, token = said.path, said.token
    elif isinstance(said, tuple | list) and len(said) == 2:
        path, token = said
    else:
        raise Breach("wrong type", f"a Verdict or a pair (path, token) is due, not {shown(said)}", question, said)
    try:
        path = tuple(operator.index(node) for node in path)
        token = operator.index(token)
    except Exception:
        raise Breach(
            "wrong type", f"node and token numbers are due, not {shown((path, token))}", question, said
        ) from None
    steps = pairwise(path)
    if path[:1] != (0,) or any(not 0 < b < len(draft) or draft.parents[b] != a for a, b in steps):
        raise Breach("not a path", f"{list(path)[:40]} is no path from the root of the draft", question, said)
    if not 0 <= token < vocab:
        raise Breach("not a token", f"{token} is no token of a vocabulary of {vocab}", question, said)
    return path, token


def shown(value: object) -> str:
    """A value in a few words, whatever its own `repr` does."""
    try:
        return " ".join(f"{type(value).__name__} {value!r}".split())[:120]
    except Exception:
        return type(value).__name__


def shuffle_global_generators(seed: int) -> None:
    """Gives every global generator another state, so that a verifier that draws from one can be caught."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
