"""The padded records of a batch: B requests, trees of at most N nodes, a vocabulary of V tokens.

What one request calls a `SamplingRule`, a `DraftTree` and a `Verdict` is a row of `Rules`, `Drafts` and `Verdicts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

import torch
from torch import Tensor

from specdecode_ref.errors import InputError, NotApplicableError, NumericalError
from specdecode_ref.sampling import Order, SamplingRule
from specdecode_ref.types import Draw, Kind, Test, Verdict

DRAWS: tuple[Draw, ...] = get_args(Draw)
"""How a node was drawn, as the number that `Drafts.draws` holds: 0 with replacement, 1 without, 2 deterministic."""

WITH, WITHOUT, DETERMINISTIC = range(3)

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Where a round's last token came from, as the number in `Verdicts.kind`: 0 bonus, 1 residual, 2 target."""

BONUS, RESIDUAL, TARGET = range(3)

FINE, NOT_A_LAW, NOT_DRAWN = range(3)
"""The status of a request. NOT_A_LAW: a row of logits that was needed has NaN, +inf or nothing finite. NOT_DRAWN: a
sibling said to be drawn without replacement cannot have been, its q_eff is 0."""

_KNOWN = ("temperature", "top_k", "top_p", "min_p", "order", "eos")
"""The parts of a sampling rule that a row of `Rules` has; `eos` plays no part in a law without `min_new_tokens`."""


@dataclass(frozen=True)
class Rules:
    """One sampling rule a row, on the device of the logits.

    temperature: float64 [R], 0 is greedy. top_k: int64 [R], 0 keeps all. top_p, min_p: float64 [R].
    order:       of the rules, the same for all rows.
    plain:       no row has a top-k, top-p or min-p: known on the host, so that nothing is launched for them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    order: Order = "transformers"
    plain: bool = False

    @classmethod
    def of(cls, rules: Sequence[SamplingRule], device: torch.device | str = "cpu") -> Rules:
        """Raises NotApplicableError for what depends on the text (penalties, bias, bad words, min_new_tokens)."""
        if not rules:
            raise InputError("at least one sampling rule", "none", "pass one a request")
        for rule in rules:
            strange = [f.name for f in fields(rule) if f.name not in _KNOWN and getattr(rule, f.name) != f.default]
            if strange:
                do = "use the PyTorch backend"
                raise NotApplicableError("a rule of temperature, top_k, top_p and min_p", ", ".join(strange), do)
        orders = {rule.order for rule in rules}
        if len(orders) > 1:
            raise NotApplicableError("one order of rules in a batch", ", ".join(sorted(orders)), "decode them apart")

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(rule, name) for rule in rules], dtype=dtype, device=device)

        return cls(
            column("temperature", torch.float64),
            column("top_k", torch.int64),
            column("top_p", torch.float64),
            column("min_p", torch.float64),
            orders.pop(),
            all((rule.top_k, rule.top_p, rule.min_p) == (0, 1, 0) for rule in rules),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    def row(self, i: int) -> SamplingRule:
        """The rule of one row, on the host."""
        return SamplingRule(
            temperature=float(self.temperature[i]),
            top_k=int(self.top_k[i]),
            top_p=float(self.top_p[i]),
            min_p=float(self.min_p[i]),
            order=self.order,
        )

    def select(self, rows: Tensor) -> Rules:
        """The rules of these rows, int64 [R]."""
        return self._mapped(lambda column: column.index_select(0, rows))

    def repeat(self, times: int) -> Rules:
        """Every row `times` times in a row: the rules of the B * N rows of logits [B, N, V]."""
        return self._mapped(lambda column: column.repeat_interleave(times))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Rules:
        return replace(
            self,
            temperature=change(self.temperature),
            top_k=change(self.top_k),
            top_p=change(self.top_p),
            min_p=change(self.min_p),
        )


@dataclass(frozen=True)
class Drafts:
    """B draft trees, padded to N nodes.

    tokens:  int64 [B, N]; node 0 is the root. -1: there is no node here, nor anything below it.
    parents: int64 [B, N], -1 at the root, parents before their children. What hangs on no node is none.
    draws:   int64 [B, N], indices into DRAWS; of no meaning at the root.
    logits:  [B, N, V_d], what the draft drew the children of each node from under the row's own rule. None where all
             nodes are deterministic. V_d need not be V: a token that one side lacks has mass 0 there.
    lse:     float32 [B, N], the log-sum-exp of the draft's scores (logits / temperature, as far as the rule keeps
             them), where the draft knew it; saves a kernel one read of `logits`, and the reference needs none.
    """

    tokens: Tensor
    parents: Tensor
    draws: Tensor
    logits: Tensor | None = None
    lse: Tensor | None = None

    @classmethod
    def chains(cls, tokens: Tensor, logits: Tensor | None = None, lse: Tensor | None = None) -> Drafts:
        """Chains of drafted tokens, tokens [B, N], the root first; deterministic where no logits are given."""
        nodes = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        draw = DETERMINISTIC if logits is None else WITH
        return cls(tokens, nodes.expand_as(tokens), torch.full_like(tokens, draw), logits, lse)


@dataclass(frozen=True)
class Verdicts:
    """What became of B drafts.

    path:   int64 [B, N], the accepted nodes, the root first, -1 behind them.
    length: int64 [B], how many they are, the root included: as many tokens as the round emits.
    token:  int64 [B], the last token of the round; -1 where the status is not FINE.
    kind:   int64 [B], an index into KINDS.
    p_eff, q_eff: float64 [B, N], what each node was tested with (see `types.Test`); NaN where it was not tested.
    status: int64 [B], FINE, NOT_A_LAW or NOT_DRAWN.
    """

    path: Tensor
    length: Tensor
    token: Tensor
    kind: Tensor
    p_eff: Tensor
    q_eff: Tensor
    status: Tensor

    def require_fine(self) -> None:
        """Raises NumericalError or NotApplicableError where a request has no verdict. Reads from the device."""
        for b, status in enumerate(self.status.tolist()):
            if status == NOT_A_LAW:
                came = f"NaN, +inf or nothing finite in request {b}"
                raise NumericalError("logits with a finite maximum", came, "check the model's weights")
            if status == NOT_DRAWN:
                came, do = f"a token of q_eff 0 in request {b}", "draw no more siblings than q has tokens, each once"
                raise NotApplicableError("siblings drawn without replacement from the support of q", came, do)

    def verdicts(self, accept_coins: Tensor, upwards: bool = False) -> list[Verdict]:
        """One `Verdict` a request, without the law its token came from. Raises as `require_fine` does.

        upwards: the rule tests the end of a path first, as block verification does.
        """
        self.require_fine()
        columns = (self.path, self.length, self.token, self.kind, self.p_eff, self.q_eff, accept_coins)
        none = torch.empty(0)
        out = []
        for nodes, length, token, kind, p, q, u in zip(*(column.tolist() for column in columns), strict=True):
            path = tuple(nodes[:length])
            tested = [node for node in range(1, len(p)) if p[node] == p[node]][:: -1 if upwards else 1]
            tests = tuple(Test(node, p[node], q[node], u[node], node in path) for node in tested)
            out.append(Verdict(path, token, KINDS[kind], tests, none))
        return out
