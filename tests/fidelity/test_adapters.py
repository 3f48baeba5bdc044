"""Batched functions as engines have them: found by their parameters' names, judged row by row or by samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.conformance import examine
from specdecode_ref.fidelity.conformance.adapters import ALIASES, roles
from specdecode_ref.fidelity.conformance.generators import Source

BRIEF: dict[str, Any] = {"batched": True, "vocab": 3, "samples": 60_000}


def judged(ids: Tensor, q: Tensor, p: Tensor, accept: Tensor, emit: Tensor, bug: str = "") -> Tensor:
    """Rejection sampling of a padded batch, with one bug if told so. Returns [B, K + 1]."""
    b, k = ids.shape
    valid = ids >= 0
    x = ids.clamp(min=0)[..., None]
    p_x, q_x = (rows[:, :k].gather(2, x)[..., 0] for rows in (p, q))
    passed = accept * q_x < p_x
    if bug != "accepts padding":
        passed &= valid
    n = passed.long().cumprod(1).sum(1)
    lengths = valid.sum(1)
    rows = torch.arange(b)
    law = p[rows, n] if bug != "row off by one" else p[rows, (n - 1).clamp(min=0)]
    rejected = n < lengths if bug != "reads the padding" else n < k
    taken = q[rows, n.clamp(max=k - 1)] * rejected[:, None]
    left = (law - taken).clamp(min=0) if bug != "residual of the batch" else (law - taken.mean(0)).clamp(min=0)
    left = torch.where(left.sum(1, keepdim=True) > 0, left, law)
    cdf = left.cumsum(1)
    u = emit if bug != "coin reused" else accept[rows, n.clamp(max=k - 1)]
    token = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0].clamp(max=p.shape[-1] - 1)
    out = torch.where(torch.arange(k) < n[:, None], ids, -1)
    out = torch.cat([out, torch.full((b, 1), -1)], 1)
    out[rows, n] = token
    return out


def one_uniform(bug: str = "") -> Callable[..., Any]:
    def engine(draft_token_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        return judged(draft_token_ids, draft_probs, target_probs, uniforms[:, :-1], uniforms[:, -1], bug)

    return engine


def a_coin_a_row(draft_ids: Tensor, q: Tensor, target_logits: Tensor, accept_uniforms: Tensor, emit_u: Tensor) -> Any:
    out = judged(draft_ids, q, target_logits.softmax(-1), accept_uniforms, emit_u)
    return out, (out >= 0).sum(1) - 1


def a_coin_a_place(draft_ids: Tensor, q: Tensor, p: Tensor, accept_coins: Tensor, emit_coins: Tensor) -> Any:
    n = (judged(draft_ids, q, p, accept_coins, emit_coins[:, 0]) >= 0).sum(1) - 1
    out = judged(draft_ids, q, p, accept_coins, emit_coins.gather(1, n[:, None])[:, 0])
    return [[x for x in row if x >= 0] for row in out.tolist()]


def certain(draft_ids: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
    q = torch.nn.functional.one_hot(draft_ids.clamp(min=0), target_probs.shape[-1]).to(target_probs.dtype)
    return judged(draft_ids, q, target_probs, uniforms[:, :-1], uniforms[:, -1])


@pytest.mark.parametrize("function", [one_uniform(), a_coin_a_row, a_coin_a_place, certain], ids=lambda f: f.__name__)
def test_a_right_function_passes(function: Callable[..., Any]) -> None:
    report = examine(function, **BRIEF | {"samples": 1000})
    assert report.lossless and report.tv is not None and report.tv < 5e-6, report.text()


@pytest.mark.parametrize(
    ("bug", "verdicts"),
    [
        ("accepts padding", {"not a path", "wrong length", "not a token"}),
        ("reads the padding", {"reads the padding"}),
        ("residual of the batch", {"mixes rows"}),
        ("row off by one", {"not lossless"}),
        ("coin reused", {"not lossless", "reads the padding"}),
    ],
)
def test_a_wrong_one_is_found(bug: str, verdicts: set[str]) -> None:
    report = examine(one_uniform(bug), **BRIEF | {"samples": 1000})
    assert report.verdict in verdicts, report.text()


def drawing(how: str) -> Callable[..., Any]:
    """A function that draws its own coins."""

    def seeded(draft_ids: Tensor, q: Tensor, p: Tensor, seed: int) -> Tensor:
        if how != "unseeded":
            torch.manual_seed(0 if how == "constant" else seed)
        rows = 1 if how == "shared" else len(draft_ids)
        u = torch.rand(rows, draft_ids.shape[1] + 1).expand(len(draft_ids), -1)
        return judged(draft_ids, q, p, u[:, :-1], u[:, -1], "coin reused" if how == "wrong" else "")

    def generated(draft_ids: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> Tensor:
        u = torch.rand(len(draft_ids), draft_ids.shape[1] + 1, generator=generator)
        return judged(draft_ids, q, p, u[:, :-1], u[:, -1])

    return generated if how == "generator" else seeded


@pytest.mark.parametrize(
    ("how", "verdict"),
    [
        ("generator", "lossless"),
        ("seed", "lossless"),
        ("wrong", "not lossless"),
        ("shared", "not lossless"),
        ("unseeded", "hidden randomness"),
        ("constant", "ignores its seed"),
    ],
)
def test_functions_that_draw_their_own_coins_are_sampled(how: str, verdict: str) -> None:
    report = examine(drawing(how), **BRIEF)
    assert report.verdict == verdict, report.text()
    assert verdict != "lossless" or (report.samples > 1000 and report.radius is not None)


def test_parameters_are_known_by_their_names() -> None:
    names = [name for aliases in ALIASES.values() for name in aliases]
    assert len(names) == len(set(names))
    assert roles(one_uniform()).keys() == {"draft_ids", "draft_probs", "target_probs", "uniforms"}

    def strange(draft_ids: Tensor, target_probs: Tensor, temperature: float, top_k: int, seed: int) -> Tensor:
        return draft_ids

    with pytest.raises(InputError, match="temperature, top_k"):
        roles(strange)
    with pytest.raises(InputError, match="missing: draft ids"):
        roles(lambda target_probs, seed: None)


def test_samples_of_the_target_complete_a_row() -> None:
    from specdecode_ref.fidelity.conformance.cases import WITH, Shape, case

    source = Source(case(Shape.chain(WITH, WITH), "smooth", 3, 0), 0)
    table = source.completed([[2]] * 20_000)
    seen = torch.bincount(torch.tensor(table[:, 1]), minlength=3) / 20_000
    assert torch.allclose(seen.double(), source.case.p((2,)), atol=0.02) and set(table[:, 0]) == {2}
