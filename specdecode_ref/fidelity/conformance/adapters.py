"""Functions as engines have them, batched and padded, made into something the conformance kit can ask.

A parameter is known by its name. B rows, at most K drafted tokens a row, a vocabulary of V:

    draft token ids [B, K] int64, -1 behind a row's last draft
        draft_token_ids draft_ids draft_tokens draft_input_ids candidate_ids candidate_tokens candidate_input_ids
        proposal_ids proposed_ids proposed_tokens spec_token_ids speculative_tokens drafts draft ids x
    draft probabilities [B, K, V], or none: then every draft is deterministic
        draft_probs draft_probabilities draft_dist proposal_probs candidate_probs drafter_probs q q_probs probs_q
        as logarithms: draft_logits draft_logprobs candidate_logits proposal_logits q_logits
    target probabilities [B, K + 1, V], row n being the law after n drafted tokens
        target_probs target_probabilities target_dist target_with_bonus_probs verifier_probs p p_probs probs_p
        as logarithms: target_logits target_logprobs logits new_logits verifier_logits p_logits
    uniforms in [0, 1)
        one for all, [B, K + 1], the last being the emitted token's:
            uniforms uniform uniform_samples uniform_probs u us coins rand random_numbers
        accept [B, K]: accept_uniforms accept_uniform accept_coins accept_u u_accept uniforms_accept accept_rand r
        emit [B, K + 1] or [B], whichever the function takes: emit_uniforms emit_uniform emit_coins emit_u u_emit
            uniforms_emit emit_rand sample_uniforms residual_uniforms resample_uniforms recover_uniforms bonus_uniforms
    or a torch.Generator: generator gen rng; or an int: seed
    and, where asked for, how many drafts each row has [B]: num_draft_tokens num_drafts draft_lengths draft_lens lengths
        and a bonus token, drawn from the target's law after a row's last draft [B]:
            bonus_token_ids bonus_ids bonus_tokens

What lies behind a row's last draft (laws, uniforms) is arbitrary and must not matter. The function returns token ids
[B, K + 1] padded with -1, or (token ids, how many drafts were accepted [B]), or a list of lists. All floats are
float32, so that laws are judged to `TOLERANCE`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.conformance.contract import (
    Answer,
    Breach,
    Deadline,
    OutOfTime,
    Question,
    Watch,
    raised,
    shown,
)
from specdecode_ref.fidelity.conformance.emissions import emitted_rows
from specdecode_ref.tree import DraftTree

TOLERANCE = 5e-6
LAST = 1 - 2.0**-24
"""The largest float32 coin."""

ALIASES: dict[str, tuple[str, ...]] = {
    "draft_ids": (
        *("draft_token_ids", "draft_ids", "draft_tokens", "draft_input_ids", "candidate_ids", "candidate_tokens"),
        *("candidate_input_ids", "proposal_ids", "proposed_ids", "proposed_tokens", "spec_token_ids"),
        *("speculative_tokens", "drafts", "draft", "ids", "x"),
    ),
    "draft_probs": (
        *("draft_probs", "draft_probabilities", "draft_dist", "proposal_probs", "candidate_probs", "drafter_probs"),
        *("q", "q_probs", "probs_q"),
    ),
    "draft_logits": ("draft_logits", "draft_logprobs", "candidate_logits", "proposal_logits", "q_logits"),
    "target_probs": (
        *("target_probs", "target_probabilities", "target_dist", "target_with_bonus_probs", "verifier_probs"),
        *("p", "p_probs", "probs_p"),
    ),
    "target_logits": ("target_logits", "target_logprobs", "logits", "new_logits", "verifier_logits", "p_logits"),
    "uniforms": (
        *("uniforms", "uniform", "uniform_samples", "uniform_probs", "u", "us", "coins", "rand", "random_numbers"),
    ),
    "accept": (
        *("accept_uniforms", "accept_uniform", "accept_coins", "accept_u", "u_accept", "uniforms_accept"),
        *("accept_rand", "r"),
    ),
    "emit": (
        *("emit_uniforms", "emit_uniform", "emit_coins", "emit_u", "u_emit", "uniforms_emit", "emit_rand"),
        *("sample_uniforms", "residual_uniforms", "resample_uniforms", "recover_uniforms", "bonus_uniforms"),
    ),
    "generator": ("generator", "gen", "rng"),
    "seed": ("seed",),
    "lengths": ("num_draft_tokens", "num_drafts", "draft_lengths", "draft_lens", "lengths"),
    "bonus": ("bonus_token_ids", "bonus_ids", "bonus_tokens"),
}
"""The names by which each thing is known, none twice."""

_ROLES = {alias: role for role, aliases in ALIASES.items() for alias in aliases}


def roles(function: Callable[..., Any]) -> dict[str, str]:
    """{role: parameter}. Raises InputError for required parameters that have no known name, and for missing ones."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InputError("a function with a signature", shown(function), "wrap it in one of a few lines") from None
    found: dict[str, str] = {}
    unknown = []
    for parameter in parameters:
        role = _ROLES.get(parameter.name.lower())
        if role and parameter.kind is not parameter.VAR_POSITIONAL and parameter.kind is not parameter.VAR_KEYWORD:
            found.setdefault(role, parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            unknown.append(parameter.name)
    if "uniforms" in found and "emit" in found:
        found.setdefault("accept", found.pop("uniforms"))
    missing = [] if "draft_ids" in found else ["draft ids"]
    missing += [] if {"target_probs", "target_logits"} & found.keys() else ["target probabilities or logits"]
    whole = {"uniforms", "generator", "seed"} & found.keys() or {"accept", "emit"} <= found.keys()
    missing += [] if whole else ["uniforms, a generator or a seed"]
    if unknown or missing:
        came = "; ".join(
            f"{what} {', '.join(names)}" for what, names in (("unknown:", unknown), ("missing:", missing)) if names
        )
        raise InputError(
            "parameters by the names of specdecode_ref.fidelity.conformance.adapters",
            came,
            "wrap the function in one of a few lines",
        )
    return found


class Engine:
    """An `Asker` for a batched function whose coins are given: every question is a row of a batch."""

    chains_only = True
    step = 1.3e-7

    def __init__(self, function: Callable[..., Any], watch: Watch, deadline: Deadline) -> None:
        self.calls, self.deadline = 0, deadline
        self.roles = roles(function)
        self._function, self._watch = function, watch
        self._rng = random.Random(0)
        self.emit_by_place = True
        self.seed = 0

    @property
    def takes_coins(self) -> bool:
        """True where the uniforms are arguments; otherwise only samples can be had."""
        return bool({"uniforms", "accept"} & self.roles.keys())

    @property
    def takes_laws(self) -> bool:
        """True where the draft's laws are arguments; otherwise every draft counts as deterministic."""
        return bool({"draft_probs", "draft_logits"} & self.roles.keys())

    @property
    def laws_required(self) -> bool:
        """True where it cannot be called without the draft's laws."""
        name = self.roles.get("draft_probs") or self.roles.get("draft_logits")
        return bool(name) and inspect.signature(self._function).parameters[str(name)].default is inspect.Parameter.empty

    def settle(self) -> None:
        """Find out whether the emit uniforms are wanted as [B, K + 1] or as [B]."""
        if "emit" not in self.roles:
            return
        law = torch.full((5,), 0.2, dtype=torch.float64)
        drafts = [DraftTree.chain(0, (1, 2), (law, law) if self.takes_laws else None)] * 4
        probe = [Question(d, law.expand(3, 5).contiguous(), (0.5,) * 3, (0.3,) * 3) for d in drafts]
        for by_place in (True, False):
            self.emit_by_place = by_place
            try:
                self.ask(probe)
                return
            except Breach:
                continue
        self.emit_by_place = True

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """See `Asker`. Drafts of one kind, laws given or not, and of one vocabulary share a batch."""
        kinds: dict[tuple[int, bool], list[int]] = {}
        for i, question in enumerate(questions):
            kinds.setdefault((question.p.shape[-1], _has_laws(question.draft)), []).append(i)
        answers: dict[int, Answer] = {}
        for (_, laws), rows in kinds.items():
            for start in range(0, len(rows), 4096):
                part = rows[start : start + 4096]
                answers |= dict(zip(part, self.batch([questions[i] for i in part], laws), strict=True))
        return [answers[i] for i in range(len(questions))]

    def batch(self, rows: Sequence[Question], laws: bool, width: int | None = None) -> list[Answer]:
        """One call."""
        longest = max(1, *(len(row.draft) - 1 for row in rows))
        k = longest + self._rng.randrange(2) if width is None else max(width, longest)
        lengths = [len(row.draft) - 1 for row in rows]
        emissions = self.invoke(self._arguments(rows, k, laws), rows[0], lambda i: rows[i])
        answers = []
        for row, n, tokens in zip(rows, lengths, emissions, strict=True):
            if len(tokens) > n + 1 or tuple(tokens[:-1]) != row.draft.tokens[1 : len(tokens)]:
                came = f"{tokens} came for the draft {row.draft.tokens[1:]}: all but the last must be accepted"
                raise Breach("not a path", came, row, tokens)
            answers.append(Answer(tuple(range(len(tokens))), tokens[-1], self._reads(row)))
        return answers

    def invoke(
        self, made: Mapping[str, Any], watched: Question, row: Callable[[int], Question | None]
    ) -> list[list[int]]:
        """Call the function with these arguments by role: the tokens that each row emits.

        watched: what to note as the input. row: the input that row i stands for, in a finding.
        """
        if self.deadline.passed():
            raise OutOfTime
        given = {name: made[role] for role, name in self.roles.items()}
        before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
        b, k = made["draft_ids"].shape
        self.calls += 1
        self._watch.enter(watched)
        try:
            found = emitted_rows(self._function(**given), b, k, made["target_logits"].shape[-1], row)
        except Breach:
            raise
        except BaseException as error:
            raise raised(error, watched) from None
        finally:
            self._watch.leave()
        for name, value in before.items():
            if not torch.equal(given[name].nan_to_num(-1), value.nan_to_num(-1)):
                raise Breach("mutates its input", f"it changes '{name}' in place", watched)
        return found

    def _arguments(self, rows: Sequence[Question], k: int, laws: bool) -> dict[str, Any]:
        """The arguments by parameter. Behind a row's last draft stand laws and coins of no meaning."""
        b, v = len(rows), rows[0].p.shape[-1]
        noise = torch.Generator().manual_seed(self._rng.randrange(1 << 30))
        ids = torch.full((b, k), -1, dtype=torch.int64)
        q = torch.rand(b, k, v, generator=noise, dtype=torch.float64).pow_(3).softmax(-1)
        p = torch.rand(b, k + 1, v, generator=noise, dtype=torch.float64).pow_(3).softmax(-1)
        accept = torch.rand(b, k, generator=noise, dtype=torch.float64)
        emit = torch.rand(b, k + 1, generator=noise, dtype=torch.float64)
        for i, row in enumerate(rows):
            n = len(row.draft) - 1
            p[i, : n + 1] = row.p
            emit[i, : n + 1] = torch.tensor(row.emit, dtype=torch.float64)
            if n:
                ids[i, :n] = torch.tensor(row.draft.tokens[1:])
                accept[i, :n] = torch.tensor(row.accept[1:], dtype=torch.float64)
                if laws:
                    q[i, :n] = torch.stack([law for law in row.draft.q[:n] if law is not None])
        lengths = [len(row.draft) - 1 for row in rows]
        made = self.floats(ids, q if laws else None, p) | {"lengths": torch.tensor(lengths)}
        made["accept"], made["emit"] = _coins(accept), _coins(emit[:, 0] if self.one_emit else emit)
        made["uniforms"] = _coins(torch.cat([accept, emit[:, :1]], 1))
        last = p[range(b), lengths]
        made["bonus"] = drawn(last, emit[:, 0] if self.one_emit else emit[range(b), lengths])
        return made

    def floats(self, ids: Tensor, q: Tensor | None, p: Tensor) -> dict[str, Any]:
        """The draft and the laws as an engine holds them, with a fresh generator and the seed."""
        return {
            "draft_ids": ids,
            "draft_probs": None if q is None else q.float(),
            "draft_logits": None if q is None else q.float().log(),
            "target_probs": p.float(),
            "target_logits": p.float().log(),
            "generator": torch.Generator().manual_seed(self.seed),
            "seed": self.seed,
        }

    @property
    def one_emit(self) -> bool:
        """True where a row has a single coin for its last token."""
        return "uniforms" in self.roles or not self.emit_by_place

    def _reads(self, row: Question) -> tuple[int, ...]:
        n = len(row.draft)
        emits = range(n, n + 1) if self.one_emit else range(n, n + row.draft.depth + 1)
        return (*range(1, n), *emits) if self.takes_coins else ()

    def place(self, key: int, answer: Answer, draft: DraftTree) -> tuple[str, int, bool]:
        """See `Asker`."""
        if key < len(draft):
            return "accept", key, False
        return "emit", answer.path[-1] if self.one_emit else min(key - len(draft), answer.path[-1]), True

    def unspent(self, key: int, answer: Answer, draft: DraftTree) -> bool:
        """See `Asker`. An engine draws new uniforms every round."""
        return False

    def check_inputs(self) -> None:
        """See `Asker`. Every call checks its own."""


def _has_laws(draft: DraftTree) -> bool:
    return all(draw != "deterministic" for draw in draft.draws)


def _coins(u: Tensor) -> Tensor:
    """float32, and never rounded up to 1."""
    return u.float().clamp_(max=LAST)


def drawn(law: Tensor, u: Tensor) -> Tensor:
    """A token for each row of laws [B, V] and coins [B]."""
    cdf = law.cumsum(-1)
    return torch.searchsorted(cdf, (u.to(cdf.dtype) * cdf[:, -1])[:, None], right=True)[:, 0].clamp_(
        max=law.shape[-1] - 1
    )
