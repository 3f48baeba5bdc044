"""What the verification kernels move and keep: bytes counted in the interpreter, and scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specdecode_kernels import round as round_file
from specdecode_kernels import row_stats, verify, verify_block, verify_chain, verify_tree
from torch import Tensor

from specdecode_ref.batched.records import Drafts, Rules
from tests.kernels.rounds import ALMOST_ONE, NAMES, PLAIN, a_round


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_what_the_formula_says(name: str, lse: bool, traffic: Any) -> None:
    """Of logits, where nearly all bytes are; single logits of drafted tokens, read once a program, come on top."""
    batch, nodes, vocab = 2, 2, 512
    round = a_round(name, 2, batch=batch, nodes=nodes, vocab=vocab, rules=(PLAIN,), ragged=0, lse=lse)
    logits, drafts, *rest = round
    rest[1][:, 1] = ALMOST_ONE  # both are rejected
    logits[:, 0, :] = -logits[:, 0, :]
    assert drafts.logits is not None
    with traffic(logits=logits, draft=drafts.logits) as moved:
        out = getattr(verify, f"verify_{name}")(logits, drafts, *rest)
    assert out.length.tolist() == [1, 1]
    kernels = {"chain": verify_chain, "block": verify_block, "tree": verify_tree}
    more: dict[str, Any] = {
        "chain": {"drawn": True, "residuals": batch},
        "block": {"drawn": True},
        "tree": {"inner": batch, "rejected": batch, "residuals": batch},
    }
    owed = kernels[name].bytes_moved(batch, nodes, vocab, 4, lse=lse, **more[name])
    seen = moved.loaded["logits"] + moved.loaded["draft"]
    assert 0.95 * owed < seen < owed


@pytest.mark.parametrize("rejected", [False, True])
def test_ten_to_fourteen_bytes_a_token(rejected: bool, traffic: Any) -> None:
    """A request reads each of its 5 rows once, 10 bytes a token of the vocabulary, and the pair of a rejection again.

    On top, less the wider the vocabulary: the block that the coin falls on, 2 blocks in a residual.
    """
    batch, nodes, vocab = 1, 5, 16384
    block, _ = row_stats.tile(vocab)
    logits, drafts, rules, accept, emit = a_round(
        "chain", 6, batch=batch, nodes=nodes, vocab=vocab, dtype=torch.bfloat16, rules=(PLAIN,), ragged=0, lse=True
    )
    accept[:] = 0.0
    accept[:, 3] = ALMOST_ONE if rejected else 0.0
    assert drafts.logits is not None
    logits[0, 2, drafts.tokens[0, 3]] = -4.0  # p < q there
    with traffic(logits=logits, draft=drafts.logits) as moved:
        out = verify.verify_chain(logits, drafts, rules, accept, emit)
    assert out.length.tolist() == [3 if rejected else 5]
    owed = 14 + 4 * block / vocab if rejected else 10 + 2 * block / vocab
    read = (moved.loaded["logits"] + moved.loaded["draft"]) / (batch * vocab)
    assert owed <= read < owed + 0.05
    assert moved.bytes / (batch * vocab) < owed + 0.8  # statistics: read by every program


@pytest.mark.parametrize("name", NAMES)
def test_scratch_of_a_large_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1 MB, the verdicts included, for 128 requests with 4 drafted tokens each out of 128,256."""
    batch, nodes, vocab = 128, 5, 128_256
    row = torch.zeros(vocab, dtype=torch.bfloat16).expand(batch, nodes, vocab)
    coins, allocated = torch.zeros(batch, nodes, dtype=torch.float64), []
    real = round_file.Round.empty

    def empty(self: round_file.Round, *shape: int, dtype: torch.dtype) -> Tensor:
        allocated.append(real(self, *shape, dtype=dtype))
        return allocated[-1]

    class Idle:
        """A kernel that is launched and does nothing."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **arguments: None

    monkeypatch.setattr(round_file.Round, "empty", empty)
    monkeypatch.setattr(round_file, "verify_stats", Idle())
    for kernel in ("chain_emit", "block_surplus", "block_emit", "tree_emit"):
        monkeypatch.setattr(verify, kernel, Idle())
    drafts = Drafts.chains(torch.zeros(batch, nodes, dtype=torch.int64), row)
    getattr(verify, f"verify_{name}")(row, drafts, Rules.of([PLAIN] * batch), coins, coins)
    assert 0 < sum(x.nbytes for x in allocated) <= 1e6
