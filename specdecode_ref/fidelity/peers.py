"""Verifiers of other projects, each wrapped in the few lines that the conformance kit needs, and examined as they are.

    specdecode fidelity --batched --verifier specdecode_ref.fidelity.peers:transformers
    specdecode fidelity --batched --verifier specdecode_ref.fidelity.peers:flashspec

Neither takes coins, so their laws are sampled. `transformers` draws from torch's global generator, which gets the seed
before every batch, and judges one row at a time.
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
