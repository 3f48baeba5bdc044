"""Verifiers of other projects, each wrapped in the few lines that the conformance kit needs, and examined as they are.

    specdecode fidelity --batched --time-limit 60 --verifier specdecode_ref.fidelity.peers:transformers
    ... :flashspec and :rotalabs, with those packages installed

None of them takes coins, so their laws are sampled. Those that draw from torch's global generator get the seed before
every batch, and judge one row at a time.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def transformers(draft_ids: Tensor, draft_logits: Tensor, target_logits: Tensor, seed: int) -> list[list[int]]:
    """`_speculative_sampling` of Hugging Face's transformers, the sampler of its assisted generation."""
    from transformers.generation.utils import _speculative_sampling

    torch.manual_seed(seed)
    out = []
    for ids, q, p in zip(draft_ids, draft_logits, target_logits, strict=True):
        n = int((ids >= 0).sum())
        if n == 0:  # without candidates its caller samples from the target
            out.append([int(torch.multinomial(p[0].softmax(-1), 1))])
            continue
        tokens, _ = _speculative_sampling(ids[None, :n], q[None, :n], n, p[None, : n + 1])
        out.append(tokens[0].tolist())
    return out


def flashspec(
    draft_ids: Tensor, draft_logprobs: Tensor, target_logprobs: Tensor, generator: Generator
) -> list[list[int]]:
    """`rejection_step` of flashspec, which takes rows of one length; the step of a row without a draft is ours."""
    from flashspec.sampling.rejection import rejection_step

    lengths = (draft_ids >= 0).sum(1)
    out: list[list[int]] = [[] for _ in lengths]
    for n in lengths.unique().tolist():
        rows = (lengths == n).nonzero()[:, 0]
        ids, q, p = draft_ids[rows, :n], draft_logprobs[rows, :n], target_logprobs[rows, : n + 1]
        if n == 0:
            steps = [(0, x) for x in torch.multinomial(p[:, 0].exp(), 1, generator=generator)[:, 0].tolist()]
        else:
            steps = rejection_step(ids, q, p, generator=generator).tolist()
        for i, drafted, (accepted, token) in zip(rows.tolist(), ids.tolist(), steps, strict=True):
            out[i] = [*drafted[:accepted], token]
    return out


def rotalabs(draft_ids: Tensor, draft_probs: Tensor, target_logits: Tensor, seed: int) -> list[list[int]]:
    """`rejection_sample` of rotalabs-accel, one drafted token a call as its docstring says; the bonus draw is ours.

    Not lossless in version 1.1.1: after a rejection it takes q away from p at the drafted token only.
    """
    from rotalabs_accel.speculative.sampling import rejection_sample

    torch.manual_seed(seed)
    out: list[list[int]] = []
    for ids, q, logits in zip(draft_ids, draft_probs, target_logits, strict=True):
        tokens: list[int] = []
        accepted = True
        for i, x in enumerate(ids[ids >= 0]):
            accepted, token = rejection_sample(logits[i].softmax(-1)[x], q[i, x], x, logits[i])
            tokens.append(int(token))
            if not accepted:
                break
        if accepted:
            tokens.append(int(torch.multinomial(logits[len(tokens)].softmax(-1), 1)))
        out.append(tokens)
    return out
